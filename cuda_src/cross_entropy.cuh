// How threads share a row of logits, and where they hold it.
//
// Compiled for:
//   SCALAR       the type of logits and gradient
//   ROW_THREADS  number of a block's threads
//   GRADIENT     1 if the gradient is wanted, otherwise 0
//   WEIGHTS      0 without weights; 1 with weights of rows or of classes, by which a row's loss is multiplied; 2 with
//                class weights and label smoothing
#pragma once

#include <math_constants.h>

#include "instructions.cuh"
#include "reduce.cuh"
#include "tally.cuh"

namespace lt {

struct CrossEntropyParams {
  Matrix logits;
  Matrix gradient;  // gradient of the logits, which may overwrite them; equal to `logits` if GRADIENT is 0
  const void* labels;
  const float* counted;     // divisor of the mean, from count_labels; null if each block counts the labels itself
  const float* grad_scale;  // factor of the gradient, in device memory; null means 1
  const float* row_weights;    // one weight for each row; may be null
  const float* class_weights;  // one weight for each class; may be null unless WEIGHTS is 2
  float* partial;           // the loss of each block, or of each row if blocks stream rows
  float* loss;
  uint32* ticket;
  uint32* claimed;  // number of rows that blocks have claimed, besides the first two of each block; zero between launches
  int64 rows;
  int64 cols;
  int64 ignore_index;
  float gradient_scale;  // constant factor of the gradient
  float smoothing;
  int wide_labels;  // whether labels are int64 rather than int32
  int ignores;      // whether rows labelled ignore_index are left out
  uint32 lanes;     // threads that share a row: a power of two up to a warp, or the block
  uint32 held;      // number of packets for which each thread has shared memory
  int streams;      // whether rows are streamed (see stream_rows.cuh): they are whole packets, aligned to 16 bytes
  Tally tally;      // read by cross_entropy_few only
};

constexpr uint32 kRowThreads = ROW_THREADS;
constexpr bool kWeighted = WEIGHTS != 0;
constexpr bool kSpreads = WEIGHTS == 2;
constexpr bool kWrites = GRADIENT;  // whether the kernel writes the gradient

__device__ inline int64 label_at(const CrossEntropyParams& p, int64 row) {
  return label_at(p.labels, p.wide_labels, row);
}

// A label's contribution to the divisor of the mean: 1, or the weight of its class; 0 if the label is out of range.
struct LabelCount {
  const void* labels;
  int wide;
  int ignores;
  int64 ignored;
  int64 rows;
  int64 cols;
  const float* class_weights;

  __device__ float of(int64 label) const {
    if (ignores && label == ignored) return 0.0f;
    if (!kWeighted || !class_weights) return 1.0f;
    return label >= 0 && label < cols ? class_weights[label] : 0.0f;
  }

  // Sums the labels' contributions to the divisor over every `step`-th row from `first` on.
  __device__ float sum(int64 first, int64 step) const {
    constexpr int kInFlight = 4;
    float count = 0.0f;
#pragma unroll 1
    for (; first < rows; first += kInFlight * step) {
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64 row = first + k * step;
        if (row < rows) count += of(label_at(labels, wide, row));
      }
    }
    return count;
  }
};

template <class Params>
__device__ inline LabelCount label_count(const Params& p) {
  return {p.labels, p.wide_labels, p.ignores, p.ignore_index, p.rows, p.cols, p.class_weights};
}

// The weight of a row's loss: the row's weight times the weight of its label's class. With label smoothing, class
// weights are not part of it but of the row's target distribution.
__device__ inline float weight_of(const CrossEntropyParams& p, int64 row, int64 label) {
  float weight = 1.0f;
  if (kWeighted && p.row_weights) weight = p.row_weights[row];
  if (kWeighted && !kSpreads && p.class_weights && label >= 0 && label < p.cols) weight *= p.class_weights[label];
  return weight;
}

// Divisor of the mean loss, and the factor by which it scales gradients. All threads of a block must construct it
// together, because counting the labels has a barrier.
struct Mean {
  float rows;   // divisor of the mean: the number of rows that are not ignored, or the sum of their labels' class weights
  float scale;  // factor of every row's gradient

