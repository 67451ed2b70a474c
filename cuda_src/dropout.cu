// y = mask · scale · x. The backward pass runs the same kernel over dy. Compiled for one SCALAR type, ALIGNED (see
// sweep.cuh) and BLOCKS, the number of blocks that a multiprocessor must hold.

#include "philox.cuh"
#include "sweep.cuh"

namespace lt {

struct DropoutParams {
  Matrix in;
  Matrix out;  // may be `in`
  uint32 rows;
  int64 cols;
  Dropout dropout;
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, BLOCKS) dropout(const lt::DropoutParams p) {
  using namespace lt;
  const Sweep sweep(p.cols);
  Reader<SCALAR> in(p.in, sweep);
  Cursor<SCALAR> out(p.out, sweep);
  uint64 index = sweep.index(p.cols);
  const uint64 index_step = sweep.step * static_cast<uint64>(p.cols);
  wait_for_predecessor();
  if (sweep.count == 0) return;
  const uint32 step = dropout_step(p.dropout);
  in.start(sweep, p.rows);
  for (uint32 row = sweep.row; row < p.rows; row += sweep.step) {
    Octet x = unpack(in.take(row, p.rows));
    apply_dropout<ALIGNED>(x, p.dropout, step, index);
    index += index_step;
    out.store(x, row == p.rows - 1);
  }
}
