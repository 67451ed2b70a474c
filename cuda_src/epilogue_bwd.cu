// dz = dropout'(dy) · act'(saved) and the bias gradient, the sum of dz over its rows, in one pass over a matrix.
//
// Compiled for:
//   SCALAR      the type of all matrices
//   ACTIVATION  a struct of activations.cuh
//   SAVED       kind of the tensor `saved`: 0 nothing, 1 the pre-activation, 2 the output, 3 ReLU's mask
//   DROPOUT     0 or 1
//   DZ          how dz is written: 0 not at all, 1 in the order in which dy is read, 2 transposed
//   ALIGNED     see sweep.cuh
//   BLOCKS      number of blocks that a multiprocessor must hold, which limits a thread's registers
//
// The bias gradient is deterministic, because it is summed without floating-point atomics.
//
// Where DZ is 1, dz may be the same memory as dy: each octet is read and written by one thread, and a thread prefetches
// only rows that it has not written yet. So this file must not promise the compiler, by `__restrict__` or `__ldg`, that
// operands do not overlap or are only read.

#include "activations.cuh"
#include "flat_sum.cuh"
#include "philox.cuh"
#include "transpose.cuh"

namespace lt {

// Number of rows that a thread prefetches. A variant that only sums has little to compute while it waits for loads:
// with one row prefetched, it read only 1.9 TB/s on an H200.
constexpr int kRowsAhead = SAVED || DZ || DROPOUT ? 1 : 4;

struct EpilogueBwdParams {
  Matrix dy;
  Matrix saved;  // null if SAVED is 0; a mask's strides are in bytes
  Matrix dz;     // null if DZ is 0; its columns are contiguous if DZ is 2
  ColumnSum<SCALAR> db;
  uint32 rows;
  int64 cols;
  Dropout dropout;
  float slope;
};

#if SAVED == 3
struct MaskCursor {
  using Raw = uint32;

  const unsigned char* at;
  int64 step;

  __device__ MaskCursor(const Matrix& m, const Sweep& s)
      : at(element<unsigned char>(m, s.row, s.col / kOctet)), step(s.step * m.row_stride) {}

  __device__ Raw load(bool) {
    const Raw bits = *at;
    at += step;
    return bits;
  }
};

using SavedReader = ReadAhead<MaskCursor>;

__device__ inline float derivative(float positive, float) { return positive; }
#else
using SavedReader = Reader<SCALAR>;

#if SAVED == 2
__device__ inline float derivative(float saved, float) { return ACTIVATION::derivative_from_output(saved); }
#else
__device__ inline float derivative(float saved, float slope) { return ACTIVATION::derivative(saved, slope); }
#endif
#endif

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, BLOCKS) epilogue_bwd(const lt::EpilogueBwdParams p) {
  using namespace lt;
  const Sweep sweep(p.cols);
  Reader<SCALAR, kRowsAhead> dy_at(p.dy, sweep);
  SavedReader saved_at(p.saved, sweep);
#if DZ == 1
  Cursor<SCALAR> dz(p.dz, sweep);
#elif DZ == 2
  TransposedWriter<SCALAR> dz(p.dz, p.rows, p.cols);
#endif
  uint64 index = sweep.index(p.cols);
  const uint64 index_step = sweep.step * static_cast<uint64>(p.cols);
  wait_for_predecessor();
  const uint32 step = DROPOUT ? dropout_step(p.dropout) : 0;
  Octet sums{};
  // Threads beyond the last column or row must not return early: the sum and the transposition have barriers.
  const uint32 rows = sweep.count ? p.rows : 0;
  const uint32 end = DZ == 2 ? block_rows(p.rows) : rows;
  dy_at.start(sweep, rows);
  if (SAVED) saved_at.start(sweep, rows);
#pragma unroll kRowsAhead  // unrolled: otherwise prefetched rows are moved between registers, and the move waits for the load
  for (uint32 row = sweep.row; row < end; row += sweep.step) {
    Octet gradient = unpack(dy_at.take(row, rows));
#if SAVED
    const Octet saved = unpack(saved_at.take(row, rows));
#endif
    if (DROPOUT) apply_dropout<ALIGNED != 0>(gradient, p.dropout, step, index);
    index += index_step;
#if SAVED
#pragma unroll
    for (int i = 0; i < kOctet; ++i) gradient.v[i] *= derivative(saved.v[i], p.slope);
#endif
    if (DZ != 2 || row < rows) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) sums.v[i] += gradient.v[i];
    }
#if DZ == 1
    dz.store(gradient, row == rows - 1);
#elif DZ == 2
    dz.store(gradient);
#endif
  }
  if (!p.db.sum) return;
#if ALIGNED == 2
  sum_flat_over_grid(p.db, sums, p.cols, sweep.lead);
#else
  sum_over_grid(p.db, sums, p.cols);
#endif
}
