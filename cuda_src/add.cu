// out = a + b, computed in FP32 and rounded once. Compiled for one SCALAR type, ALIGNED (see sweep.cuh) and BLOCKS, the
// number of blocks that a multiprocessor must hold.
//
// `out` may be the same memory as `a`, `b` or both: each octet is read and written by one thread, and a thread
// prefetches only rows that it has not written yet.

#include "sweep.cuh"

namespace lt {

struct AddParams {
  Matrix a;
  Matrix b;
  Matrix out;
  uint32 rows;
  int64 cols;
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, BLOCKS) add(const lt::AddParams p) {
  using namespace lt;
  const Sweep sweep(p.cols);
  Reader<SCALAR> a(p.a, sweep), b(p.b, sweep);
  Cursor<SCALAR> out(p.out, sweep);
  wait_for_predecessor();
  if (sweep.count == 0) return;
  a.start(sweep, p.rows);
  b.start(sweep, p.rows);
  for (uint32 row = sweep.row; row < p.rows; row += sweep.step) {
    Octet sum = unpack(a.take(row, p.rows));
    sum += unpack(b.take(row, p.rows));
    out.store(sum, row == p.rows - 1);
  }
}
