// Which of several blocks is the last to get somewhere: what it then reads of the others' work is complete.
#pragma once

#include "vector.cuh"

namespace lt {

// Counts the calling block in, and says whether it completes `blocks` of them. Every thread of the block must call it, and
// all get the same answer. What the blocks wrote to global memory before is visible to the last; it has to read that
// past L1, with __ldcg. The counter is zero before the first and after the last, so that the next launch finds it so.
__device__ inline bool is_last_block(uint32* ticket, uint32 blocks) {
  __shared__ uint32 arrived;
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    // One thread's fences do for all: they order whatever a barrier has ordered before or after them. Fences of all
    // would wait for each thread's stores.
    __threadfence();
    arrived = atomicInc(ticket, blocks - 1);
    __threadfence();
  }
  __syncthreads();
  return arrived == blocks - 1;
}

}  // namespace lt
