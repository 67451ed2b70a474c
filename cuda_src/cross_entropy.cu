// Softmax cross-entropy and its gradient. Each row is read once, kept in shared memory as far as that goes, and its
// gradient written once. What does not fit is read again, for the most part from L2.
// Compiled for one SCALAR type, and ROW_THREADS of a block.

#include "approx.cuh"
#include "cross_entropy.cuh"
#include "predecessor.cuh"

namespace lt {

// What a thread waits for at once. Its exponentials are added up before they join the row's sum, which makes that more
// exact as well.
constexpr int kOctetsInFlight = 8 / sizeof(SCALAR);
constexpr int kSinglesInFlight = 8;

struct CountLabelsParams {
  const void* labels;
  float* partial;  // one a block
  float* counted;
  uint32* ticket;
  int64 rows;
  int64 ignore_index;
  int wide_labels;
};

constexpr float kLog2E = 1.4426950408889634f;

// Subtracting first costs an instruction more than one multiply-add would, and holds for logits of any size.
__device__ inline float exponential(float logit, float max) { return exp2_approx((logit - max) * kLog2E); }

// What logits come to.
struct Softmax {
  float max;
  float sum;    // of exp(logit - max)
  float total;  // of the logits; kept where labels are smoothed

  __device__ void raise_max(float to) {
    if (!(to > max)) return;
    sum *= exponential(max, to);
    max = to;
  }

  // What to subtract before exp: nothing as long as all logits are -inf.
  __device__ float finite_max() const { return max == -CUDART_INF_F ? 0.0f : max; }

  __device__ void merge(Softmax other) {
    raise_max(other.max);
    other.raise_max(max);
    sum += other.sum;
    total += other.total;
  }

  __device__ Softmax of_peer(const Group& group, uint32 step) const {
    return {__shfl_xor_sync(group.peers, max, step), __shfl_xor_sync(group.peers, sum, step),
            __shfl_xor_sync(group.peers, total, step)};
  }
};

// Takes in the first `count` of some octets; the others are `nothing()`.
template <int kCount>
__device__ inline void take_in(Softmax& softmax, const Raw (&raw)[kCount], uint32 count, bool with_total) {
  float max = raw[0][0];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) max = fmaxf(max, raw[k][i]);  // passes over NaN, which the sum keeps
  }
  softmax.raise_max(max);
  const float base = softmax.finite_max();
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) sum += exponential(raw[k][i], base);
  }
  softmax.sum += sum;
  if (!with_total) return;
  float total = 0.0f;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (k >= static_cast<int>(count)) break;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) total += raw[k][i];
  }
  softmax.total += total;
}

// How many of `octets` a thread has that takes every `lanes`-th of them from `first` on.
__device__ inline uint32 octets_from(uint32 first, uint32 octets, uint32 lanes) {
  return first < octets ? (octets - first + lanes - 1) / lanes : 0;
}

__device__ inline void read_octets(Softmax& softmax, const Row& row, const Group& group, const Held& held,
                                   bool with_total) {
  uint32 slot = 0;
#pragma unroll 1
  for (uint32 first = group.lane; first < row.octets; first += kOctetsInFlight * group.lanes, slot += kOctetsInFlight) {
    Raw raw[kOctetsInFlight];
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      const uint32 octet = first + k * group.lanes;
      raw[k] = octet < row.octets ? load_octet(row.logits + row.octet_col(octet)) : nothing();
    }
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      if (slot + k < held.slots) held.put(slot + k, raw[k]);
    }
    take_in(softmax, raw, octets_from(first, row.octets, group.lanes), with_total);
  }
}

__device__ inline void read_singles(Softmax& softmax, const CrossEntropyParams& p, const Row& row,
                                    const Group& group) {
  const int64 singles = p.cols - row.octet_cols();
#pragma unroll 1
  for (int64 first = group.lane; first < singles; first += kSinglesInFlight * group.lanes) {
    float logits[kSinglesInFlight];
    float max = -CUDART_INF_F;
#pragma unroll
    for (int k = 0; k < kSinglesInFlight; ++k) {
      const int64 single = first + k * group.lanes;
      const bool exists = single < singles;
      logits[k] = exists ? to_float(row.logit(p, row.single_col(single))) : -CUDART_INF_F;
      if (exists) softmax.total += logits[k];
      max = fmaxf(max, logits[k]);
    }
    softmax.raise_max(max);
    const float base = softmax.finite_max();
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kSinglesInFlight; ++k) sum += exponential(logits[k], base);
    softmax.sum += sum;
  }
}

