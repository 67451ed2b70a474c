// Sums over the threads of a block and over the blocks of a grid, always in the same order.
// Blocks are whole warps in x.
#pragma once

#include "last_block.cuh"

namespace lt {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;

// The sum over a warp, to every thread of it.
__device__ inline float sum_over_warp(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
  return value;
}

// The sum over a block; every thread gets it. `scratch` has an element a warp and may be reused afterwards.
__device__ inline float sum_over_block(float value, float* scratch) {
  const uint32 lane = threadIdx.x % kWarp;
  value = sum_over_warp(value);
  if (lane == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  const float sum = sum_over_warp(lane < blockDim.x / kWarp ? scratch[lane] : 0.0f);
  __syncthreads();
  return sum;
}

// The sum over a grid in x. The last block to get here has it in `value`, in every thread, and it alone is told so.
// `partial` has an element a block; `ticket` is that of `is_last_block`.
__device__ inline bool sum_over_grid(float& value, float* partial, uint32* ticket, float* scratch) {
  value = sum_over_block(value, scratch);
  if (gridDim.x == 1) return true;  // nobody to wait for
  if (threadIdx.x == 0) partial[blockIdx.x] = value;
  if (!is_last_block(ticket, gridDim.x)) return false;
  value = 0.0f;
#pragma unroll 1
  for (uint32 block = threadIdx.x; block < gridDim.x; block += blockDim.x) value += __ldcg(partial + block);
  value = sum_over_block(value, scratch);
  return true;
}

}  // namespace lt
