// One row of logits after the other, by a group of threads: its maximum and sum of exponentials, then its gradient.
// Compiled for one SCALAR type, ROW_THREADS, the threads of a block, and ROW_LANES, the threads of a group unless these are
// fewer than a warp.
#pragma once

#include "cross_entropy.cuh"

namespace lt {

// Number of packets that a thread loads at once. The exponentials of these elements are added up before they join the row's
// sum, which also makes the sum more exact.
constexpr int kPacketsInFlight = 4;
constexpr int kSinglesInFlight = 8;

constexpr uint32 kLanes = ROW_LANES;
constexpr bool kBlockRows = kLanes == kRowThreads;  // whether a group is a block; otherwise it is at most a warp

constexpr uint32 kWarps = kRowThreads / kWarp;
static_assert(!kBlockRows || (kWarps & (kWarps - 1)) == 0, "a warp reduces what the warps of a block have");

__device__ inline float exponential(float logit, float max) { return exp2_approx((logit - max) * kLog2E); }

// exp(logit - max) with one multiply-add, which saves an instruction: 2^(logit · log₂e - max · log₂e), where the second
// product is rounded. The rounding changes all exponentials by the same factor, at most 2^64, which the correction undoes.
// For a larger maximum the products would overflow. Any other logit is then at least 64 below the maximum, so that powers
// of 2 are as negligible as powers of e.
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

// Running maximum and sums of softmax over the logits read so far. Its alignment lets one instruction move it.
struct alignas(16) Softmax {
  float max;
  float sum;    // sum of exp(logit - max)
  float total;  // sum of the logits, each times its class's weight if there are weights; used only if labels are smoothed
  float mass;   // sum of the classes' weights; used only if labels are smoothed and classes have weights

  static __device__ Softmax of_nothing() { return {-CUDART_INF_F, 0.0f, 0.0f, 0.0f}; }

  __device__ void raise_max(float to) {
    if (!(to > max)) return;
    sum *= exponential(max, to);
    max = to;
  }

  // The maximum that is subtracted before exp; 0 as long as all logits are -infinity.
  __device__ float finite_max() const { return max == -CUDART_INF_F ? 0.0f : max; }
};

// The columns of a thread's packets: the first packet's first column, and the distance from packet to packet.
struct Columns {
  int64 first;
  int64 step;
};

// Adds the first `count` packets to a row's maximum and sum. The caller has set the other packets to `nothing()`, which adds 0.
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

// Counts a thread's packets: it takes every `lanes`-th of `packets` packets, from `first` on.
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

// Combines the softmax of `lanes` neighbouring threads of a warp, a power of two; each of them gets the result. The maximum
// is found first, so that each thread computes a single exponential.
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

// Combines the softmax of all lanes of a warp. It passes the full mask as a constant: a mask that the compiler does not know
// takes more instructions than the shuffle.
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

// Combines the softmax of a whole group; every thread gets the result. Afterwards the group has read all of the row, which
// may be overwritten.
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

// gradient = softmax · scale + shift, plus `at_label` at the label. If labels are smoothed and classes have weights, the
// shift of a column is multiplied by its class's weight.
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

// Writes the gradient of the thread's packets; returns whether the packet `wanted` is among them.
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

// A row's target distribution, made from its label. A label out of range makes loss and gradient NaN. If labels
// are smoothed and classes have weights, each element of the target is multiplied by its class's weight.
struct Target {
  int64 label;
  bool valid;
  float picked;     // the label's logit
  float certainty;  // the label's share of the target minus another class's share
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

  // The sum of the target's elements, which is 1 unless labels are smoothed and classes have weights.
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

// Writes the gradient of a row that has been read.
__device__ inline void write_row(const CrossEntropyParams& p, const Row& row, int64 label, const Group& group,
                                 const SharedRing& held, const Slope& slope, const Target& target) {
  // If the label's element is in a packet, the thread that has written the packet writes the element again.
  const bool writes_label = write_packets(row, group, held, slope, row.packet_of(label));
  if (writes_label) row.set_gradient(p, label, target.gradient(slope));
  write_singles(p, row, group, slope, label);
}

}  // namespace lt
