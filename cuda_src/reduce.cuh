// Sums over the threads of a block and over the blocks of a grid, always in the same order; and `is_last_block`. For
// sums over a block, blockDim.x is a multiple of a warp and blockDim.y is 1.
#pragma once

#include "vector.cuh"

namespace lt {

constexpr int kMaxWarps = 32;  // largest number of warps of a block

// Increments a counter of finished blocks, and returns true in all threads of the last of `blocks` blocks to call it.
// Every thread of a block must call it. The last block sees everything that the other blocks wrote to global memory
// before their calls; it has to read it by __ldcg, which bypasses L1. The counter is zero before the first call and
// again after the last.
__device__ inline bool is_last_block(uint32* ticket, uint32 blocks) {
  __shared__ uint32 arrived;
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    // Fences by one thread suffice, because the barriers before and after order the other threads' accesses. If all
    // threads executed fences, each would wait for its own stores.
    __threadfence();
    arrived = atomicInc(ticket, blocks - 1);
    __threadfence();
  }
  __syncthreads();
  return arrived == blocks - 1;
}

// Returns the sum over a warp, in every lane.
__device__ inline float sum_over_warp(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
  return value;
}

// Returns the sum over a block, in every thread. `scratch` has an element for each warp, and may be reused afterwards.
__device__ inline float sum_over_block(float value, float* scratch) {
  const uint32 lane = threadIdx.x % kWarp;
  value = sum_over_warp(value);
  if (lane == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  const float sum = sum_over_warp(lane < blockDim.x / kWarp ? scratch[lane] : 0.0f);
  __syncthreads();
  return sum;
}

// Adds up every blockDim.x-th of `count` partial sums that other blocks have written, from the calling thread's on.
__device__ inline float sum_of_parts(const float* partial, uint32 count) {
  constexpr int kInFlight = 8;
  float sum = 0.0f;
#pragma unroll 1
  for (uint32 first = threadIdx.x; first < count; first += kInFlight * blockDim.x) {
    float parts[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const uint32 part = first + k * blockDim.x;
      parts[k] = part < count ? __ldcg(partial + part) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum += parts[k];
  }
  return sum;
}

// Adds up `value` over all threads of a one-dimensional grid. Returns true only in the last block to call it, where
// every thread's `value` is then the sum. `partial` has an element for each block; `ticket` is the counter of
// `is_last_block`.
__device__ inline bool sum_over_grid(float& value, float* partial, uint32* ticket, float* scratch) {
  value = sum_over_block(value, scratch);
  if (gridDim.x == 1) return true;  // a single block already has the whole sum
  if (threadIdx.x == 0) partial[blockIdx.x] = value;
  if (!is_last_block(ticket, gridDim.x)) return false;
  value = sum_over_block(sum_of_parts(partial, gridDim.x), scratch);
  return true;
}

}  // namespace lt
