// Softmax cross-entropy and its gradient. Each row is read once and kept in shared memory, and its gradient is written
// once. The part of a row that does not fit into shared memory is read again, mostly from L2. If no gradient is wanted,
// nothing is kept.
//
// Compiled for one SCALAR type, ROW_THREADS, the threads of a block, ROW_BLOCKS, the blocks that a multiprocessor must
// hold, ROW_LANES, the threads that share a streamed row (see stream_rows.cuh), and GRADIENT and WEIGHTS, which
// cross_entropy.cuh explains.

#include "few_classes.cuh"
#include "stream_rows.cuh"

namespace lt {

struct CountLabelsParams {
  const void* labels;
  const float* class_weights;  // a weight for each class; null without weights
  float* partial;              // one partial sum for each block
  float* counted;
  uint32* ticket;
  int64 rows;
  int64 cols;
  int64 ignore_index;
  int wide_labels;
  int ignores;
};

// Loops over the rows of a block, for rows that are not streamed. All threads of a block loop equally often, because
// counting the labels is a reduction over the block, done in the first iteration while that row's logits are being
// loaded.
__device__ inline float do_rows(const CrossEntropyParams& p, const Group& group, const SharedRing& held, float* scratch,
                                Mean& mean) {
  const uint32 rows_per_block = blockDim.x / p.lanes;
  const int64 first = static_cast<int64>(blockIdx.x) * rows_per_block;
  const Smoothing smoothing(p);
  float loss = 0.0f;
#pragma unroll 1
  for (int64 base = first; base < p.rows; base += static_cast<int64>(gridDim.x) * rows_per_block) {
    const int64 index = base + threadIdx.x / p.lanes;
    const bool exists = index < p.rows;
    const int64 label = exists ? label_at(p, index) : 0;
    const bool counts = exists && !(p.ignores && label == p.ignore_index);
    const Row row(p, index);
    const Target target(p, row, counts ? label : -1, smoothing);
    const float weight = counts ? weight_of(p, index, label) : 0.0f;
    Softmax softmax = Softmax::of_nothing();
    if (counts) softmax = read_row(p, row, group, held, smoothing);
    if (base == first) mean = Mean(p, scratch);
    if (counts) {
      const float scale = kWeighted ? weight * mean.scale : mean.scale;
      if (kWrites) write_row(p, row, label, group, held, target.slope(softmax, scale), target);
      if (group.lane == 0) loss += kWeighted ? weight * target.loss(softmax) : target.loss(softmax);
    } else if (exists && kWrites) {
      clear(p, row, group);
    }
  }
  return loss;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(ROW_THREADS, ROW_BLOCKS) cross_entropy(const lt::CrossEntropyParams p) {
  using namespace lt;
  DYNAMIC_SHARED(uint4, memory);
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  Mean mean{};
  const SharedRing held{memory + threadIdx.x, p.held};
  float loss = p.streams ? stream_rows(p, Group(kLanes), held, scratch, mean)
                         : do_rows(p, Group(p.lanes), held, scratch, mean);
  if (p.streams && kBlockRows) {
    if (!is_last_block(p.ticket, gridDim.x)) return;
    loss = sum_over_block(sum_of_parts(p.partial, static_cast<uint32>(p.rows)), scratch);
    if (threadIdx.x == 0) *p.claimed = 0;
  } else if (!sum_over_grid(loss, p.partial, p.ticket, scratch)) {
    return;
  }
  if (threadIdx.x == 0) *p.loss = loss / mean.rows;
}

// Variant for few classes: one thread handles a row. The kernel is bound by memory latency, so that a thread issues the
// loads of its label and its logits together.
extern "C" __global__ void __launch_bounds__(1024) cross_entropy_few(const lt::CrossEntropyParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const int64 row = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int cols = row < p.rows ? static_cast<int>(p.cols) : 0;
  const int64 label = cols > 0 ? label_at(p, row) : 0;
  const float factor = p.grad_scale ? *p.grad_scale : 1.0f;
  FewClasses classes = FewClasses::load(p.logits, row, cols);
  const bool counts = cols > 0 && !(p.ignores && label == p.ignore_index);
  const float averaged = count_by_threads(p, counts, label, scratch);
  const float weight = counts ? weight_of(p, row, label) : 0.0f, scale = p.gradient_scale * factor / averaged;
  const bool is_right = p.tally.state && counts && is_first_largest(classes, cols, label);
  float loss = to_gradient(p, classes, cols, label, kWeighted ? weight * scale : scale);
  if (kWeighted) loss *= weight;
  if (!counts) {
    classes = {};
    loss = 0.0f;
  }
  if (kWrites) classes.store(p.gradient, row, cols);
  if (p.tally.state) {
    const int rows = __syncthreads_count(counts), correct = __syncthreads_count(is_right);
    if (threadIdx.x == 0) add_rows(p.tally, rows, correct);
  }
  if (sum_over_grid(loss, p.partial, p.ticket, scratch) && threadIdx.x == 0) store_loss(p.loss, loss / averaged, p.tally);
}

// Counts the rows that are not ignored, or adds up the class weights of their labels. It is a separate launch, because
// every gradient is divided by this sum.
extern "C" __global__ void __launch_bounds__(256) count_labels(const lt::CountLabelsParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64 threads = static_cast<int64>(gridDim.x) * blockDim.x;
  float count = label_count(p).sum(thread, threads);
  if (sum_over_grid(count, p.partial, p.ticket, scratch) && threadIdx.x == 0) *p.counted = count;
}
