// y = mask · scale · x. Backward is the same pass over dy. Compiled for one SCALAR type.

#include "philox.cuh"
#include "vector.cuh"

namespace lt {

struct DropoutParams {
  Matrix in;
  Matrix out;  // may be `in`
  int64 rows;
  int64 cols;
  Dropout dropout;
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) dropout(const lt::DropoutParams p) {
  using namespace lt;
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  if (col >= p.cols) return;
  const int count = octet_count(col, p.cols);
  const uint32 step = dropout_step(p.dropout);
  for (int64 row = static_cast<int64>(blockIdx.y) * blockDim.y + threadIdx.y; row < p.rows;
       row += static_cast<int64>(gridDim.y) * blockDim.y) {
    Octet x = load<SCALAR>(p.in, row, col, count);
    const Octet factors = dropout_factors(p.dropout, step, static_cast<uint64>(row * p.cols + col));
    for (int i = 0; i < kOctet; ++i) x.v[i] *= factors.v[i];
    store<SCALAR>(p.out, row, col, count, x);
  }
}
