// Losses with their gradients. Each block writes a partial sum; loss_finish adds those in a fixed order.
// Compiled for one SCALAR type (predictions, logits, gradients) and one LABEL type.

#include <math_constants.h>

#include "predecessor.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace lt {

struct MseParams {
  Matrix prediction;
  Matrix target;
  Matrix gradient;  // may be absent
  float* partial;   // one a block
  int64 rows;
  int64 cols;
  float gradient_scale;  // 2 / (rows · cols)
};

struct CrossEntropyParams {
  Matrix logits;
  const LABEL* labels;
  Matrix gradient;  // may be absent
  float* partial;   // one a row
  int64 rows;
  int64 cols;
  float gradient_scale;  // 1 / rows
};

struct LossFinishParams {
  const float* partial;
  float* loss;
  int64 parts;
  float scale;
};

__device__ inline float logit(const CrossEntropyParams& p, int64 row, int64 col) {
  return to_float(*element<const SCALAR>(p.logits, row, col));
}

__device__ inline void write_softmax_gradient(const CrossEntropyParams& p, int64 row, int64 label, float max,
                                              float sum) {
  const bool valid = label >= 0 && label < p.cols;
  for (int64 col = threadIdx.x; col < p.cols; col += kBlock) {
    const float target = col == label ? 1.0f : 0.0f;
    const float softmax = expf(logit(p, row, col) - max) / sum;
    const float gradient = valid ? (softmax - target) * p.gradient_scale : CUDART_NAN_F;
    *element<SCALAR>(p.gradient, row, col) = from_float<SCALAR>(gradient);
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) mse_loss(const lt::MseParams p) {
  using namespace lt;
  wait_for_predecessor();
  __shared__ float scratch[kBlock];
  float sum = 0.0f;
  const int64 size = p.rows * p.cols;
  for (int64 i = static_cast<int64>(blockIdx.x) * kBlock + threadIdx.x; i < size;
       i += static_cast<int64>(gridDim.x) * kBlock) {
    const int64 row = i / p.cols, col = i % p.cols;
    const float difference = to_float(*element<const SCALAR>(p.prediction, row, col)) -
                             to_float(*element<const SCALAR>(p.target, row, col));
    sum += difference * difference;
    if (p.gradient.data) {
      *element<SCALAR>(p.gradient, row, col) = from_float<SCALAR>(difference * p.gradient_scale);
    }
  }
  sum = reduce_block<Sum>(sum, scratch);
  if (threadIdx.x == 0) p.partial[blockIdx.x] = sum;
}

// A block a row: maximum, sum of exponentials, then the gradient. A label out of range makes the loss NaN.
// The 1 block a multiprocessor keeps NVRTC 13.0 from spilling a register for occupancy; more fit all the same.
extern "C" __global__ void __launch_bounds__(256, 1) cross_entropy(const lt::CrossEntropyParams p) {
  using namespace lt;
  wait_for_predecessor();
  __shared__ float scratch[kBlock];
  for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
    float max = -CUDART_INF_F;
    for (int64 col = threadIdx.x; col < p.cols; col += kBlock) max = Max::combine(logit(p, row, col), max);
    max = reduce_block<Max>(max, scratch);
    float sum = 0.0f;
    for (int64 col = threadIdx.x; col < p.cols; col += kBlock) sum += expf(logit(p, row, col) - max);
    sum = reduce_block<Sum>(sum, scratch);
    const int64 label = p.labels[row];
    if (threadIdx.x == 0) {
      const bool valid = label >= 0 && label < p.cols;
      p.partial[row] = valid ? logf(sum) + max - logit(p, row, label) : CUDART_NAN_F;
    }
    // The gradient may be written over the logits: everything that is still needed of them has been read.
    __syncthreads();
    if (p.gradient.data) write_softmax_gradient(p, row, label, max, sum);
  }
}

extern "C" __global__ void __launch_bounds__(256) loss_finish(const lt::LossFinishParams p) {
  using namespace lt;
  wait_for_predecessor();
  __shared__ float scratch[kBlock];
  float sum = 0.0f;
  for (int64 i = threadIdx.x; i < p.parts; i += kBlock) sum += p.partial[i];
  sum = reduce_block<Sum>(sum, scratch);
  if (threadIdx.x == 0) *p.loss = sum * p.scale;
}
