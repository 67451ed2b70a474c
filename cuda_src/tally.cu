// Adds a stored loss to a tally and, if it is a loss of classes, the numbers of labelled and of correctly classified
// rows. It is launched after losses whose own kernels do not add to a tally, such as cross-entropy of many classes.
// Compiled for one SCALAR type, that of the logits.

#include "instructions.cuh"
#include "reduce.cuh"
#include "tally.cuh"

namespace lt {

struct TallyParams {
  Matrix logits;
  const void* labels;
  const float* loss;
  int64 rows;  // 0 for a loss without classes
  int64 cols;
  int64 ignore_index;
  int wide_labels;
  int ignores;
  Tally tally;
};

// True if the label is the first of the row's largest logits, and no logit is NaN. All lanes of a warp must call it.
__device__ inline bool is_first_largest(const TallyParams& p, int64 row, int64 label) {
  if (label < 0 || label >= p.cols) return false;
  const SCALAR* logits = static_cast<const SCALAR*>(p.logits.data) + row * p.logits.row_stride;
  const float picked = to_float(logits[label * p.logits.col_stride]);
  int beaten = 0;
  for (int64 col = threadIdx.x % kWarp; col < p.cols; col += kWarp) {
    const float other = to_float(logits[col * p.logits.col_stride]);
    beaten |= col < label ? !(other < picked) : !(other <= picked);
  }
#pragma unroll 1
  for (int step = kWarp / 2; step > 0; step /= 2) beaten |= __shfl_xor_sync(0xFFFFFFFF, beaten, step);
  return !beaten;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) tally(const lt::TallyParams p) {
  using namespace lt;
  __shared__ uint32 counted, correct;
  wait_for_predecessor();
  if (threadIdx.x == 0) counted = correct = 0;
  __syncthreads();
  const uint32 warps = blockDim.x / kWarp;
  for (int64 row = blockIdx.x * warps + threadIdx.x / kWarp; row < p.rows; row += gridDim.x * warps) {
    const int64 label = label_at(p.labels, p.wide_labels, row);
    if (p.ignores && label == p.ignore_index) continue;
    const bool is_right = is_first_largest(p, row, label);
    if (threadIdx.x % kWarp != 0) continue;
    atomicAdd(&counted, 1u);
    if (is_right) atomicAdd(&correct, 1u);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  add_rows(p.tally, counted, correct);
  if (blockIdx.x == 0) add_loss(p.tally, *p.loss);
}
