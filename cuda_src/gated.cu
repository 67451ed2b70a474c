// y = dropout(act(gate) · value) and its gradients, one pass each. The columns of a matrix h are those of the gate, then
// those of the value.
//
// Compiled for:
//   SCALAR      the type of all matrices
//   ACTIVATION  a struct of activations.cuh
//   DROPOUT     0 or 1
//   REMAKES     0 or 1: whether backward also writes y, over dy
//   ALIGNED     0 or 1, see sweep.cuh: each half of h has gaps between its rows, so that it is never flat
//   BLOCKS      how many blocks a multiprocessor shall hold, which bounds a thread's registers
//
// The gradient of h may be the same memory as h, and backward's y is the same as dy: only one thread reads and writes an octet,
// and the row that it reads ahead is a row that it has yet to write. So nothing here may promise the compiler that operands do
// not overlap or are only read (`__restrict__`, `__ldg`).

#include "activations.cuh"
#include "philox.cuh"
#include "sweep.cuh"

namespace lt {

struct GatedFwdParams {
  Matrix gate;
  Matrix value;  // has the strides of `gate`
  Matrix out;    // the output y
  uint32 rows;
  int64 cols;  // of each matrix
  Dropout dropout;
  float slope;
};

struct GatedBwdParams {
  Matrix dy;  // if REMAKES, the pass leaves y here
  Matrix gate;
  Matrix value;  // has the strides of `gate`
  Matrix dgate;
  Matrix dvalue;  // has the strides of `dgate`
  uint32 rows;
  int64 cols;  // of each matrix
  Dropout dropout;
  float slope;
};

// The second half of a matrix, with the strides of the first half: a thread then needs registers for only one of the
// halves' two steps from row to row, as the compiler sees that they are equal.
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