// The whole row's, to every thread of the group. What the group has read before may be overwritten afterwards.
__device__ inline Softmax reduce_row(Softmax softmax, const Group& group) {
  __shared__ Softmax of_warp[kMaxWarps];
#pragma unroll 1
  for (uint32 step = (group.lanes < kWarp ? group.lanes : kWarp) / 2; step > 0; step /= 2) {
    softmax.merge(softmax.of_peer(group, step));
  }
  __syncwarp(group.peers);
  if (group.lanes <= kWarp) return softmax;
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = softmax;
  __syncthreads();
  softmax = of_warp[0];
#pragma unroll 1
  for (uint32 warp = 1; warp < blockDim.x / kWarp; ++warp) softmax.merge(of_warp[warp]);
  __syncthreads();
  return softmax;
}

// gradient = softmax · scale + shift, and `at_label` more at the label.
struct Slope {
  float max;
  float scale;
  float shift;
  float at_label;

  __device__ float of(float logit) const { return exponential(logit, max) * scale + shift; }
};

// Says whether the octet `wanted` is among those that this thread has written.
__device__ inline bool write_octets(const Row& row, const Group& group, const Held& held, const Slope& slope,
                                    uint32 wanted) {
  bool found = false;
  uint32 slot = 0;
#pragma unroll 1
  for (uint32 first = group.lane; first < row.octets; first += kOctetsInFlight * group.lanes, slot += kOctetsInFlight) {
    Raw raw[kOctetsInFlight];
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      const uint32 octet = first + k * group.lanes;
      if (octet >= row.octets) break;
      raw[k] = slot + k < held.slots ? held.get(slot + k) : load_octet(row.logits + row.octet_col(octet));
    }
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      const uint32 octet = first + k * group.lanes;
      if (octet >= row.octets) break;
      Octet gradient;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) gradient.v[i] = slope.of(raw[k][i]);
      store_octet(row.gradient + row.octet_col(octet), gradient);
      found |= octet == wanted;
    }
  }
  return found;
}

__device__ inline void write_singles(const CrossEntropyParams& p, const Row& row, const Group& group,
                                     const Slope& slope, int64 label) {
  const int64 singles = p.cols - row.octet_cols();
#pragma unroll 1
  for (int64 single = group.lane; single < singles; single += group.lanes) {
    const int64 col = row.single_col(single);
    const float gradient = slope.of(to_float(row.logit(p, col)));
    row.set_gradient(p, col, col == label ? gradient + slope.at_label : gradient);
  }
}

__device__ inline void clear(const CrossEntropyParams& p, const Row& row, const Group& group) {
  const int64 singles = p.cols - row.octet_cols();
#pragma unroll 1
  for (uint32 octet = group.lane; octet < row.octets; octet += group.lanes) {
    store_octet(row.gradient + row.octet_col(octet), Octet{});
  }
#pragma unroll 1
  for (int64 single = group.lane; single < singles; single += group.lanes) {
    row.set_gradient(p, row.single_col(single), 0.0f);
  }
}

// What a row's label asks for. A label out of range makes loss and gradient NaN.
struct Target {
  int64 label;
  bool valid;
  float picked;  // the label's logit
  float certainty;
  float share;  // of the smoothed target that each class has

  __device__ Target(const CrossEntropyParams& p, const Row& row, int64 label_)
      : label(label_),
        valid(label >= 0 && label < p.cols),
        picked(valid ? to_float(row.logit(p, label)) : CUDART_NAN_F),
        certainty(1.0f - p.smoothing),
        share(p.smoothing / static_cast<float>(p.cols)) {}

  __device__ Slope slope(const Softmax& softmax, float scale) const {
    return {softmax.max, valid ? scale / softmax.sum : CUDART_NAN_F, -share * scale, -certainty * scale};
  }
  __device__ float loss(const Softmax& softmax) const {
    const float loss = softmax.max + logf(softmax.sum) - certainty * picked;
    return share > 0.0f ? loss - share * softmax.total : loss;
  }
};

// Writes the gradient of a row and returns its loss.
__device__ inline float do_row(const CrossEntropyParams& p, const Row& row, int64 label, const Group& group,
                               const Held& held, float scale) {
  const Target target(p, row, label);
  Softmax softmax{-CUDART_INF_F, 0.0f, 0.0f};
  read_octets(softmax, row, group, held, target.share > 0.0f);
  read_singles(softmax, p, row, group);
  softmax = reduce_row(softmax, group);
  const Slope slope = target.slope(softmax, scale);
  // The label's element of an octet is mended by the thread that has written the octet.
  const bool writes_label = write_octets(row, group, held, slope, row.octet_of(label));
  if (writes_label) row.set_gradient(p, label, slope.of(target.picked) + slope.at_label);
  write_singles(p, row, group, slope, label);
  return target.loss(softmax);
}

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
