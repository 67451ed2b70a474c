// Adds up partial sums of columns in a fixed order: the second half of a deterministic bias gradient.
// Compiled for one SCALAR type.

#include "vector.cuh"

namespace lt {

struct ColumnSumParams {
  const float* partial;  // (parts, cols)
  SCALAR* sum;
  int64 cols;
  int64 parts;
  int accumulate;  // add to what `sum` holds
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) column_sum_finish(const lt::ColumnSumParams p) {
  using namespace lt;
  const int64 col = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (col >= p.cols) return;
  float sum = p.accumulate ? to_float(p.sum[col]) : 0.0f;
  for (int64 part = 0; part < p.parts; ++part) sum += p.partial[part * p.cols + col];
  p.sum[col] = from_float<SCALAR>(sum);
}
