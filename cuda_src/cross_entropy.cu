// Softmax cross-entropy and its gradient. Each row is read once, kept in shared memory as far as that goes, and its
// gradient written once. What does not fit is read again, for the most part from L2.
// Compiled for one SCALAR type, and ROW_THREADS of a block.

#include "cross_entropy.cuh"
#include "predecessor.cuh"
#include "softmax_rows.cuh"

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

// Starts to copy a batch of a row's octets into shared memory; of no row, nothing.
__device__ inline void fetch_batch(const Row& row, bool exists, const Group& group, const Held& held, uint32 batch) {
#pragma unroll
  for (int k = 0; k < kOctetsInFlight; ++k) {
    const uint32 slot = batch * kOctetsInFlight + k, octet = group.lane + slot * group.lanes;
    if (exists && octet < row.octets) held.fetch(slot, row.logits + row.octet_col(octet));
  }
  end_batch();
}

// As read_octets and write_octets, of octets that are on their way into shared memory, or there.
__device__ inline void read_fetched(Softmax& softmax, const Row& row, const Group& group, const Held& held,
                                    uint32 batches, bool with_total) {
  const uint32 own = octets_from(group.lane, row.octets, group.lanes);
#pragma unroll 1
  for (uint32 batch = 0; batch < batches; ++batch) {
    wait_for_all_but(batches - 1 - batch);
    const uint32 slot = batch * kOctetsInFlight, count = own > slot ? own - slot : 0;
    if (count == 0) break;
    Raw raw[kOctetsInFlight];
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) raw[k] = k < static_cast<int>(count) ? held.get(slot + k) : nothing();
    take_in(softmax, raw, count, with_total);
  }
}

// Says whether the octet `wanted`, counted among the thread's own, is in the batch.
__device__ inline bool write_fetched(SCALAR* gradient, const Group& group, const Held& held, const Slope& slope,
                                     uint32 wanted, uint32 own, uint32 batch) {
  const uint32 slot = batch * kOctetsInFlight;
#pragma unroll
  for (int k = 0; k < kOctetsInFlight; ++k) {
    if (slot + k >= own) break;
    const Raw raw = held.get(slot + k);
    Octet octet;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) octet.v[i] = slope.of(raw[i]);
    store_octet(gradient + (slot + k) * group.lanes * kOctet, octet);
  }
  return wanted - slot < static_cast<uint32>(kOctetsInFlight);
}

// Writes the gradient of a row that is on its way, fetching the row after it into the places that become free, and returns
// its loss. Memory is read while it is written, without a pause between rows.
__device__ inline float stream_row(const CrossEntropyParams& p, const Row& row, int64 label, const Row& next,
                                   bool has_next, const Group& group, const Held& held, float scale) {
  const uint32 batches = (held.slots + kOctetsInFlight - 1) / kOctetsInFlight;
  if (p.ignores && label == p.ignore_index) {
    wait_for_all_but<0>();
    clear(p, row, group);
    for (uint32 batch = 0; batch < batches; ++batch) fetch_batch(next, has_next, group, held, batch);
    return 0.0f;
  }
  const Target target(p, row, label);
  Softmax softmax{-CUDART_INF_F, 0.0f, 0.0f};
  read_fetched(softmax, row, group, held, batches, target.share > 0.0f);
  read_singles(softmax, p, row, group);
  softmax = reduce_row(softmax, group);
  const Slope slope = target.slope(softmax, scale);
  const uint32 own = octets_from(group.lane, row.octets, group.lanes), octet = row.octet_of(label);
  const bool is_own = octet < row.octets && octet % group.lanes == group.lane;
  const uint32 wanted = is_own ? octet / group.lanes : 0xFFFFFFFF;
  SCALAR* gradient = row.gradient + row.octet_col(group.lane);
  bool writes_label = false;
#pragma unroll 1
  for (uint32 batch = 0; batch < batches; ++batch) {
    writes_label |= write_fetched(gradient, group, held, slope, wanted, own, batch);
    fetch_batch(next, has_next, group, held, batch);
  }
  if (writes_label) row.set_gradient(p, label, slope.of(target.picked) + slope.at_label);
  write_singles(p, row, group, slope, label);
  return target.loss(softmax);
}

__device__ inline int64 label_at(const void* labels, int wide, int64 row) {
  return wide ? static_cast<const int64*>(labels)[row] : static_cast<const int*>(labels)[row];
}

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

// The calling thread's part of the sum of all losses: rows of which a block has one at a time, held as a whole.
__device__ inline float stream_rows(const CrossEntropyParams& p, const Group& group, const Held& held, float scale) {
  const uint32 batches = (held.slots + kOctetsInFlight - 1) / kOctetsInFlight;
  float loss = 0.0f;
  Row row(p, blockIdx.x);  // there are no more blocks than rows
  int64 label = label_at(p.labels, p.wide_labels, blockIdx.x);
  for (uint32 batch = 0; batch < batches; ++batch) fetch_batch(row, true, group, held, batch);
#pragma unroll 1
  for (int64 index = blockIdx.x; index < p.rows; index += gridDim.x) {
    const int64 next_index = index + gridDim.x;
    const bool has_next = next_index < p.rows;
    const Row next(p, next_index);
    const int64 next_label = has_next ? label_at(p.labels, p.wide_labels, next_index) : 0;  // known when it is needed
    const float loss_of_row = stream_row(p, row, label, next, has_next, group, held, scale);
    if (group.lane == 0) loss += loss_of_row;
    row = next;
    label = next_label;
  }
  return loss;
}

__device__ inline float do_rows(const CrossEntropyParams& p, const Group& group, const Held& held, float scale) {
  const uint32 rows_per_block = blockDim.x / p.lanes;
  float loss = 0.0f;
#pragma unroll 1
  for (int64 index = static_cast<int64>(blockIdx.x) * rows_per_block + threadIdx.x / p.lanes; index < p.rows;
       index += static_cast<int64>(gridDim.x) * rows_per_block) {
    const int64 label = label_at(p.labels, p.wide_labels, index);
    const Row row(p, index);
    if (p.ignores && label == p.ignore_index) {
      clear(p, row, group);
    } else {
      const float loss_of_row = do_row(p, row, label, group, held, scale);
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
  const Held held{memory, p.held};
  float loss = p.streams ? stream_rows(p, group, held, scale) : do_rows(p, group, held, scale);
  if (sum_over_grid(loss, p.partial, p.ticket, scratch) && threadIdx.x == 0) *p.loss = loss / averaged;
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