  Mean() = default;
  __device__ Mean(const CrossEntropyParams& p, float* scratch) {
    const float factor = p.grad_scale ? *p.grad_scale : 1.0f;
    rows = count(p, scratch);
    scale = p.gradient_scale * factor / rows;
  }

 private:
  static __device__ float count(const CrossEntropyParams& p, float* scratch) {
    if (!p.ignores && !(kWeighted && p.class_weights)) return static_cast<float>(p.rows);
    if (p.counted) return *p.counted;
    return sum_over_block(label_count(p).sum(threadIdx.x, blockDim.x), scratch);
  }
};

// The i-th 16-bit or FP32 number in a 32-bit word.
template <class T>
__device__ inline float number_of(uint32 word, int i);
template <>
__device__ inline float number_of<float>(uint32 word, int) {
  return __uint_as_float(word);
}
template <>
__device__ inline float number_of<__nv_bfloat16>(uint32 word, int i) {
  return __uint_as_float(i == 0 ? word << 16 : word & 0xFFFF0000);
}
template <>
__device__ inline float number_of<__half>(uint32 word, int i) {
  return __half2float(reinterpret_cast<const __half*>(&word)[i]);
}

// The elementwise maximum of the numbers in two words. Of NaN and a number it returns the number, as fmaxf does.
template <class T>
__device__ inline uint32 max_of_words(uint32 a, uint32 b) {
  typename Pair<T>::Type pairs[2];
  memcpy(static_cast<void*>(&pairs[0]), &a, sizeof(a));
  memcpy(static_cast<void*>(&pairs[1]), &b, sizeof(b));
  pairs[0] = __hmax2(pairs[0], pairs[1]);
  memcpy(&a, &pairs[0], sizeof(a));
  return a;
}
template <>
__device__ inline uint32 max_of_words<float>(uint32 a, uint32 b) {
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}

// A packet is 16 bytes of consecutive logits, which a thread moves by one instruction, so that the accesses of
// neighbouring threads are coalesced. It is kept in registers as 32-bit words: as an array of 16-bit logits, the
// compiler would give each logit a register of its own.
constexpr int kPacket = Packet<SCALAR>::kCount;

struct Raw {
  static constexpr int kPerWord = sizeof(uint32) / sizeof(SCALAR);

  uint4 words;

  __device__ float operator[](int i) const {
    const int word = i / kPerWord;
    return number_of<SCALAR>(word == 0 ? words.x : word == 1 ? words.y : word == 2 ? words.z : words.w, i % kPerWord);
  }

  // The elementwise maximum of two packets; of NaN and a number, the number.
  __device__ Raw max(const Raw& other) const {
    return {{max_of_words<SCALAR>(words.x, other.words.x), max_of_words<SCALAR>(words.y, other.words.y),
             max_of_words<SCALAR>(words.z, other.words.z), max_of_words<SCALAR>(words.w, other.words.w)}};
  }
  __device__ float max() const {
    const uint32 word = max_of_words<SCALAR>(max_of_words<SCALAR>(words.x, words.y),
                                             max_of_words<SCALAR>(words.z, words.w));
    return fmaxf(number_of<SCALAR>(word, 0), number_of<SCALAR>(word, kPerWord - 1));
  }
};

__device__ inline Raw load_packet(const SCALAR* p) { return {*reinterpret_cast<const uint4*>(p)}; }

// A packet of -infinity: logits that add nothing to the sum of exponentials.
__device__ inline Raw nothing() {
  Packet<SCALAR> packet;
#pragma unroll
  for (int i = 0; i < kPacket; ++i) packet.v[i] = from_float<SCALAR>(-CUDART_INF_F);
  Raw raw;
  memcpy(&raw.words, &packet, sizeof(packet));
  return raw;
}

// The gradient of a packet.
struct Values {
  float v[kPacket];

  __device__ uint4 rounded() const {
    typename Pair<SCALAR>::Type pairs[kPacket / 2];
#pragma unroll
    for (int i = 0; i < kPacket / 2; ++i) pairs[i] = Pair<SCALAR>::pack(float2{v[2 * i], v[2 * i + 1]});
    uint4 words;
    memcpy(&words, pairs, sizeof(words));
    return words;
  }
};

