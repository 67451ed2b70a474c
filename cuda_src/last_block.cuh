// Finds the last of several blocks to reach a point; the other blocks' results that it then reads are complete.
#pragma once

#include "vector.cuh"

namespace lt {

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

}  // namespace lt
