// The mean of a loss over a grid of blocks with threads in x and y, always in the same order.
#pragma once

#include "column_sum.cuh"
#include "tally.cuh"

namespace lt {

struct LossMean {
  float* partial;  // one sum of losses for each block
  float* loss;
  float size;  // number of elements
  Tally tally;
};

// The sum over a block; every thread gets it. Both sides of the block are powers of two.
__device__ inline float sum_over_threads(float value) {
  __shared__ float values[kThreads];
  const int self = threadIdx.y * blockDim.x + threadIdx.x;
  values[self] = value;
  __syncthreads();
  for (int half = blockDim.x * blockDim.y / 2; half > 0; half /= 2) {
    if (self < half) values[self] += values[self + half];
    __syncthreads();
  }
  return values[0];
}

// Writes the mean of all threads' losses. `tickets` points to the counters of a column sum in the same kernel: one for
// each column of the grid if gridDim.y is not 1, otherwise none. The counter of the mean follows them.
__device__ inline void store_mean(const LossMean& mean, uint32* tickets, float loss) {
  const uint32 blocks = gridDim.x * gridDim.y, self = threadIdx.y * blockDim.x + threadIdx.x;
  const float of_block = sum_over_threads(loss);
  if (self == 0) mean.partial[blockIdx.y * gridDim.x + blockIdx.x] = of_block;
  if (!is_last_block(tickets + (gridDim.y > 1 ? gridDim.x : 0), blocks)) return;
  float sum = 0.0f;
  for (uint32 part = self; part < blocks; part += blockDim.x * blockDim.y) sum += __ldcg(mean.partial + part);
  sum = sum_over_threads(sum);
  if (self == 0) store_loss(mean.loss, sum / mean.size, mean.tally);
}

}  // namespace lt
