// Softmax cross-entropy and its gradient. Each row is read once, kept in shared memory as far as that goes, and its
// gradient written once. What does not fit is read again, for the most part from L2.
// Compiled for one SCALAR type, and ROW_THREADS of a block.

#include "cross_entropy.cuh"
#include "few_classes.cuh"
#include "predecessor.cuh"
#include "softmax_rows.cuh"
#include "stream_rows.cuh"

namespace lt {

struct CountLabelsParams {
  const void* labels;
  float* partial;  // one a block
  float* counted;
  uint32* ticket;
  int64 rows;
  int64 ignore_index;
  int wide_labels;
};

// Labels that are not `ignored`, of every `step`-th row from `first` on.
__device__ inline float count_others(const void* labels, int wide, int64 ignored, int64 rows, int64 first, int64 step) {
  float count = 0.0f;
#pragma unroll 1
  for (int64 row = first; row < rows; row += step) count += label_at(labels, wide, row) != ignored ? 1.0f : 0.0f;
  return count;
}

// The rows that the mean is over.
__device__ inline float averaged_rows(const CrossEntropyParams& p, float* scratch) {
  if (!p.ignores) return static_cast<float>(p.rows);
  if (p.counted) return *p.counted;
  const float count = count_others(p.labels, p.wide_labels, p.ignore_index, p.rows, threadIdx.x, blockDim.x);
  return sum_over_block(count, scratch);
}

__device__ inline float do_rows(const CrossEntropyParams& p, const Group& group, const Held& held, float scale) {
  const uint32 rows_per_block = blockDim.x / p.lanes;
  const Smoothing smoothing(p);
  float loss = 0.0f;
#pragma unroll 1
  for (int64 index = static_cast<int64>(blockIdx.x) * rows_per_block + threadIdx.x / p.lanes; index < p.rows;
       index += static_cast<int64>(gridDim.x) * rows_per_block) {
    const int64 label = label_at(p, index);
    const Row row(p, index);
    if (p.ignores && label == p.ignore_index) {
      clear(p, row, group);
    } else {
      const float loss_of_row = do_row(p, row, label, group, held, smoothing, scale);
      if (group.lane == 0) loss += loss_of_row;
    }
  }
  return loss;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 2) cross_entropy(const lt::CrossEntropyParams p) {
  using namespace lt;
  DYNAMIC_SHARED(uint4, memory);
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const float averaged = averaged_rows(p, scratch);
  const float scale = (p.grad_scale ? p.gradient_scale * *p.grad_scale : p.gradient_scale) / averaged;
  const Group group(p.lanes);
  const Held held{memory + threadIdx.x, p.held};
  float loss = p.streams ? stream_rows(p, group, held, scale) : do_rows(p, group, held, scale);
  if (sum_over_grid(loss, p.partial, p.ticket, scratch) && threadIdx.x == 0) *p.loss = loss / averaged;
}

// Of few classes, and of no more rows than a block has threads: a training step waits for it as long as its memory does
// to answer, so labels and logits are asked for together, and nothing is summed over a grid. More rows are bound by the
// number of accesses; vectors take fewer.
extern "C" __global__ void __launch_bounds__(1024) cross_entropy_few(const lt::CrossEntropyParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const int64 row = threadIdx.x;
  const int cols = row < p.rows ? static_cast<int>(p.cols) : 0;
  const int64 label = cols > 0 ? label_at(p, row) : 0;
  const float factor = p.grad_scale ? *p.grad_scale : 1.0f;
  FewClasses classes = FewClasses::load(p.logits, row, cols);
  const bool counts = cols > 0 && !(p.ignores && label == p.ignore_index);
  const float averaged = static_cast<float>(__syncthreads_count(counts));
  float loss = to_gradient(classes, cols, label, Smoothing(p), p.gradient_scale * factor / averaged);
  if (!counts) {
    classes = {};
    loss = 0.0f;
  }
  classes.store(p.gradient, row, cols);
  loss = sum_over_block(loss, scratch);
  if (row == 0) *p.loss = loss / averaged;
}

// Counts the rows that are not ignored. A launch of its own: no gradient can be written before their number is known.
extern "C" __global__ void __launch_bounds__(256) count_labels(const lt::CountLabelsParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64 threads = static_cast<int64>(gridDim.x) * blockDim.x;
  float count = count_others(p.labels, p.wide_labels, p.ignore_index, p.rows, thread, threads);
  if (sum_over_grid(count, p.partial, p.ticket, scratch) && threadIdx.x == 0) *p.counted = count;
}