// A product over few terms, such as the input gradient of an output layer: A·B, which is little more than writing D. A
// thread makes an octet of D in each of its rows. See narrow.cuh; ALIGNED is said of B, C and D. Compiled for so many ROWS
// a thread at a time: 1, or more to load B less often where there are more octets than threads.

#include "narrow.cuh"

namespace lt {

using Load = Access<SCALAR>;

constexpr int kInFlight = ROWS == 1 ? 256 : 128;  // bytes of B that a thread waits for at once
constexpr int kMost = kInFlight / static_cast<int>(sizeof(Load::Raw));
constexpr int kTogether = kMost < WIDTH ? kMost : WIDTH;  // rows of B

// The octets of a column of octets, in ROWS rows of A·B from `first` on; beyond the last row, that one again.
__device__ inline void multiply(Octet (&sums)[ROWS], const NarrowParams& p, int64 first, int64 col, int count) {
#pragma unroll
  for (int start = 0; start < WIDTH; start += kTogether) {
    Load::Raw raw[kTogether] = {};
    float a[ROWS][kTogether] = {};
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (start + k >= p.depth) continue;  // the same for all threads
      raw[k] = Load::load(element<SCALAR>(p.b, start + k, col), 1, count);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int64 row = first + r < p.rows ? first + r : p.rows - 1;
        a[r][k] = to_float(*element<SCALAR>(p.a, row, start + k));
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (start + k >= p.depth) continue;
      const Octet b = Load::unpack(raw[k]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sums[r].v[i] += a[r][k] * b.v[i];
      }
    }
  }
}

__device__ inline void store(const NarrowParams& p, int64 row, int64 col, int count, const Octet& sums) {
  Octet out{};
  if (p.c.data) out = Load::unpack(Load::load(element<SCALAR>(p.c, row, col), 1, count));
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out.v[i] = p.alpha * sums.v[i] + (p.c.data ? p.beta * out.v[i] : 0.0f);
  Load::store(element<SCALAR>(p.d, row, col), 1, count, out);
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, 1) narrow_k(const lt::NarrowParams p) {
  using namespace lt;
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  const int64 step = static_cast<int64>(gridDim.y) * blockDim.y * ROWS;
  const int count = octet_count(col, p.cols);
  wait_for_predecessor();
  if (count == 0) return;
  for (int64 first = (static_cast<int64>(blockIdx.y) * blockDim.y + threadIdx.y) * ROWS; first < p.rows; first += step) {
    Octet sums[ROWS] = {};
    multiply(sums, p, first, col, count);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r < p.rows) store(p, first + r, col, count, sums[r]);
    }
  }
}
