// Sums over a block's rows, always in the same order.
#pragma once

#include "vector.cuh"

namespace lt {

constexpr int kThreads = 256;

// Adds up `sums` over the threads of a block that share threadIdx.x; the result is threadIdx.y 0's. Every thread of the
// block must call it.
__device__ inline void sum_over_rows(Octet& sums) {
  __shared__ float shared[kOctet][kThreads];
  const int width = blockDim.x;
  const int self = threadIdx.y * width + threadIdx.x;
  for (int i = 0; i < kOctet; ++i) shared[i][self] = sums.v[i];
  __syncthreads();
  if (threadIdx.y != 0) return;
  for (int i = 0; i < kOctet; ++i) {
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sums.v[i] += shared[i][y * width + threadIdx.x];
  }
}

}  // namespace lt
