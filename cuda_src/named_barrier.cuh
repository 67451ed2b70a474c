// Barriers of some of a block's warps. Each has a number from 1 to 15 (0 is __syncthreads), and opens when `threads` threads
// have come to it; some of them may only say that they have been there. What a thread has written before is seen by those
// that wait, once it opens. Whole warps come to it.
#pragma once

namespace lt {

constexpr int kBarriers = 16;

#ifdef __CUDA_ARCH__
__device__ inline void wait_at_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void pass_barrier(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
#else
inline void wait_at_barrier(int number, int threads) { shim::wait_at_barrier(__FILE__, __LINE__, number, threads); }
inline void pass_barrier(int number, int threads) { shim::pass_barrier(__FILE__, __LINE__, number, threads); }
#endif

}  // namespace lt
