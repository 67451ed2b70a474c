// Matrix product with a small K (number of terms), such as the input gradient of an output layer: A·B, whose time is
// little more than that of writing D. A thread computes one octet of D in each of its rows. See narrow.cuh. ALIGNED
// states the alignment of B, C, D and a pre-activation.
//
// Compiled, besides the definitions in narrow.cuh, for:
//   ROWS  rows that a thread computes at a time: 1, or more to load B less often if D has more octets than the GPU has
//         threads
//   AUX   kind of the matrix `aux`: 0 absent, 1 a pre-activation, whose GELU derivative D is multiplied by, 2 ReLU's mask
//   SUMS  1 if D is also summed over its rows, before rounding, as the bias gradient of the layer below; then
//         blockDim.x and blockDim.y are powers of two

#include "activations.cuh"
#include "column_sum.cuh"
#include "narrow.cuh"

namespace lt {

using Load = Access<SCALAR>;

// Bytes of B whose loads a thread has in flight. With one row for each thread there are few threads, and latency
// decides the time, so that a thread loads as much of B as registers allow.
constexpr int kInFlight = ROWS > 1 ? 128 : SUMS && ALIGNED ? 512 : 256;
constexpr int kMost = kInFlight / static_cast<int>(sizeof(Load::Raw));
constexpr int kTogether = kMost < WIDTH ? kMost : WIDTH;  // rows of B that a thread loads at once

// Loads an octet of the matrix `aux` and turns it into the factors by which the epilogue multiplies an octet of D.
struct Aux {
#if AUX == 1
  using Raw = Load::Raw;

  static __device__ Raw load(const NarrowParams& p, int64 row, int64 col, int count) {
    return Load::load(element<SCALAR>(p.aux, row, col), 1, count);
  }
  static __device__ void apply(Octet& gradient, const Raw& raw) {
    const Octet z = unpack(raw);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) gradient.v[i] *= Gelu::derivative(z.v[i], 0.0f);
  }
#elif AUX == 2
  using Raw = uint32;

  static __device__ Raw load(const NarrowParams& p, int64 row, int64 col, int) {
    return *element<unsigned char>(p.aux, row, col / kOctet);
  }
  static __device__ void apply(Octet& gradient, Raw bits) {
    const Octet positive = unpack(bits);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) gradient.v[i] *= positive.v[i];
  }
#else
  struct Raw {};

  static __device__ Raw load(const NarrowParams&, int64, int64, int) { return {}; }
  static __device__ void apply(Octet&, Raw) {}
#endif
};

// Returns `row`, or the last row if `row` is beyond it.
__device__ inline int64 existing(const NarrowParams& p, int64 row) { return row < p.rows ? row : p.rows - 1; }

// An octet of A·B in each of ROWS rows from `first` on; rows beyond the last are replaced by the last row.
__device__ inline void multiply(Octet (&sums)[ROWS], const NarrowParams& p, int64 first, int64 col, int count) {
#pragma unroll
  for (int start = 0; start < WIDTH; start += kTogether) {
    Load::Raw raw[kTogether] = {};
    float a[ROWS][kTogether] = {};
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (start + k >= p.depth) continue;  // all threads take the same side of this branch, so that no warp diverges
      raw[k] = Load::load(element<SCALAR>(p.b, start + k, col), 1, count);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) a[r][k] = to_float(*element<SCALAR>(p.a, existing(p, first + r), start + k));
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (start + k >= p.depth) continue;
      const Octet b = unpack(raw[k]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sums[r].v[i] += a[r][k] * b.v[i];
      }
    }
  }
}

// Epilogue: computes an octet of D from the octet of A·B, adding β·C and applying the derivative.
__device__ inline Octet result(const NarrowParams& p, int64 row, int64 col, int count, const Octet& sums,
                               const Aux::Raw& aux) {
  Octet out{};
  if (p.c.data) out = unpack(Load::load(element<SCALAR>(p.c, row, col), 1, count));
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out.v[i] = p.alpha * sums.v[i] + (p.c.data ? p.beta * out.v[i] : 0.0f);
  Aux::apply(out, aux);
  return out;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, 1) narrow_k(const lt::NarrowParams p) {
  using namespace lt;
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  const int64 step = static_cast<int64>(gridDim.y) * blockDim.y * ROWS;
  const int count = octet_count(col, p.cols);
  wait_for_predecessor();
  if (!SUMS && count == 0) return;
  // With SUMS, threads beyond the last column must not return early, because the column sum below has barriers; their
  // loop has no iterations instead.
  const int64 rows = SUMS && count == 0 ? 0 : p.rows;
  Octet total{};
  for (int64 first = (static_cast<int64>(blockIdx.y) * blockDim.y + threadIdx.y) * ROWS; first < rows; first += step) {
    Octet sums[ROWS] = {};
    Aux::Raw aux[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) aux[r] = Aux::load(p, existing(p, first + r), col, count);
    multiply(sums, p, first, col, count);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= p.rows) continue;
      const Octet out = result(p, first + r, col, count, sums[r], aux[r]);
      Load::store(element<SCALAR>(p.d, first + r, col), 1, count, out);
      total += out;
    }
  }
  if constexpr (SUMS) sum_over_grid(ColumnSum<SCALAR>{p.vector, p.partial, p.tickets, 0}, total, p.cols);
}
