// Cross-entropy of one row of logits by a group of threads: first the row's maximum and sum of exponentials, then its
// gradient. Compiled for the definitions that cross_entropy.cuh lists, and ROW_LANES: the number of threads of a group
// that streams rows (see stream_rows.cuh), a warp or a whole block.
#pragma once

#include "cross_entropy.cuh"

namespace lt {

// Number of packets whose loads a thread has in flight. Their exponentials are added up among themselves before they
// are added to the row's sum, which also makes the sum more accurate.
constexpr int kPacketsInFlight = 4;
constexpr int kSinglesInFlight = 8;

constexpr uint32 kLanes = ROW_LANES;
constexpr bool kBlockRows = kLanes == kRowThreads;  // true if a group is a whole block; otherwise it is at most a warp

constexpr uint32 kWarps = kRowThreads / kWarp;
static_assert(!kBlockRows || (kWarps & (kWarps - 1)) == 0, "one warp adds up the results of all warps of a block");

__device__ inline float exponential(float logit, float max) { return exp2_approx((logit - max) * kLog2E); }

// Computes exp(logit - max) by one multiply-add and one exponential, as 2^(logit · log₂e - max · log₂e), where max ·
// log₂e is computed once and rounded. The rounding multiplies all exponentials of a row by the same factor, at most
// 2^64, which `correction` undoes. If the maximum exceeds kLarge, the products would overflow, so that 2^(logit - max)
// is computed instead: every logit that differs from such a maximum is at least 64 below it, and both powers are
// negligible.
struct Exponential {
  static constexpr float kLarge = 1 << 30;

  float factor;
  float base;
  float correction;

  __device__ explicit Exponential(float max) : factor(fabsf(max) < kLarge ? kLog2E : 1.0f), base(max * factor) {
    correction = exp2_approx(-fmaf(max, factor, -base));
  }
  __device__ float operator()(float logit) const { return exp2_approx(fmaf(logit, factor, -base)); }
};

// Running maximum and sums of softmax over the logits read so far. Aligned, so that one instruction loads or stores all
// four numbers.
struct alignas(16) Softmax {
  float max;
  float sum;    // sum of exp(logit - max)
  float total;  // sum of the logits, each times its class weight if there are any; used only with label smoothing
  float mass;   // sum of the class weights; used only with label smoothing and class weights

  static __device__ Softmax of_nothing() { return {-CUDART_INF_F, 0.0f, 0.0f, 0.0f}; }

  __device__ void raise_max(float to) {
    if (!(to > max)) return;
    sum *= exponential(max, to);
    max = to;
  }

  // The maximum to subtract before exp; 0 if all logits so far are -infinity, because -infinity - -infinity would be
  // NaN.
  __device__ float finite_max() const { return max == -CUDART_INF_F ? 0.0f : max; }
};

// The columns of a thread's packets: the first packet's first column, and the distance from packet to packet.
struct Columns {
  int64 first;
  int64 step;
};

// Adds the first `count` packets to a row's maximum and sum. The caller has set the other packets to `nothing()`, which
// adds 0.
template <int kCount>
__device__ inline void accumulate(Softmax& softmax, const Raw (&raw)[kCount], uint32 count, bool with_total,
                               const float* class_weights, const Columns& columns) {
  Raw largest = raw[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) largest = largest.max(raw[k]);
  softmax.raise_max(largest.max());
  const Exponential exponential(softmax.finite_max());
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int i = 0; i < kPacket; ++i) sum += exponential(raw[k][i]);
  }
  softmax.sum += sum * exponential.correction;
  if (!with_total) return;
  float total = 0.0f, mass = 0.0f;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (k >= static_cast<int>(count)) break;
#pragma unroll
    for (int i = 0; i < kPacket; ++i) {
      const float weight = kSpreads ? class_weights[columns.first + k * columns.step + i] : 1.0f;
      total += kSpreads ? weight * raw[k][i] : raw[k][i];
      if (kSpreads) mass += weight;
    }
  }
  softmax.total += total;
  if (kSpreads) softmax.mass += mass;
}

// Number of a thread's packets, if it has every `lanes`-th of `packets` packets, from `first` on.
__device__ inline uint32 packets_from(uint32 first, uint32 packets, uint32 lanes) {
  return first < packets ? (packets - first + lanes - 1) / lanes : 0;
}

__device__ inline void read_packets(Softmax& softmax, const CrossEntropyParams& p, const Row& row, const Group& group,
                                   const SharedRing& held, bool with_total) {
  uint32 slot = 0;
#pragma unroll 1
  for (uint32 first = group.lane; first < row.packets; first += kPacketsInFlight * group.lanes, slot += kPacketsInFlight) {
    Raw raw[kPacketsInFlight];
#pragma unroll
    for (int k = 0; k < kPacketsInFlight; ++k) {
      const uint32 packet = first + k * group.lanes;
      raw[k] = packet < row.packets ? load_packet(row.logits + row.packet_col(packet)) : nothing();
    }
#pragma unroll
    for (int k = 0; k < kPacketsInFlight; ++k) {
      if (slot + k < held.slots) held.put(slot + k, raw[k]);
    }
    const Columns columns{row.packet_col(first), static_cast<int64>(group.lanes) * kPacket};
    accumulate(softmax, raw, packets_from(first, row.packets, group.lanes), with_total, p.class_weights, columns);
  }
}

