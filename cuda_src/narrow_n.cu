// Matrix product with a small N (number of columns), such as the forward pass of an output layer: A·B + bias, where B
// is passed as its transpose (N, K). Consecutive threads in x share a row of A; each multiplies its octets of the row
// by the same octets of every column of B. See narrow.cuh. Also compiled for ROWS, the rows of A that a thread
// computes: 1, or more to load B less often if there are more rows than the GPU has threads.
//
// blockDim.x, the number of threads that share rows, is a power of two, at least WIDTH, and at most 32 if ROWS is not
// 1. A block consists of whole warps.

#include "narrow.cuh"

namespace lt {

using Load = Access<SCALAR>;

constexpr int kMaxWarps = 8;
constexpr int kInFlight = ROWS == 1 ? 256 : 128;  // bytes of B that a thread loads at once
constexpr int kMost = kInFlight / static_cast<int>(sizeof(Load::Raw));
constexpr int kTogether = kMost < WIDTH ? kMost : WIDTH;  // columns of B that a thread loads at once

// Multiplies an octet (eight terms of K) of ROWS rows of A by the same octet of kTogether columns of B, from column
// `first` on, and adds the products to `sums`.
__device__ inline void add_products(float (&sums)[ROWS][WIDTH], const Octet (&x)[ROWS], const Load::Raw* raw, int first,
                                    int64 cols) {
#pragma unroll
  for (int n = 0; n < kTogether; ++n) {
    if (first + n >= cols) continue;  // all threads take the same side of this branch
    const Octet w = unpack(raw[n]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) sums[r][first + n] += x[r].v[i] * w.v[i];
    }
  }
}

// Adds up the sums of a row's elements of D over the warps that share the row. Lane l passes its warp's sum for column
// l % WIDTH, and gets the total for that column.
__device__ inline float sum_over_warps(float sum) {
  __shared__ float sums[kMaxWarps][WIDTH];
  const uint32 warps = blockDim.x / kWarp, first = threadIdx.y * warps;
  if (threadIdx.x % kWarp < WIDTH) sums[first + threadIdx.x / kWarp][threadIdx.x % kWarp] = sum;
  __syncthreads();
  float total = 0.0f;
  for (uint32 warp = 0; warp < warps; ++warp) total += sums[first + warp][threadIdx.x % WIDTH];
  return total;
}

template <int kCount>
__device__ inline float sum_over_lanes(float* terms) {
  if constexpr (kCount > 1) {
    add_half<kCount / 2>(terms, threadIdx.x, kCount / 2);
    return sum_over_lanes<kCount / 2>(terms);
  }
  return *terms;
}

// Adds up the sums of a row's elements of D over the threads that share the row; returns the total for column
// threadIdx.x % WIDTH.
__device__ inline float sum_over_row(float (&columns)[WIDTH]) {
  const uint32 lanes = blockDim.x < kWarp ? blockDim.x : kWarp;
  float sum = sum_over_lanes<WIDTH>(columns);
  for (uint32 distance = WIDTH; distance < lanes; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
  return ROWS == 1 && blockDim.x > kWarp ? sum_over_warps(sum) : sum;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, 1) narrow_n(const lt::NarrowParams p) {
  using namespace lt;
  const int64 first = (static_cast<int64>(blockIdx.x) * blockDim.y + threadIdx.y) * ROWS, last = p.rows - 1;
  const int column = threadIdx.x % WIDTH;
  const bool stores = threadIdx.x < WIDTH && column < p.cols;
  wait_for_predecessor();
  // The bias is loaded before the loop, so that its latency overlaps that of the operands.
  const float bias = stores && p.vector ? to_float(p.vector[column]) : 0.0f;
  float addends[ROWS], sums[ROWS][WIDTH] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) addends[r] = stores && first + r <= last ? addend(p, first + r, column) + bias : 0.0f;
  for (int64 k = threadIdx.x * kOctet; k < p.depth; k += blockDim.x * kOctet) {
    const int count = octet_count(k, p.depth);
    Load::Raw raw[ROWS];
    Octet x[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // rows beyond the last are replaced by the last row
      raw[r] = Load::load(element<SCALAR>(p.a, first + r < last ? first + r : last, k), 1, count);
    }
#pragma unroll
    for (int n = 0; n < WIDTH; n += kTogether) {
      Load::Raw columns[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (n + i < p.cols) columns[i] = Load::load(element<SCALAR>(p.b, n + i, k), 1, count);
      }
      if (n == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) x[r] = unpack(raw[r]);
      }
      add_products(sums, x, columns, n, p.cols);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float value = p.alpha * sum_over_row(sums[r]) + addends[r];
    if (stores && first + r <= last) *element<SCALAR>(p.d, first + r, column) = from_float<SCALAR>(value);
  }
}
