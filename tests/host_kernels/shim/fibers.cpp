// A block's threads as fibers: one runs until it meets a barrier or an exchange or returns, then the next of
// its warp. A warp runs as far as it can before the next, so that they are out of step wherever no barrier holds them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "block.h"
#include "sanitizers.h"
#include "switch.h"

namespace shim {

namespace {

constexpr std::size_t kStack = 64 << 10;

struct Fiber {
  Context context;
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

// A barrier of some of the block's threads. The places are for ThreadSanitizer, taken in turn as those of the block's.
struct NamedBarrier {
  int threads = 0;  // that it waits for
  int arrived = 0;
  unsigned opened = 0;
  char places[2]{};
};
constexpr int kNamedBarriers = 16;
std::array<NamedBarrier, kNamedBarriers> named;  // the first is not used: it is the block's
std::string misuse;                              // of one of them, or a misaligned access

Lane& lane_of(unsigned thread) { return warps[thread / kWarp].lanes[thread % kWarp]; }

void enter(Fiber& fiber) {
  current = &fiber;
  leave(&scheduler.fake_stack, fiber.stack.get(), kStack);
  switch_to_thread(fiber.thread);
  switch_contexts(scheduler.context, fiber.context);
  arrive(scheduler.fake_stack, nullptr, nullptr);
}

// Gives the turn back to the scheduler, and returns with the next one.
void wait() {
  Fiber& self = *current;
  leave(&self.fake_stack, scheduler_stack, scheduler_stack_size);
  switch_to_thread(scheduler.thread);
  switch_contexts(self.context, scheduler.context);
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
  switch_contexts(current->context, scheduler.context);
}

void prepare(Fiber& fiber) {
  clean(fiber.stack.get(), kStack);
  if (!fiber.thread) fiber.thread = new_thread();
  prepare_context(fiber.context, fiber.stack.get(), kStack, fiber_main);
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

// The calling thread comes to a barrier of some threads; the last one opens it. Says whether it is open.
bool come_to(NamedBarrier& barrier, const Place& place, int number, int threads) {
  if (number < 1 || number >= kNamedBarriers || threads < 1 || threads % static_cast<int>(kWarp) != 0 ||
      (barrier.arrived > 0 && barrier.threads != threads)) {
    misuse = describe(place) + ": barrier " + std::to_string(number) + " is not one of " + std::to_string(threads) +
             " threads";
  }
  barrier.threads = threads;
  release(barrier.places[barrier.opened % 2]);
  if (++barrier.arrived < threads) return false;
  barrier.arrived = 0;
  ++barrier.opened;
  for (Warp& warp : warps) warp.open_barrier(number);
  return true;
}

// Lets the threads go on that wait at the block's barrier, and says whether there were any.
bool open_barrier(std::string& error) {
  std::vector<Place> waiting;
  for (Warp& warp : warps) {
    for (const Lane& lane : warp.lanes) {
      if (lane.state != Lane::kAtBarrier) continue;
      if (lane.barrier != 0) {
        const NamedBarrier& barrier = named[lane.barrier];
        error = describe(lane.place) + ", for ever: " + std::to_string(barrier.arrived) + " of " +
                std::to_string(barrier.threads) + " threads have come to barrier " + std::to_string(lane.barrier);
        return false;
      }
      waiting.push_back(lane.place);
    }
    warp.open_barrier();
  }
  ++barriers;
  error = check_barrier(waiting);
  return !waiting.empty();
}

bool is_any_running() {
  return std::any_of(warps.begin(), warps.end(), [](const Warp& warp) { return warp.is_running(); });
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

void wait_at_barrier(const char* file, int line, int number, int threads) {
  NamedBarrier& barrier = named[static_cast<unsigned>(number) % kNamedBarriers];
  const Place place{thread_index(), file, line};
  char& ordered = barrier.places[barrier.opened % 2];
  if (!come_to(barrier, place, number, threads)) {
    lane_of(place.thread).wait_at_barrier(place, number);
    wait();
  }
  acquire(ordered);
}

void pass_barrier(const char* file, int line, int number, int threads) {
  come_to(named[static_cast<unsigned>(number) % kNamedBarriers], Place{thread_index(), file, line}, number, threads);
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
  named.fill(NamedBarrier{});
  misuse.clear();
  std::string error;
  do {
    for (const unsigned i : order.of(static_cast<unsigned>(warps.size()))) {
      error = run_warp(i, order);
      if (!misuse.empty()) return misuse;
      if (!error.empty()) return error;
    }
  } while (is_any_running() || (open_barrier(error) && error.empty()));
  acquire(block_ends);
  for (const NamedBarrier& barrier : named) {
    if (!error.empty() || barrier.arrived == 0) continue;
    error = "barrier " + std::to_string(&barrier - named.data()) + " stays closed: the block has ended, and " +
            std::to_string(barrier.arrived) + " of " + std::to_string(barrier.threads) + " threads have come to it";
  }
  return error;
}

void end_grid() {
  for (Fiber& fiber : fibers) {
    if (fiber.thread) end_thread(fiber.thread);
    fiber.thread = nullptr;
  }
}

}  // namespace shim

// Where an access is in the source.
struct Access {
  const char* file;
  std::uint32_t line, column;
};

#ifndef __SANITIZE_ADDRESS__  // its runtime library has this function
// Code that is built with -fsanitize=alignment calls this before it accesses a misaligned address. A GPU ends the kernel there.
extern "C" void __ubsan_handle_type_mismatch_v1_abort(const Access* access, std::uintptr_t) {
  const shim::Place place{shim::thread_index(), access->file, static_cast<int>(access->line)};
  shim::misuse = "misaligned address: " + shim::describe(place);
  for (;;) shim::wait();
}
#endif
