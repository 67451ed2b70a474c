// Sums over the threads of a block and over the blocks of a grid, always in the same order; and which block is the last.
// Blocks are whole warps in x where a block's numbers are summed up.
#pragma once

#include "vector.cuh"

namespace lt {

constexpr int kMaxWarps = 32;  // of a block

// Counts the calling block in, and returns whether it is the last of `blocks`. Every thread of the block must call it, and
// all get the same answer. The last block sees everything that the blocks wrote to global memory before; it has to read
// that with __ldcg, which bypasses L1. The counter is zero before the first block and after the last, for the next launch.
__device__ inline bool is_last_block(uint32* ticket, uint32 blocks) {
  __shared__ uint32 arrived;
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    // One thread's fences suffice: they order everything that a barrier has ordered before or after them. If all
    // threads executed fences, each would wait for its own stores.
    __threadfence();
    arrived = atomicInc(ticket, blocks - 1);
    __threadfence();
  }
  __syncthreads();
  return arrived == blocks - 1;
}

// The sum over a warp; every thread gets it.
__device__ inline float sum_over_warp(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
  return value;
}

// The sum over a block; every thread gets it. `scratch` has an element for each warp, and may be reused afterwards.
__device__ inline float sum_over_block(float value, float* scratch) {
  const uint32 lane = threadIdx.x % kWarp;
  value = sum_over_warp(value);
  if (lane == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  const float sum = sum_over_warp(lane < blockDim.x / kWarp ? scratch[lane] : 0.0f);
  __syncthreads();
  return sum;
}

// Adds up the calling thread's share of `count` numbers that other blocks have written.
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

// The sum over a grid in x. It returns true in the last block to get here alone, whose threads all have the sum in `value`.
// `partial` has an element for each block; `ticket` is the counter of `is_last_block`.
__device__ inline bool sum_over_grid(float& value, float* partial, uint32* ticket, float* scratch) {
  value = sum_over_block(value, scratch);
  if (gridDim.x == 1) return true;  // a single block has no others to wait for
  if (threadIdx.x == 0) partial[blockIdx.x] = value;
  if (!is_last_block(ticket, gridDim.x)) return false;
  value = sum_over_block(sum_of_parts(partial, gridDim.x), scratch);
  return true;
}

}  // namespace lt
