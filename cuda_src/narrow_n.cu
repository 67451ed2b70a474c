// A product of few columns, such as the output layer's: A·B + bias, where B is given by its transpose (N, K). The threads
// that share a row lie side by side; each multiplies octets of the row with the same octets of every column. See
// narrow.cuh. Compiled besides for ROWS, the rows of a thread: 1, or more to load B less often where there are more rows
// than threads.
//
// blockDim.x, the number of threads that share rows, is a power of two, at least WIDTH, and at most a warp if ROWS is not
// 1. Blocks are whole warps.

#include "narrow.cuh"

namespace lt {

using Load = Access<SCALAR>;

constexpr int kMaxWarps = 8;
constexpr int kInFlight = ROWS == 1 ? 256 : 128;  // bytes of B that a thread loads at once
constexpr int kMost = kInFlight / static_cast<int>(sizeof(Load::Raw));
constexpr int kTogether = kMost < WIDTH ? kMost : WIDTH;  // columns

// Adds the products of an octet of some rows with the same octet of some columns, from column `first` on.
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

// The sum of each column over the warps that share a row. A lane brings its warp's sum of column threadIdx.x % WIDTH.
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

// The sum of column threadIdx.x % WIDTH over the threads that share a row.
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
  // The bias is loaded early, together with the operands.
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
