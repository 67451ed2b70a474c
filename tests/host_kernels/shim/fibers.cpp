// A block's threads as fibers: one runs until it meets a barrier or an exchange or returns, then the next of
// its warp. A warp runs as far as it can before the next, so that they are out of step wherever no barrier holds them.
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include "block.h"
#include "sanitizers.h"

namespace shim {

namespace {

constexpr std::size_t kStack = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  void* fake_stack = nullptr;
  void* thread = nullptr;  // to ThreadSanitizer
};

std::vector<Fiber> fibers;  // kept from block to block, for their stacks
std::vector<Warp> warps;
Fiber scheduler{{}, nullptr};
Fiber* current = nullptr;
Body current_body{};
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_size = 0;

// Places through which one thread's work is ordered before another's, for ThreadSanitizer.
char block_begins, block_ends;
char barrier_places[2];  // taken in turn: a thread may be at the next barrier before all have left the last one
unsigned barriers = 0;   // opened so far

Lane& lane_of(unsigned thread) { return warps[thread / kWarp].lanes[thread % kWarp]; }

void enter(Fiber& fiber) {
  current = &fiber;
  leave(&scheduler.fake_stack, fiber.stack.get(), kStack);
  switch_to_thread(fiber.thread);
  swapcontext(&scheduler.context, &fiber.context);
  arrive(scheduler.fake_stack, nullptr, nullptr);
}

// Gives the turn back to the scheduler, and returns with the next one.
void wait() {
  Fiber& self = *current;
  leave(&self.fake_stack, scheduler_stack, scheduler_stack_size);
  switch_to_thread(scheduler.thread);
  swapcontext(&self.context, &scheduler.context);
  arrive(self.fake_stack, &scheduler_stack, &scheduler_stack_size);
}

void fiber_main() {
  arrive(nullptr, &scheduler_stack, &scheduler_stack_size);
  acquire(block_begins);
  current_body();
  lane_of(thread_index()).state = Lane::kReturned;
  release(barrier_places[barriers % 2]);  // who returns counts as arrived
  release(block_ends);
  leave(nullptr, scheduler_stack, scheduler_stack_size);
  switch_to_thread(scheduler.thread);
  setcontext(&scheduler.context);
}

void prepare(Fiber& fiber) {
  clean(fiber.stack.get(), kStack);
  if (!fiber.thread) fiber.thread = new_thread();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

// Runs a warp until all its threads wait at a barrier or have returned, its lanes in a new order for each exchange.
std::string run_warp(unsigned index, Order& order) {
  Warp& warp = warps[index];
  do {
    for (const unsigned i : order.of(kWarp)) {
      if (warp.lanes[i].state != Lane::kRunning) continue;
      threadIdx = thread_at(index * kWarp + i);
      enter(fibers[index * kWarp + i]);
    }
  } while (warp.settle());
  return warp.check();
}

// Lets the threads go on that wait at a barrier, and says whether there were any.
bool open_barrier(std::string& error) {
  std::vector<Place> waiting;
  for (Warp& warp : warps) {
    for (const Lane& lane : warp.lanes) {
      if (lane.state == Lane::kAtBarrier) waiting.push_back(lane.place);
    }
    warp.open_barrier();
  }
  ++barriers;
  error = check_barrier(waiting);
  return !waiting.empty();
}

}  // namespace

void sync_threads(const char* file, int line) {
  const unsigned thread = thread_index();
  lane_of(thread).wait_at_barrier(Place{thread, file, line});
  char& place = barrier_places[barriers % 2];
  release(place);
  wait();
  acquire(place);
}

unsigned exchange(const char* file, int line, unsigned mask, unsigned source, unsigned bits) {
  const unsigned thread = thread_index();
  Lane& lane = lane_of(thread);
  lane.exchange(Place{thread, file, line}, mask, source, bits);
  release(lane.places[lane.exchanges % 2]);
  wait();
  for (unsigned i = 0; i < kWarp; ++i) {
    if (lane.group >> i & 1u) acquire(warps[thread / kWarp].lanes[i].places[lane.odd >> i & 1u]);
  }
  return lane.bits;
}

const Gathered& gather(const char* file, int line, const unsigned* words, unsigned count) {
  const unsigned thread = thread_index(), self = thread % kWarp;
  Gathered& gathered = warps[thread / kWarp].gathered[lane_of(thread).gathers++ % 2];
  std::copy_n(words, count, gathered[self].begin());
  exchange(file, line, 0xFFFFFFFF, self, 0);
  return gathered;
}

std::string run_block(Body body, Order& order) {
  const unsigned threads = blockDim.x * blockDim.y;
  if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
  warps.assign(warps_of_block(), Warp{});
  for (unsigned i = 0; i < threads; ++i) {
    prepare(fibers[i]);
    lane_of(i).state = Lane::kRunning;
  }
  current_body = body;
  scheduler.thread = this_thread();
  release(block_begins);
  std::string error;
  do {
    for (const unsigned i : order.of(static_cast<unsigned>(warps.size()))) {
      error = run_warp(i, order);
      if (!error.empty()) return error;
    }
  } while (open_barrier(error) && error.empty());
  acquire(block_ends);
  return error;
}

void end_grid() {
  for (Fiber& fiber : fibers) {
    if (fiber.thread) end_thread(fiber.thread);
    fiber.thread = nullptr;
  }
}

}  // namespace shim
