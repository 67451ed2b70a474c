// Computes the norm of all gradients of a model, and finds out whether any is NaN or infinite, in one read of them. A
// block adds up the squares of one chunk; the last block to finish adds up the blocks' sums, always in the same order.

#include "instructions.cuh"
#include "optimizer_state.cuh"
#include "quads.cuh"
#include "reduce.cuh"

namespace lt {

// A part of one gradient, which one block reads.
struct GradientChunk {
  const void* data;
  uint32 count;
  unsigned char type;     // kFloat32, kFloat16 or kBfloat16
  unsigned char aligned;  // whether the gradient's address allows 16-byte loads
  unsigned char reserved[2];
};

struct GradientNormParams {
  const GradientChunk* chunks;
  float* partial;  // one sum of squares for each block
  OptimizerState* state;
  const float* scale;  // the loss scale, which the gradients are multiplied by; may be absent
};

constexpr uint32 kThreads = 256;
constexpr float kLargest = 3.4028234663852886e38f;

// Compensated summation: keeps the part that rounding has cut off (Knuth's TwoSum), since a thread may add up thousands
// of terms. Infinity and NaN give the same result as in a plain sum.
struct CompensatedSum {
  float sum = 0.0f;
  float error = 0.0f;

  __device__ void add(float x) {
    const float next = sum + x, added = next - sum;
    error += (sum - (next - added)) + (x - added);
    sum = next;
  }
  __device__ float value() const { return fabsf(sum) <= kLargest ? sum + error : sum; }
};

struct Squares {
  float factor;  // multiplies every gradient: 1 / loss scale
  CompensatedSum sum;
  bool finite = true;

  template <class T, int kCount>
  __device__ void add(const T (&values)[kCount]) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = to_float(values[i]);
      finite = finite && fabsf(x) <= kLargest;
      squares += (x * factor) * (x * factor);
    }
    sum.add(squares);
  }
};

template <class T>
__device__ inline void add_packets(Squares& squares, const T* data, uint32 packets) {
  constexpr int kInFlight = 4;
  for (uint32 first = threadIdx.x; first < packets; first += kInFlight * kThreads) {
    uint4 words[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const uint32 i = first + u * kThreads;
      words[u] = i < packets ? load_word<uint4>(data, i) : uint4{};
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) squares.add(bit_cast<Packet<T>>(words[u]).v);
  }
}

template <class T>
__device__ inline void add_chunk(Squares& squares, const GradientChunk& chunk) {
  const T* data = static_cast<const T*>(chunk.data);
  const uint32 packets = chunk.aligned ? chunk.count / Packet<T>::kCount : 0;
  add_packets(squares, data, packets);
  for (uint32 i = packets * Packet<T>::kCount + threadIdx.x; i < chunk.count; i += kThreads) {
    const T value[] = {data[i]};
    squares.add(value);
  }
}

constexpr uint32 kGroups = 16;

// Adds kCount terms as two halves, recursively (pairwise summation), so that a large term costs the others little
// precision.
template <uint32 kCount>
__device__ inline float sum_in_pairs(const float* terms, uint32 stride) {
  if constexpr (kCount == 1) {
    return *terms;
  } else {
    constexpr uint32 kHalf = kCount / 2;
    return sum_in_pairs<kHalf>(terms, stride) + sum_in_pairs<kHalf>(terms + kHalf * stride, stride);
  }
}

// The sum over a block; every thread gets it.
__device__ inline float sum_over_block(float value) {
  __shared__ float terms[kGroups * kGroups], groups[kGroups];
  terms[threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.x < kGroups) groups[threadIdx.x] = sum_in_pairs<kGroups>(terms + threadIdx.x, kGroups);
  __syncthreads();
  return sum_in_pairs<kGroups>(groups, 1);
}

// Adds up the calling thread's share of the blocks' sums of squares.
__device__ inline float sum_of_partials(const float* partial) {
  constexpr int kInFlight = 8;
  CompensatedSum sum;
  for (uint32 first = threadIdx.x; first < gridDim.x; first += kInFlight * kThreads) {
    float terms[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const uint32 i = first + u * kThreads;
      terms[u] = i < gridDim.x ? __ldcg(partial + i) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) sum.add(terms[u]);
  }
  return sum.value();
}

}  // namespace lt

// Launch bounds of six blocks: with eight, the compiler keeps only two of a thread's loads in flight instead of four.
extern "C" __global__ void __launch_bounds__(256, 6) gradient_norm(const lt::GradientNormParams p) {
  using namespace lt;
  // The table is constant, so it may be read before the previous kernel has ended.
  const GradientChunk chunk = p.chunks[blockIdx.x];
  wait_for_predecessor();
  Squares squares{p.scale ? 1.0f / *p.scale : 1.0f, {}};
  if (chunk.type == kFloat32) {
    add_chunk<float>(squares, chunk);
  } else if (chunk.type == kFloat16) {
    add_chunk<__half>(squares, chunk);
  } else {
    add_chunk<__nv_bfloat16>(squares, chunk);
  }
  if (!squares.finite) atomicAdd(&p.state->nonfinite, 1u);
  const float sum = sum_over_block(squares.sum.value());
  if (threadIdx.x == 0) p.partial[blockIdx.x] = sum;
  if (!is_last_block(&p.state->norm_ticket, gridDim.x)) return;
  const float norm = sqrtf(sum_over_block(sum_of_partials(p.partial)));
  if (threadIdx.x == 0) p.state->norm = norm;
}
