// dz = dropout'(dy) · act'(saved) and the bias gradient's partial sums, in one pass over a matrix.
// Compiled for one SCALAR type, one ACTIVATION, what SAVED holds (0 nothing, 1 pre-activation, 2 output), and
// DROPOUT 0 or 1.
//
// The bias gradient is deterministic: each block sums its rows in a fixed order into `partial`, and
// column_sum_finish adds those in a fixed order; no floating-point atomics.

#include "activations.cuh"
#include "column_sum.cuh"
#include "philox.cuh"
#include "vector.cuh"

namespace lt {

struct EpilogueBwdParams {
  Matrix dy;
  Matrix saved;    // absent where SAVED is 0
  Matrix dz;       // absent where only the bias gradient is wanted
  float* partial;  // (gridDim.y, cols) sums over each block's rows; absent without a bias gradient
  int64 rows;
  int64 cols;
  int64 rows_per_block;
  Dropout dropout;
  float slope;
};

#if SAVED == 2
__device__ inline float derivative(float saved, float) { return ACTIVATION::derivative_from_output(saved); }
#else
__device__ inline float derivative(float saved, float slope) { return ACTIVATION::derivative(saved, slope); }
#endif

}  // namespace lt

// A thread handles eight columns of a row, blockDim.x of them side by side; a block takes rows_per_block rows.
extern "C" __global__ void __launch_bounds__(256) epilogue_bwd(const lt::EpilogueBwdParams p) {
  using namespace lt;
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  // Threads beyond the last column stay for the barrier, with nothing to do.
  const int count = col < p.cols ? octet_count(col, p.cols) : 0;
  const uint32 step = DROPOUT ? dropout_step(p.dropout) : 0;
  const int64 first = blockIdx.y * p.rows_per_block;
  const int64 last = first + p.rows_per_block < p.rows ? first + p.rows_per_block : p.rows;
  Octet sums{};
  for (int64 row = first + threadIdx.y; count > 0 && row < last; row += blockDim.y) {
    Octet gradient = load<SCALAR>(p.dy, row, col, count);
    if (DROPOUT) {
      const Octet factors = dropout_factors(p.dropout, step, static_cast<uint64>(row * p.cols + col));
      for (int i = 0; i < kOctet; ++i) gradient.v[i] *= factors.v[i];
    }
#if SAVED
    const Octet saved = load<SCALAR>(p.saved, row, col, count);
    for (int i = 0; i < kOctet; ++i) gradient.v[i] *= derivative(saved.v[i], p.slope);
#endif
    for (int i = 0; i < kOctet; ++i) sums.v[i] += gradient.v[i];
    if (p.dz.data) store<SCALAR>(p.dz, row, col, count, gradient);
  }
  if (!p.partial) return;
  sum_over_rows(sums);
  if (threadIdx.y == 0 && count > 0) {
    store<float>(Matrix{p.partial, p.cols, 1}, blockIdx.y, col, count, sums);
  }
}
