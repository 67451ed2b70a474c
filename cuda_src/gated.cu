// Gated activations such as SwiGLU: gated_fwd computes y = dropout(act(gate) · value), gated_bwd the gradients of gate
// and value. Gate and value are the halves of one matrix h: its first columns are the gate, the others the value.
//
// Compiled for:
//   SCALAR      the type of all matrices
//   ACTIVATION  a struct of activations.cuh
//   DROPOUT     0 or 1
//   REMAKES     1 if gated_bwd also recomputes y, which it writes over dy; otherwise 0
//   ALIGNED     0 or 1, see sweep.cuh; never 2, because the rows of a half of h are not adjacent in memory
//   BLOCKS      number of blocks that a multiprocessor must hold, which limits a thread's registers
//
// The gradient of h may overwrite h, and gated_bwd's y overwrites dy: each octet is read and written by one thread, and
// a thread prefetches only rows that it has not written yet. So this file must not promise the compiler, by
// `__restrict__` or `__ldg`, that operands do not overlap or are only read.

#include "activations.cuh"
#include "philox.cuh"
#include "sweep.cuh"

namespace lt {

struct GatedFwdParams {
  Matrix gate;
  Matrix value;  // the value's half of h; has the strides of `gate`
  Matrix out;    // the output y
  uint32 rows;
  int64 cols;  // number of columns of each matrix
  Dropout dropout;
  float slope;
};

struct GatedBwdParams {
  Matrix dy;  // gradient of y; overwritten by y if REMAKES
  Matrix gate;
  Matrix value;  // the value's half of h; has the strides of `gate`
  Matrix dgate;
  Matrix dvalue;  // the gradient of `value`; has the strides of `dgate`
  uint32 rows;
  int64 cols;  // number of columns of each matrix
  Dropout dropout;
  float slope;
};

// Returns `second` with the strides of `first`. Gate and value, and their gradients, have equal strides; taken from one
// variable, the row stride occupies one register instead of two.
__device__ inline Matrix beside(const Matrix& first, const Matrix& second) {
  return Matrix{second.data, first.row_stride, first.col_stride};
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, BLOCKS) gated_fwd(const lt::GatedFwdParams p) {
  using namespace lt;
  const Sweep sweep(p.cols);
  Reader<SCALAR> gate_at(p.gate, sweep), value_at(beside(p.gate, p.value), sweep);
  Cursor<SCALAR> out(p.out, sweep);
  uint64 index = sweep.index(p.cols);
  const uint64 index_step = sweep.step * static_cast<uint64>(p.cols);
  wait_for_predecessor();
  if (sweep.count == 0) return;
  const uint32 step = DROPOUT ? dropout_step(p.dropout) : 0;
  gate_at.start(sweep, p.rows);
  value_at.start(sweep, p.rows);
  for (uint32 row = sweep.row; row < p.rows; row += sweep.step) {
    const Octet gate = unpack(gate_at.take(row, p.rows));
    Octet y = unpack(value_at.take(row, p.rows));
#pragma unroll
    for (int i = 0; i < kOctet; ++i) y.v[i] *= ACTIVATION::forward(gate.v[i], p.slope);
    if (DROPOUT) apply_dropout<ALIGNED != 0>(y, p.dropout, step, index);
    index += index_step;
    out.store(y, row == p.rows - 1);
  }
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) gated_bwd(const lt::GatedBwdParams p) {
  using namespace lt;
  const Sweep sweep(p.cols);
  Reader<SCALAR> dy_at(p.dy, sweep), gate_at(p.gate, sweep), value_at(beside(p.gate, p.value), sweep);
  Cursor<SCALAR> dgate_at(p.dgate, sweep), dvalue_at(beside(p.dgate, p.dvalue), sweep), y_at(p.dy, sweep);
  uint64 index = sweep.index(p.cols);
  const uint64 index_step = sweep.step * static_cast<uint64>(p.cols);
  wait_for_predecessor();
  if (sweep.count == 0) return;
  const uint32 step = DROPOUT ? dropout_step(p.dropout) : 0;
  dy_at.start(sweep, p.rows);
  gate_at.start(sweep, p.rows);
  value_at.start(sweep, p.rows);
  for (uint32 row = sweep.row; row < p.rows; row += sweep.step) {
    Octet dy = unpack(dy_at.take(row, p.rows));
    const Octet gate = unpack(gate_at.take(row, p.rows)), value = unpack(value_at.take(row, p.rows));
    if (DROPOUT) apply_dropout<ALIGNED != 0>(dy, p.dropout, step, index);
    Octet dgate, dvalue, y;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      dgate.v[i] = dy.v[i] * value.v[i] * ACTIVATION::derivative(gate.v[i], p.slope);
      const float act = ACTIVATION::forward(gate.v[i], p.slope);
      dvalue.v[i] = dy.v[i] * act;
      y.v[i] = value.v[i] * act;
    }
    if (REMAKES) {
      if (DROPOUT) apply_dropout<ALIGNED != 0>(y, p.dropout, step, index);
      y_at.store(y, row == p.rows - 1);
    }
    index += index_step;
    dgate_at.store(dgate, row == p.rows - 1);
    dvalue_at.store(dvalue, row == p.rows - 1);
  }
}
