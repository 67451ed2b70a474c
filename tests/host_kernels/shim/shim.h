// What CUDA C++ gives a kernel, given by the CPU: with this header the files of cuda_src build with g++ as they are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <math.h>
#include <string.h>

#include "launch.h"
#include "warp_matrix.h"

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__
// Blocks run one after another, so one copy is enough. The section lets each block find the memory poisoned.
#define __shared__ static __attribute__((section("shared_memory")))
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(shim::dynamic_shared())

// A barrier is known by its place in the source: threads of a block must all wait at the same one. So must the lanes of
// a warp that exchange values.
#define __syncthreads() shim::sync_threads(__FILE__, __LINE__)
#define __syncthreads_count(predicate) shim::sync_count(__FILE__, __LINE__, predicate)
#define __syncwarp (shim::WarpBarrier{__FILE__, __LINE__})
#define __shfl_sync(...) shim::shuffle<shim::From>(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) shim::shuffle<shim::Down>(__FILE__, __LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) shim::shuffle<shim::Xor>(__FILE__, __LINE__, __VA_ARGS__)

namespace shim {

struct WarpBarrier {
  const char* file;
  int line;

  void operator()(unsigned mask = 0xFFFFFFFF) const { exchange(file, line, mask, thread_index() % kWarp, 0); }
};

// How many threads say so. One count is enough, since every thread takes its own part back before any of them goes on.
inline int sync_count(const char* file, int line, int predicate) {
  static int count = 0;
  const int own = predicate != 0;
  __atomic_fetch_add(&count, own, __ATOMIC_RELAXED);
  sync_threads(file, line);
  const int counted = __atomic_load_n(&count, __ATOMIC_RELAXED);
  sync_threads(file, line);
  __atomic_fetch_sub(&count, own, __ATOMIC_RELAXED);
  sync_threads(file, line);
  return counted;
}

// Which lane each shuffle reads, the warp being cut into segments of `width` lanes.
struct From {
  static unsigned source(unsigned lane, unsigned from, unsigned width) {
    return (lane & ~(width - 1)) | (from & (width - 1));
  }
};
struct Down {
  static unsigned source(unsigned lane, unsigned delta, unsigned width) {
    return delta <= (lane | (width - 1)) - lane ? lane + delta : lane;
  }
};
struct Xor {
  static unsigned source(unsigned lane, unsigned bits, unsigned width) {
    return (lane ^ bits) <= (lane | (width - 1)) ? lane ^ bits : lane;
  }
};

// CUDA leaves a width that is no power of two up to 32 undefined: no lane is read.
template <class Shuffle, class T>
inline T shuffle(const char* file, int line, unsigned mask, T value, unsigned operand, unsigned width = kWarp) {
  static_assert(sizeof(T) == sizeof(unsigned), "float, int and unsigned");
  const bool defined = width != 0 && width <= kWarp && (width & (width - 1)) == 0;
  unsigned bits;
  memcpy(&bits, &value, sizeof(bits));
  bits = exchange(file, line, mask, defined ? Shuffle::source(thread_index() % kWarp, operand, width) : kWarp, bits);
  memcpy(&value, &bits, sizeof(bits));
  return value;
}

}  // namespace shim

// No block runs while another does, and threads of one block synchronize at barriers alone.
inline void __threadfence() {}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline unsigned atomicMax(unsigned* address, unsigned value) {
  unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

inline unsigned atomicInc(unsigned* address, unsigned limit) {
  unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, old >= limit ? 0 : old + 1, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}

// A store with a hint to the caches, and a load past L1.
template <class T>
inline void __stcs(T* p, T value) {
  *p = value;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}

// Approximations of the special function unit.
inline float __fdividef(float x, float y) { return x / y; }

inline float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

namespace shim {
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
}  // namespace shim
#define rsqrtf shim::rsqrtf  // newer C libraries declare a function of this name
