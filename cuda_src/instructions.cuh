// Wrappers of single PTX instructions that CUDA C++ has no function for, with replacements for the tests that run
// kernels on the host.
#pragma once

#include "vector.cuh"

// Declares dynamic shared memory, whose size the launch decides; tests that run kernels on the host define the macro
// differently.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace lt {

// Programmatic dependent launch. Before this call a kernel may run concurrently with its predecessor on the stream,
// which may still be writing operands of this kernel. The call lets the next kernel start, which then waits in its own
// call. This hides half a microsecond of launch latency on an H200. Every kernel is launched with the attribute for it,
// and all threads of every kernel make this call before they touch global memory that any kernel writes. Below compute
// capability 9.0 the attribute and the call do nothing.
__device__ inline void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The two functions below are one instruction of the special function unit each, and treat subnormal numbers as zero.
// The functions of <math.h> and the intrinsics handle subnormal numbers and take four instructions. Results are off by
// at most 2 units in the last place.
__device__ inline float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

__device__ inline float reciprocal_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

constexpr float kLog2E = 1.4426950408889634f;  // log₂ e: eˣ is 2 to the power of x · log₂ e

// Starts an asynchronous copy of 16 bytes to shared memory (cp.async); with `bytes`, of that many bytes, followed by
// zeros. Both addresses are multiples of 16. The calling thread sees the data after `wait_for_copies`, other threads
// after a further barrier. Below compute capability 8.0 the copy without `bytes` is synchronous, and kernels that use
// the one with `bytes` are not launched.
__device__ inline void copy_async(void* shared, const void* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}
__device__ inline void copy_async(void* shared, const void* global, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
#elif !defined(__CUDA_ARCH__)
  shim::copy_async(shared, global, bytes);
#endif
}

// Commits a group of asynchronous copies: all that the calling thread has started since it committed the previous
// group.
__device__ inline void end_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups of copies except the last `kLatest` have arrived.
template <int kLatest>
__device__ inline void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
#endif
}

// Named barriers, for some of a block's warps. A barrier has a number from 1 to 15 (0 is __syncthreads), and opens when
// `threads` threads, in whole warps, have arrived or wait. A warp that only arrives (bar.arrive) goes on without
// waiting. When the barrier opens, the waiting threads see everything that the others wrote before they arrived.
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
