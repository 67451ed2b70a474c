// Computes the mean of a loss over all elements, and its gradient. Compiled for one SCALAR type, a LOSS of losses.cuh,
// and WEIGHTED: 1 if rows or columns may have weights, otherwise 0.

#include "losses.cuh"
#include "reduce.cuh"
#include "tally.cuh"

namespace lt {

// Number of octets of each operand whose loads a thread has in flight, if all octets are whole. A loss that takes many
// instructions hides latency by more warps instead, and so loads one octet with fewer registers.
constexpr int kInFlight = LOSS::kIsShort && !WEIGHTED ? 2 : 1;
// Launch bounds: blocks that a multiprocessor must hold, as many as possible without spilling registers. For Blackwell
// and later GPUs the compiler needs more registers with weights.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kWeightedBlocks = LOSS::kIsShort ? 4 : 2;
#else
constexpr int kWeightedBlocks = LOSS::kIsShort ? 5 : 4;
#endif
constexpr int kBlocks = WEIGHTED ? kWeightedBlocks : LOSS::kIsShort ? 4 : 6;

struct ElementwiseLossParams {
  Matrix prediction;
  Matrix target;
  Matrix gradient;          // gradient of the prediction; may be the same memory as `prediction`
  const float* grad_scale;  // factor in device memory; may be null
  float* partial;           // one sum for each block
  float* loss;
  uint32* ticket;
  const float* row_weights;  // one weight for each row, which multiplies the row's losses; may be null
  const float* pos_weight;   // one weight for each column, see LossOptions; may be null
  int64 rows;                // 1 if all three matrices are contiguous: they are then read as one row
  int64 cols;
  int64 width;           // columns of the matrices as passed, even if `rows` is 1: splits an element's index into row and column
  float gradient_scale;  // 1 / size, times the caller's gradient factor
  float size;            // rows · cols
  float delta;
  Tally tally;
};

// Position of octet number `index` in a matrix: its first element, and how many of its columns exist (0 beyond the last
// octet).
struct OctetPlace {
  int64 row;
  int64 col;
  int count;
};

__device__ inline OctetPlace place_octet(const ElementwiseLossParams& p, int64 index, int64 octets_per_row) {
  const int64 row = p.rows == 1 ? 0 : index / octets_per_row;  // one row needs no division, which is slow in 64 bits
  const int64 col = (index - row * octets_per_row) * kOctet;
  const bool exists = row < p.rows && col < p.cols;
  return {row, col, exists ? octet_count(col, p.cols) : 0};
}

// Row and column of an element; steps through the elements after it.
struct Position {
  int64 row;
  int64 col;

  // With weights, contiguous matrices are read as one row only if they have fewer than 2^32 elements. So this division
  // has 32 bits; one of 64 bits would take registers that the loads need.
  __device__ Position(const ElementwiseLossParams& p, const OctetPlace& at) : row(at.row), col(at.col) {
    if (p.width == p.cols) return;
    const uint32 index = static_cast<uint32>(at.col), width = static_cast<uint32>(p.width);
    row = index / width;
    col = index % width;
  }
  __device__ void advance(int64 width) {
    if (++col < width) return;
    col = 0;
    ++row;
  }
};

// The weights of an octet's elements.
struct Weights {
  float of_all;
  Octet of_rows;  // factor of each element's loss and gradient; 0 for elements that do not exist
  Octet of_columns;
};

// Access for any layout: each octet is loaded and stored by vector instructions if it is whole and aligned, else
// element by element.
struct EachAsItLies {
  static constexpr int kInFlight = 1;
  using Raw = Octet;
  using Place = OctetPlace;
  struct RawWeights {};
  static __device__ Place place(const ElementwiseLossParams& p, int64 index, int64 octets_per_row, bool) {
    return place_octet(p, index, octets_per_row);
  }
  static __device__ Raw load(const Matrix& m, const Place& at) { return lt::load<SCALAR>(m, at.row, at.col, at.count); }
  static __device__ RawWeights load_weights(const ElementwiseLossParams&, const Place&) { return {}; }
  static __device__ Weights weights(const ElementwiseLossParams& p, const Place& at, const RawWeights&) {
    Position position(p, at);
    Weights out;
    out.of_all = 1.0f;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const bool exists = i < at.count;
      out.of_rows.v[i] = !exists ? 0.0f : p.row_weights ? p.row_weights[position.row] : 1.0f;
      out.of_columns.v[i] = exists && p.pos_weight ? p.pos_weight[position.col] : 1.0f;
      position.advance(p.width);
    }
    return out;
  }
  static __device__ int count(const Place& at) { return at.count; }
  static __device__ void store(const Matrix& m, const Place& at, const Octet& octet) {
    lt::store<SCALAR>(m, at.row, at.col, at.count, octet);
  }
};

