// Computes y = dropout(act(z + bias)) + addend, in place or not, where z is a matrix product that is already stored.
//
// Compiled for:
//   SCALAR      the type of y, of the bias, of the kept pre-activation and of the addend
//   PRODUCT     the type of the product: SCALAR, or float so that a 16-bit result is rounded only once
//   ACTIVATION  a struct of activations.cuh
//   DROPOUT     0 or 1
//   KEEP        1 if the pre-activation z + bias is written as well, otherwise 0
//   ADD         1 if there is an addend, which y may overwrite, because one thread reads and writes each octet
//   ALIGNED     see sweep.cuh
//   BLOCKS      number of blocks that a multiprocessor must hold, which limits a thread's registers

#include "activations.cuh"
#include "philox.cuh"
#include "sweep.cuh"

namespace lt {

struct EpilogueFwdParams {
  Matrix in;             // the matrix product, of type PRODUCT
  Matrix preactivation;  // the stored pre-activation z + bias, only with KEEP; may be `in` if the types agree
  Matrix out;            // the output y; may be `in` if the types agree, and may be `addend`
  Matrix addend;         // the matrix that is added last; used only if ADD is 1
  const SCALAR* bias;    // the bias, one element for each column; may be null
  uint32 rows;
  int64 cols;
  Dropout dropout;
  float slope;
};

// Loads the bias elements of the columns of a thread's octets, which are the same in every row.
__device__ inline Octet load_bias(const EpilogueFwdParams& p, const Sweep& sweep) {
  if (!kFlat) return load<SCALAR>(Matrix{const_cast<SCALAR*>(p.bias), 0, 1}, 0, sweep.col, sweep.count);
  Octet out;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out.v[i] = to_float(p.bias[sweep.column(i, p.cols)]);
  return out;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, BLOCKS) epilogue_fwd(const lt::EpilogueFwdParams p) {
  using namespace lt;
  const Sweep sweep(p.cols);
  Reader<PRODUCT> in(p.in, sweep);
  Cursor<SCALAR> out(p.out, sweep);
#if ADD
  Reader<SCALAR> addend(p.addend, sweep);
#endif
#if KEEP
  Cursor<SCALAR> kept(p.preactivation, sweep);
#endif
  uint64 index = sweep.index(p.cols);
  const uint64 index_step = sweep.step * static_cast<uint64>(p.cols);
  wait_for_predecessor();
  if (sweep.count == 0) return;
  const uint32 step = DROPOUT ? dropout_step(p.dropout) : 0;
  Octet bias{};
  if (p.bias) bias = load_bias(p, sweep);
  in.start(sweep, p.rows);
#if ADD
  addend.start(sweep, p.rows);
#endif
  for (uint32 row = sweep.row; row < p.rows; row += sweep.step) {
    Octet z = unpack(in.take(row, p.rows));
    z += bias;
#if KEEP
    kept.store(z, row == p.rows - 1);
#endif
#pragma unroll
    for (int i = 0; i < kOctet; ++i) z.v[i] = ACTIVATION::forward(z.v[i], p.slope);
    if (DROPOUT) apply_dropout<ALIGNED != 0>(z, p.dropout, step, index);
    index += index_step;
#if ADD
    z += unpack(addend.take(row, p.rows));
#endif
    out.store(z, row == p.rows - 1);
  }
}
