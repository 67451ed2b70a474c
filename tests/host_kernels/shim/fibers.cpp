// A block's threads as fibers: one runs until it meets a barrier or returns, then the next.
#include <ucontext.h>

#include <cstddef>
#include <memory>

#include "block.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {

namespace {

constexpr std::size_t kStack = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  void* fake_stack = nullptr;
  Place place{};
  bool returned = false;
};

std::vector<Fiber> fibers;  // kept from block to block, for their stacks
Fiber scheduler{{}, nullptr};
Fiber* current = nullptr;
Body current_body{};
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_size = 0;

#ifdef __SANITIZE_ADDRESS__
void leave(void** fake_stack, const void* stack, std::size_t size) {
  __sanitizer_start_switch_fiber(fake_stack, stack, size);
}
void arrive(void* fake_stack, const void** stack, std::size_t* size) {
  __sanitizer_finish_switch_fiber(fake_stack, stack, size);
}
// A fiber given up at a barrier leaves marks on its stack.
void clean(Fiber& fiber) { __asan_unpoison_memory_region(fiber.stack.get(), kStack); }
#else
void leave(void**, const void*, std::size_t) {}
void arrive(void*, const void**, std::size_t*) {}
void clean(Fiber&) {}
#endif

void enter(Fiber& fiber) {
  current = &fiber;
  leave(&scheduler.fake_stack, fiber.stack.get(), kStack);
  swapcontext(&scheduler.context, &fiber.context);
  arrive(scheduler.fake_stack, nullptr, nullptr);
}

void fiber_main() {
  arrive(nullptr, &scheduler_stack, &scheduler_stack_size);
  current_body();
  current->returned = true;
  leave(nullptr, scheduler_stack, scheduler_stack_size);
  setcontext(&scheduler.context);
}

void prepare(Fiber& fiber, unsigned index) {
  clean(fiber);
  fiber.returned = false;
  fiber.place = Place{index, nullptr, 0};
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

}  // namespace

void sync_threads(const char* file, int line) {
  Fiber& self = *current;
  self.place.file = file;
  self.place.line = line;
  leave(&self.fake_stack, scheduler_stack, scheduler_stack_size);
  swapcontext(&self.context, &scheduler.context);
  arrive(self.fake_stack, &scheduler_stack, &scheduler_stack_size);
}

std::string run_block(Body body, Order& order) {
  const unsigned threads = blockDim.x * blockDim.y;
  if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
  for (unsigned i = 0; i < threads; ++i) prepare(fibers[i], i);
  current_body = body;
  std::string error;
  std::vector<Place> waiting;
  do {
    waiting.clear();
    for (const unsigned i : order.of(threads)) {
      if (fibers[i].returned) continue;
      threadIdx = thread_at(i);
      enter(fibers[i]);
      if (!fibers[i].returned) waiting.push_back(fibers[i].place);
    }
    error = check_barrier(waiting);
  } while (error.empty() && !waiting.empty());
  return error;
}

}  // namespace shim
