// Softmax cross-entropy that needs the logits of only one chunk of classes in memory. log_sums adds one chunk after
// another to each row's logarithm of the sum of exponentials, and to the row's mean logit under the smoothed label.
// chunk_gradient is launched when the logarithms cover all classes: it overwrites a chunk of logits with its gradient.
//
// A block computes a row at a time. In log_sums, its threads read the row once for the maximum and, mostly from L1,
// once more for the sum. Compiled for one SCALAR type.

#include <math_constants.h>

#include "instructions.cuh"
#include "reduce.cuh"
#include "tally.cuh"

namespace lt {

struct ClassChunkParams {
  Matrix logits;
  const void* labels;
  float* log_sums;           // read and written by log_sums; -infinity before the first chunk
  float* targets;            // each row's mean logit under the smoothed label, for log_sums; null for chunk_gradient
  const float* row_weights;  // factors of the rows' gradients, for chunk_gradient; null for log_sums
  int64 rows;
  int64 cols;   // columns of the chunk
  int64 first;  // the class of the chunk's first column
  int wide_labels;
  float at_label;   // probability that the smoothed label gives to its own class, besides `elsewhere`
  float elsewhere;  // probability that the smoothed label gives to every class
};

__device__ inline float max_over_block(float value, float* scratch) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  float max = scratch[0];
  for (uint32 warp = 1; warp < blockDim.x / kWarp; ++warp) max = fmaxf(max, scratch[warp]);
  __syncthreads();
  return max;
}

// log(exp(a) + exp(b)); NaN if a or b is NaN.
__device__ inline float log_add(float a, float b) {
  const float low = a > b ? b : a, high = a > b ? a : b;
  return low == -CUDART_INF_F ? high : high + log1pf(expf(low - high));
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) log_sums(const lt::ClassChunkParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const int64 step = static_cast<int64>(kOctet) * blockDim.x;
  for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
    float max = -CUDART_INF_F, sum = 0.0f, total = 0.0f;
    for (int64 col = kOctet * threadIdx.x; col < p.cols; col += step) {
      const int count = octet_count(col, p.cols);
      const Octet z = load<SCALAR>(p.logits, row, col, count);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        if (i < count) max = fmaxf(max, z.v[i]);
        total += z.v[i];  // 0 beyond `count`
      }
    }
    max = max_over_block(max, scratch);
    const float base = max == -CUDART_INF_F ? 0.0f : max;  // -infinity minus itself would be NaN
    for (int64 col = kOctet * threadIdx.x; col < p.cols; col += step) {
      const int count = octet_count(col, p.cols);
      const Octet z = load<SCALAR>(p.logits, row, col, count);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        if (i < count) sum += exp2_approx((z.v[i] - base) * kLog2E);
      }
    }
    sum = sum_over_block(sum, scratch);
    if (p.elsewhere != 0.0f) total = sum_over_block(total, scratch);
    if (threadIdx.x != 0) continue;
    p.log_sums[row] = log_add(p.log_sums[row], base + logf(sum));
    const int64 col = label_at(p.labels, p.wide_labels, row) - p.first;
    float target = p.targets[row];
    if (col >= 0 && col < p.cols) target += p.at_label * to_float(*element<const SCALAR>(p.logits, row, col));
    if (p.elsewhere != 0.0f) target += p.elsewhere * total;
    p.targets[row] = target;
  }
}

extern "C" __global__ void __launch_bounds__(256) chunk_gradient(const lt::ClassChunkParams p) {
  using namespace lt;
  wait_for_predecessor();
  const int64 step = static_cast<int64>(kOctet) * blockDim.x;
  for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const float weight = p.row_weights[row], log_sum = p.log_sums[row];
    const int64 label = label_at(p.labels, p.wide_labels, row) - p.first;
    for (int64 col = kOctet * threadIdx.x; col < p.cols; col += step) {
      const int count = octet_count(col, p.cols);
      Octet z = load<SCALAR>(p.logits, row, col, count);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float wanted = p.elsewhere + (col + i == label ? p.at_label : 0.0f);
        // The gradient of a row with weight 0 is 0, even if the row's logits are NaN.
        z.v[i] = weight == 0.0f ? 0.0f : weight * (exp2_approx((z.v[i] - log_sum) * kLog2E) - wanted);
      }
      store<SCALAR>(p.logits, row, col, count, z);
    }
  }
}
