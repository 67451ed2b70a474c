// What CUDA C++ gives a kernel, given by the CPU: with this header the files of cuda_src build with g++ as they are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <math.h>
#include <string.h>

#include "launch.h"

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __launch_bounds__(...)
// Blocks run one after another, so one copy is enough. The section lets each block find the memory poisoned.
#define __shared__ static __attribute__((section("shared_memory")))

// A barrier is known by its place in the source: threads of a block must all wait at the same one.
#define __syncthreads() shim::sync_threads(__FILE__, __LINE__)

// No block runs while another does, and threads of one block synchronize at barriers alone.
inline void __threadfence() {}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline unsigned atomicInc(unsigned* address, unsigned limit) {
  unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, old >= limit ? 0 : old + 1, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}

// Loads and stores with a hint to the caches: streaming, and past L1.
template <class T>
inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
template <class T>
inline void __stcs(T* p, T value) {
  *p = value;
}

// Approximations of the special function unit.
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }

inline float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

namespace shim {
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
}  // namespace shim
#define rsqrtf shim::rsqrtf  // newer C libraries declare a function of this name