// Stores a packet by one instruction. The compiler may split an assignment into stores of single words, each of which
// writes only a part of a 32-byte sector.
__device__ inline void store_packet(SCALAR* p, const Values& values) {
  const uint4 words = values.rounded();
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
#else
  *reinterpret_cast<uint4*>(p) = words;
#endif
}

// Stores a packet of the gradient with the hint evict-first (st.cs), so that it does not displace logits from L2 that
// will be read again. If shared memory holds a whole row, storing without the hint is faster.
__device__ inline void store_past(SCALAR* p, const Values& values) {
  __stcs(reinterpret_cast<uint4*>(p), values.rounded());
}

// Prefetches a packet into L2.
__device__ inline void prefetch_packet(const SCALAR* p) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
  static_cast<void>(p);
#endif
}

// Waits until at most the last `left` groups of asynchronous copies are in flight. If `left` exceeds kMostBehind, it
// waits for more groups than necessary.
constexpr int kMostBehind = 6;
template <int kLeft = kMostBehind>
__device__ inline void wait_for_batches(uint32 left) {
  if constexpr (kLeft == 0) {
    wait_for_copies<0>();
  } else if (left == kLeft || (kLeft == kMostBehind && left > kLeft)) {
    wait_for_copies<kLeft>();
  } else {
    wait_for_batches<kLeft - 1>(left);
  }
}

// The calling thread's slots for packets in shared memory. They are kRowThreads packets apart, so that the threads of a
// warp access consecutive packets, without bank conflicts.
struct SharedRing {
  uint4* own;
  uint32 slots;  // packets

  __device__ uint4* packet(uint32 slot) const { return own + slot * kRowThreads; }
  __device__ void put(uint32 slot, const Raw& raw) const { *packet(slot) = raw.words; }
  __device__ void fetch(uint32 slot, const SCALAR* from) const {
    copy_async(packet(slot), from);
  }
  __device__ Raw get(uint32 slot) const { return {*packet(slot)}; }
};

// The threads that share a row.
struct Group {
  uint32 lanes;
  uint32 lane;   // the calling thread's number in its group
  uint32 peers;  // mask of the lanes of the warp that belong to the group

  __device__ explicit Group(uint32 lanes_) : lanes(lanes_), lane(threadIdx.x % lanes_), peers(0xFFFFFFFF) {
    if (lanes < kWarp) peers = ((1u << lanes) - 1) << (threadIdx.x % kWarp - lane);
  }
};

// A row of logits and its gradient, divided into packets, which are aligned in both, and single elements before and
// after them. If logits and gradient are aligned differently, or their columns are not contiguous, all elements are
// single.
struct Row {
  const SCALAR* logits;
  SCALAR* gradient;
  uint32 packets;  // 32 bits suffice: memory holds fewer packets
  uint32 head;    // single elements before the first packet

  __device__ Row(const CrossEntropyParams& p, int64 row)
      : logits(element<const SCALAR>(p.logits, row, 0)),
        gradient(element<SCALAR>(p.gradient, row, 0)),
        packets(0),
        head(0) {
    const uint32 offset = reinterpret_cast<uint64>(logits) & 15;
    const bool alike = offset == (reinterpret_cast<uint64>(gradient) & 15);
    if (!alike || p.logits.col_stride != 1 || p.gradient.col_stride != 1) return;
    head = ((16 - offset) & 15) / static_cast<uint32>(sizeof(SCALAR));
    if (p.cols >= head) packets = static_cast<uint32>((p.cols - head) / kPacket);
  }

  // The number of the packet that holds a column; the number of packets if the column is one of the single elements.
  __device__ uint32 packet_of(int64 col) const {
    return col >= head && col < head + packet_cols() ? static_cast<uint32>((col - head) / kPacket) : packets;
  }
  __device__ int64 packet_col(uint32 packet) const { return head + static_cast<int64>(packet) * kPacket; }
  __device__ int64 packet_cols() const { return static_cast<int64>(packets) * kPacket; }
  __device__ int64 single_col(int64 single) const { return single < head ? single : single + packet_cols(); }
  __device__ SCALAR logit(const CrossEntropyParams& p, int64 col) const { return logits[col * p.logits.col_stride]; }
  __device__ void set_gradient(const CrossEntropyParams& p, int64 col, float value) const {
    gradient[col * p.gradient.col_stride] = from_float<SCALAR>(value);
  }
};

}  // namespace lt
