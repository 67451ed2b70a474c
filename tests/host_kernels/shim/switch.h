// Switching between stacks. swapcontext() makes a system call at each switch, to keep the signal mask, which is the same
// in all fibers: it took half of the time of the kernels' tests.
#pragma once

#include <cstddef>

#ifdef __x86_64__
#include <cstdint>

namespace shim {

using Context = void*;  // the stack pointer, above the registers that a called function must preserve

// The compiler sees an ordinary call: it saves all other registers itself. Floating-point modes are the same in all
// fibers.
__attribute__((naked, noinline)) inline void switch_stacks(Context* /*left: rdi*/, Context /*entered: rsi*/) {
  asm("push %rbp\n\tpush %rbx\n\tpush %r12\n\tpush %r13\n\tpush %r14\n\tpush %r15\n\t"
      "mov %rsp, (%rdi)\n\tmov %rsi, %rsp\n\t"
      "pop %r15\n\tpop %r14\n\tpop %r13\n\tpop %r12\n\tpop %rbx\n\tpop %rbp\n\tret");
}

inline void switch_contexts(Context& left, Context& entered) { switch_stacks(&left, entered); }

// The first switch to the context calls `main`, which must not return.
inline void prepare_context(Context& context, char* stack, std::size_t size, void (*main)()) {
  auto* top = reinterpret_cast<std::uintptr_t*>(reinterpret_cast<std::uintptr_t>(stack + size) & ~std::uintptr_t{15});
  *--top = 0;  // return address of `main`, at which stack traces end; it also aligns the stack as a call does
  *--top = reinterpret_cast<std::uintptr_t>(main);
  for (int i = 0; i < 6; ++i) *--top = 0;
  context = top;
}

}  // namespace shim

#else
#include <ucontext.h>

namespace shim {

using Context = ucontext_t;

inline void switch_contexts(Context& left, Context& entered) { swapcontext(&left, &entered); }

inline void prepare_context(Context& context, char* stack, std::size_t size, void (*main)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, main, 0);
}

}  // namespace shim
#endif
