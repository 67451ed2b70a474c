// y = dropout(act(z + bias)) in one pass over a matrix, in place or not.
// Compiled for one SCALAR type, one ACTIVATION, and DROPOUT 0 or 1.

#include "activations.cuh"
#include "philox.cuh"
#include "vector.cuh"

namespace lt {

struct EpilogueFwdParams {
  Matrix in;             // the matrix product
  Matrix preactivation;  // where z + bias is kept for backward; may be absent
  Matrix out;            // may be `in`
  const SCALAR* bias;    // one element a column; may be absent
  int64 rows;
  int64 cols;
  Dropout dropout;
  float slope;
};

}  // namespace lt

// A thread handles eight columns of a row, blockDim.x of them side by side; rows are strided over the grid.
extern "C" __global__ void __launch_bounds__(256) epilogue_fwd(const lt::EpilogueFwdParams p) {
  using namespace lt;
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  if (col >= p.cols) return;
  const int count = octet_count(col, p.cols);
  const uint32 step = DROPOUT ? dropout_step(p.dropout) : 0;
  Octet bias{};
  if (p.bias) bias = load<SCALAR>(Matrix{const_cast<SCALAR*>(p.bias), 0, 1}, 0, col, count);
  for (int64 row = static_cast<int64>(blockIdx.y) * blockDim.y + threadIdx.y; row < p.rows;
       row += static_cast<int64>(gridDim.y) * blockDim.y) {
    Octet z = load<SCALAR>(p.in, row, col, count);
    for (int i = 0; i < kOctet; ++i) z.v[i] += bias.v[i];
    if (p.preactivation.data) store<SCALAR>(p.preactivation, row, col, count, z);
    for (int i = 0; i < kOctet; ++i) z.v[i] = ACTIVATION::forward(z.v[i], p.slope);
    if (DROPOUT) {
      const Octet factors = dropout_factors(p.dropout, step, static_cast<uint64>(row * p.cols + col));
      for (int i = 0; i < kOctet; ++i) z.v[i] *= factors.v[i];
    }
    store<SCALAR>(p.out, row, col, count, z);
  }
}