// Access for contiguous operands, all of whose octets are whole and aligned to 16 bytes. Octets are converted to FP32
// only after all loads were issued.
struct Whole {
  static constexpr int kInFlight = lt::kInFlight;
  using Raw = Packed<SCALAR>;
  struct Place {
    int64 octet;
    bool exists;
  };
  struct RawWeights {
    float of_row;
    Packed<float> of_columns;
  };
  static __device__ Place place(const ElementwiseLossParams&, int64 index, int64, bool exists) { return {index, exists}; }
  static __device__ Raw load(const Matrix& m, const Place& at) {
    return at.exists ? load_packed(static_cast<const SCALAR*>(m.data) + at.octet * kOctet) : Raw{};
  }
  static __device__ RawWeights load_weights(const ElementwiseLossParams& p, const Place& at) {
    const uint32 octets = static_cast<uint32>(p.width / kOctet), index = at.exists ? static_cast<uint32>(at.octet) : 0;
    const uint32 row = index / octets;
    RawWeights raw;
    raw.of_row = p.row_weights ? p.row_weights[row] : 1.0f;
    if (p.pos_weight) raw.of_columns = load_packed(p.pos_weight + (index - row * octets) * kOctet);
    return raw;
  }
  static __device__ Weights weights(const ElementwiseLossParams& p, const Place&, const RawWeights& raw) {
    Weights out;
    out.of_all = raw.of_row;
    out.of_columns = unpack(raw.of_columns);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      out.of_rows.v[i] = 1.0f;
      if (!p.pos_weight) out.of_columns.v[i] = 1.0f;
    }
    return out;
  }
  static __device__ int count(const Place& at) { return at.exists ? kOctet : 0; }
  static __device__ void store(const Matrix& m, const Place& at, const Octet& octet) {
    if (at.exists) store_packed(static_cast<SCALAR*>(m.data) + at.octet * kOctet, pack<SCALAR>(octet));
  }
};

__device__ inline bool all_whole(const ElementwiseLossParams& p) {
  const uint64 addresses = reinterpret_cast<uint64>(p.prediction.data) | reinterpret_cast<uint64>(p.target.data) |
                           reinterpret_cast<uint64>(p.gradient.data) | reinterpret_cast<uint64>(p.pos_weight);
  const bool contiguous = p.prediction.col_stride == 1 && p.target.col_stride == 1 && p.gradient.col_stride == 1;
  const int64 in_one_row = WEIGHTED ? p.width : p.cols;
  return p.rows == 1 && in_one_row % kOctet == 0 && contiguous && addresses % 16 == 0;
}

__device__ inline void weighted_terms(const ElementwiseLossParams& p, const Octet& prediction, const Octet& target,
                                      const Weights& weights, LossTerm (&terms)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const LossTerm term = LOSS::of(prediction.v[i], target.v[i], LossOptions{p.delta, weights.of_columns.v[i]});
    terms[i] = {weights.of_rows.v[i] * term.value, weights.of_rows.v[i] * term.slope};
  }
}

__device__ inline void plain_terms(const ElementwiseLossParams& p, const Octet& prediction, const Octet& target, int count,
                                   LossTerm (&terms)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    terms[i] = LOSS::of(prediction.v[i], target.v[i], LossOptions{p.delta, 1.0f});
    if (!LOSS::kZeroAtZero && i >= count) terms[i].value = 0.0f;
  }
}

// Writes the gradient of the calling thread's elements, and returns the sum of their losses.
template <class Octets>
__device__ inline float sum_losses(const ElementwiseLossParams& p, float scale) {
  constexpr int kCount = Octets::kInFlight;
  const int64 octets_per_row = (p.cols + kOctet - 1) / kOctet, octets = p.rows * octets_per_row;
  float sum = 0.0f;
#pragma unroll 1
  for (int64 first = static_cast<int64>(blockIdx.x) * blockDim.x * kCount + threadIdx.x; first < octets;
       first += static_cast<int64>(gridDim.x) * blockDim.x * kCount) {
    typename Octets::Place at[kCount];
    typename Octets::Raw prediction[kCount], target[kCount];
    [[maybe_unused]] typename Octets::RawWeights weights[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int64 index = first + k * blockDim.x;
      at[k] = Octets::place(p, index, octets_per_row, k == 0 || index < octets);
      prediction[k] = Octets::load(p.prediction, at[k]);
      target[k] = Octets::load(p.target, at[k]);
#if WEIGHTED
      weights[k] = Octets::load_weights(p, at[k]);
#endif
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const Octet left = unpack(prediction[k]), right = unpack(target[k]);
      LossTerm terms[kOctet];
#if WEIGHTED
      const Weights octet = Octets::weights(p, at[k], weights[k]);
      weighted_terms(p, left, right, octet, terms);
      const float of_octet = octet.of_all * scale;
      float value = 0.0f;
#else
      plain_terms(p, left, right, Octets::count(at[k]), terms);
      const float of_octet = scale;
      float& value = sum;
#endif
      Octet gradient;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        value += terms[i].value;
        gradient.v[i] = terms[i].slope * of_octet;
      }
#if WEIGHTED
      sum += octet.of_all * value;
#endif
      Octets::store(p.gradient, at[k], gradient);
    }
  }
  return sum;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, lt::kBlocks) elementwise_loss(const lt::ElementwiseLossParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const float factor = LOSS::kFactor * p.gradient_scale;
  const float scale = p.grad_scale ? factor * *p.grad_scale : factor;
  float sum = all_whole(p) ? sum_losses<Whole>(p, scale) : sum_losses<EachAsItLies>(p, scale);
  if (sum_over_grid(sum, p.partial, p.ticket, scratch) && threadIdx.x == 0) store_loss(p.loss, sum / p.size, p.tally);
}
