// Sums over the rows of a matrix (column sums), always in the same order: over the rows of a block, then over the
// blocks.
#pragma once

#include "reduce.cuh"

namespace lt {

constexpr int kThreads = 256;

// Returns the shared memory of `sum_over_block`; all sums of a kernel use the same memory.
__device__ inline float4* shared_octets() {
  __shared__ float4 octets[kThreads * kOctet / 4];
  return octets;
}

// Adds up the first `rows` elements of a column.
__device__ inline float sum_column(const float* column, int stride, int rows) {
  float sum = 0.0f;
#pragma unroll 8
  for (int row = 0; row < rows; ++row) sum += column[row * stride];
  return sum;
}

// Adds up octets over the threads of a block that have the same threadIdx.x, and calls `use(column, sum)` once for each
// of the block's 8 · blockDim.x columns. blockDim.x and blockDim.y are powers of two. Every thread of the block must
// call it, and between two calls there must be a barrier.
template <class Use>
__device__ inline void sum_over_block(const Octet& octet, Use use) {
  constexpr int kSlice = 8;
  float4* shared = shared_octets();
  float* sums = &shared->x;
  const int self = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const int width = blockDim.x * kOctet;
  int rows = blockDim.y;
  shared[2 * self] = float4{octet.v[0], octet.v[1], octet.v[2], octet.v[3]};
  shared[2 * self + 1] = float4{octet.v[4], octet.v[5], octet.v[6], octet.v[7]};
  __syncthreads();
  if (rows > kSlice) {
    // Each thread adds up eight rows of a column, and overwrites the first of them, which no other thread reads, by the
    // sum.
    rows /= kSlice;
    sums[self] = sum_column(sums + self, rows * width, kSlice);
    __syncthreads();
  }
  for (int column = self; column < width; column += threads) use(column, sum_column(sums + column, width, rows));
}

// Destination of a column sum. The blocks in a column of the grid each sum a part of the rows.
template <class T>
struct ColumnSum {
  T* sum;           // (cols) result; null if no sum is wanted
  float* partial;   // (gridDim.y, 8 · blockDim.x · gridDim.x) partial sums; used if gridDim.y > 1
  uint32* tickets;  // a zero counter for each column of the grid; used if gridDim.y > 1
  int accumulate;   // whether the result is added to the present value of `sum`
};

template <class T>
__device__ inline void store_sum(const ColumnSum<T>& c, int64 col, int64 cols, float sum) {
  if (col < cols) c.sum[col] = from_float<T>(c.accumulate ? to_float(c.sum[col]) + sum : sum);
}

// Adds up the calling thread's share of the blocks' partial sums of one octet of columns: those at `partial` and at
// multiples of `pitch` after it. Four independent loads are in flight at a time, also in the last iteration.
__device__ inline Octet sum_of_octets(const float* partial, int64 pitch) {
  constexpr int kInFlight = 4, kQuarters = kOctet / 4;
  const int parts = static_cast<int>(gridDim.y), step = blockDim.y;
  Octet total{};
#pragma unroll 1
  for (int first = threadIdx.y; first < parts; first += kInFlight * step) {
    float4 quarters[kInFlight][kQuarters] = {};
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const float4* part = reinterpret_cast<const float4*>(partial + (first + k * step) * pitch);
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {
        if (first + k * step < parts) quarters[k][i] = __ldcg(part + i);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {
        total.v[4 * i] += quarters[k][i].x;
        total.v[4 * i + 1] += quarters[k][i].y;
        total.v[4 * i + 2] += quarters[k][i].z;
        total.v[4 * i + 3] += quarters[k][i].w;
      }
    }
  }
  return total;
}

// Adds up the sums of all threads in a column of the grid. The last block of that column to finish adds up the blocks'
// sums, in order of the blocks.
template <class T>
__device__ inline void sum_over_grid(const ColumnSum<T>& c, const Octet& octet, int64 cols) {
  const int width = blockDim.x * kOctet;
  const int64 pitch = static_cast<int64>(width) * gridDim.x, first = static_cast<int64>(width) * blockIdx.x;
  if (gridDim.y == 1) {
    sum_over_block(octet, [&](int column, float sum) { store_sum(c, first + column, cols, sum); });
    return;
  }
  float* own = c.partial + blockIdx.y * pitch + first;
  sum_over_block(octet, [&](int column, float sum) { own[column] = sum; });
  if (!is_last_block(c.tickets + blockIdx.x, gridDim.y)) return;
  const Octet total = sum_of_octets(c.partial + first + threadIdx.x * kOctet, pitch);
  sum_over_block(total, [&](int column, float sum) { store_sum(c, first + column, cols, sum); });
}

}  // namespace lt