__device__ inline void add_to_total(Softmax& softmax, const CrossEntropyParams& p, float logit, int64 col) {
  const float weight = kSpreads ? p.class_weights[col] : 1.0f;
  softmax.total += kSpreads ? weight * logit : logit;
  if (kSpreads) softmax.mass += weight;
}

__device__ inline void accumulate(Softmax& softmax, const CrossEntropyParams& p, float logit, int64 col) {
  softmax.raise_max(logit);
  softmax.sum += exponential(logit, softmax.finite_max());
  add_to_total(softmax, p, logit, col);
}

__device__ inline void read_singles(Softmax& softmax, const CrossEntropyParams& p, const Row& row,
                                    const Group& group) {
  const int64 singles = p.cols - row.packet_cols();
#pragma unroll 1
  for (int64 first = group.lane; first < singles; first += kSinglesInFlight * group.lanes) {
    float logits[kSinglesInFlight];
    float max = -CUDART_INF_F;
#pragma unroll
    for (int k = 0; k < kSinglesInFlight; ++k) {
      const int64 single = first + k * group.lanes;
      const bool exists = single < singles;
      logits[k] = exists ? to_float(row.logit(p, row.single_col(single))) : -CUDART_INF_F;
      if (exists) add_to_total(softmax, p, logits[k], row.single_col(single));
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

// Combines the running softmax of `lanes` neighbouring threads of a warp, a power of two; each of them gets the result.
// The maximum is reduced first, so that each thread rescales its sum by a single exponential.
__device__ inline Softmax reduce_lanes(Softmax softmax, uint32 lanes, uint32 peers) {
  float max = softmax.max;
#pragma unroll 1
  for (uint32 step = lanes / 2; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(peers, max, step));
  softmax.raise_max(max);
#pragma unroll 1
  for (uint32 step = lanes / 2; step > 0; step /= 2) {
    softmax.sum += __shfl_xor_sync(peers, softmax.sum, step);
    softmax.total += __shfl_xor_sync(peers, softmax.total, step);
    if (kSpreads) softmax.mass += __shfl_xor_sync(peers, softmax.mass, step);
  }
  return softmax;
}

// Combines the running softmax of kCount lanes, for a full warp. The shuffles get the full mask as a constant: a mask
// that is not known at compile time takes more instructions than the shuffle itself.
template <uint32 kCount>
__device__ inline Softmax reduce_lanes(Softmax softmax) {
  float max = softmax.max;
#pragma unroll
  for (uint32 step = kCount / 2; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFF, max, step));
  softmax.raise_max(max);
#pragma unroll
  for (uint32 step = kCount / 2; step > 0; step /= 2) {
    softmax.sum += __shfl_xor_sync(0xFFFFFFFF, softmax.sum, step);
    softmax.total += __shfl_xor_sync(0xFFFFFFFF, softmax.total, step);
    if (kSpreads) softmax.mass += __shfl_xor_sync(0xFFFFFFFF, softmax.mass, step);
  }
  return softmax;
}

// Combines the running softmax of a whole group; every thread gets the result. After the call all threads of the group
// have read the row, so that its memory may be overwritten.
__device__ inline Softmax reduce_row(Softmax softmax, const Group& group) {
  const bool is_warp = group.lanes >= kWarp;
  softmax = is_warp ? reduce_lanes<kWarp>(softmax) : reduce_lanes(softmax, group.lanes, group.peers);
  __syncwarp(group.peers);
  if constexpr (kBlockRows) {
    __shared__ Softmax of_warp[kWarps];
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = softmax;
    __syncthreads();
    softmax = reduce_lanes<kWarps>(of_warp[threadIdx.x % kWarps]);
    __syncthreads();
  }
  return softmax;
}

// The gradient of a logit: softmax · scale + shift, plus `at_label` at the label. With label smoothing and class
// weights, the shift of a column is multiplied by its class weight.
struct Slope {
  Exponential exponential;
  float scale;  // the scale divided by the sum of exponentials, and corrected for the rounding of max · log₂e
  float shift;
  float at_label;
  const float* class_weights;

  __device__ float of(float logit, int64 col) const {
    return exponential(logit) * scale + (kSpreads ? shift * class_weights[col] : shift);
  }
  __device__ Values of(const Raw& raw, int64 col) const {
    Values values;
#pragma unroll
    for (int i = 0; i < kPacket; ++i) values.v[i] = of(raw[i], col + i);
    return values;
  }
};

// Writes the gradient of the thread's packets; returns true if packet `wanted` is among them.
__device__ inline bool write_packets(const Row& row, const Group& group, const SharedRing& held, const Slope& slope,
                                    uint32 wanted) {
  bool found = false;
  uint32 slot = 0;
#pragma unroll 1
  for (uint32 first = group.lane; first < row.packets; first += kPacketsInFlight * group.lanes, slot += kPacketsInFlight) {
    Raw raw[kPacketsInFlight];
#pragma unroll
    for (int k = 0; k < kPacketsInFlight; ++k) {
      const uint32 packet = first + k * group.lanes;
      if (packet >= row.packets) break;
      raw[k] = slot + k < held.slots ? held.get(slot + k) : load_packet(row.logits + row.packet_col(packet));
    }
#pragma unroll
    for (int k = 0; k < kPacketsInFlight; ++k) {
      const uint32 packet = first + k * group.lanes;
      if (packet >= row.packets) break;
      store_past(row.gradient + row.packet_col(packet), slope.of(raw[k], row.packet_col(packet)));
      found |= packet == wanted;
    }
  }
  return found;
}

__device__ inline void write_singles(const CrossEntropyParams& p, const Row& row, const Group& group,
                                     const Slope& slope, int64 label) {
  const int64 singles = p.cols - row.packet_cols();
#pragma unroll 1
  for (int64 single = group.lane; single < singles; single += group.lanes) {
    const int64 col = row.single_col(single);
    const float gradient = slope.of(to_float(row.logit(p, col)), col);
    row.set_gradient(p, col, col == label ? gradient + slope.at_label : gradient);
  }
}

__device__ inline void clear(const CrossEntropyParams& p, const Row& row, const Group& group) {
  const int64 singles = p.cols - row.packet_cols();
#pragma unroll 1
  for (uint32 packet = group.lane; packet < row.packets; packet += group.lanes) {
    store_packet(row.gradient + row.packet_col(packet), Values{});
  }
#pragma unroll 1
  for (int64 single = group.lane; single < singles; single += group.lanes) {
    row.set_gradient(p, row.single_col(single), 0.0f);
  }
}

struct Smoothing {
  float certainty;
  float share;  // each class's share of the smoothed target

  __device__ explicit Smoothing(const CrossEntropyParams& p)
      : certainty(1.0f - p.smoothing), share(p.smoothing / static_cast<float>(p.cols)) {}
};

// The target distribution of a row, given by its label and the smoothing. A label out of range makes loss and gradient
// NaN. With label smoothing and class weights, each element of the target is multiplied by its class weight.
struct Target {
  int64 label;
  bool valid;
  float picked;     // the label's logit
  float certainty;  // target of the label minus target of any other class
  float share;
  const float* class_weights;

  __device__ Target(const CrossEntropyParams& p, int64 label_, float logit, const Smoothing& smoothing)
      : label(label_),
        valid(label_ >= 0 && label_ < p.cols),
        picked(valid ? logit : CUDART_NAN_F),
        certainty(kSpreads && valid ? smoothing.certainty * p.class_weights[label_] : smoothing.certainty),
        share(smoothing.share),
        class_weights(p.class_weights) {}
  __device__ Target(const CrossEntropyParams& p, const Row& row, int64 label_, const Smoothing& smoothing)
      : Target(p, label_, label_ >= 0 && label_ < p.cols ? to_float(row.logit(p, label_)) : 0.0f, smoothing) {}

  // The sum of the target's elements, which is 1 except with label smoothing and class weights.
  __device__ float sum(const Softmax& softmax) const { return kSpreads ? certainty + share * softmax.mass : 1.0f; }
  __device__ Slope slope(const Softmax& softmax, float scale) const {
    const Exponential exponential(softmax.max);
    const float scaled = kSpreads ? sum(softmax) * scale : scale;
    return {exponential, valid ? scaled / softmax.sum * exponential.correction : CUDART_NAN_F, -share * scale,
            -certainty * scale, class_weights};
  }
  __device__ float gradient(const Slope& slope) const { return slope.of(picked, label) + slope.at_label; }
  __device__ float loss(const Softmax& softmax) const {
    const float log_sum = softmax.max + logf(softmax.sum);
    const float loss = (kSpreads ? sum(softmax) * log_sum : log_sum) - certainty * picked;
    return share > 0.0f ? loss - share * softmax.total : loss;
  }
};

__device__ inline Softmax read_row(const CrossEntropyParams& p, const Row& row, const Group& group, const SharedRing& held,
                                   const Smoothing& smoothing) {
  Softmax softmax = Softmax::of_nothing();
  read_singles(softmax, p, row, group);
  read_packets(softmax, p, row, group, held, smoothing.share > 0.0f);
  return reduce_row(softmax, group);
}

// Writes the gradient of a row whose maximum and sum are known.
__device__ inline void write_row(const CrossEntropyParams& p, const Row& row, int64 label, const Group& group,
                                 const SharedRing& held, const Slope& slope, const Target& target) {
  // If the label's element is in a packet, the thread that has written the packet writes the element again.
  const bool writes_label = write_packets(row, group, held, slope, row.packet_of(label));
  if (writes_label) row.set_gradient(p, label, target.gradient(slope));
  write_singles(p, row, group, slope, label);
}

}  // namespace lt
