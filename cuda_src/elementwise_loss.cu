// The mean of a loss over all elements, with its gradient. Compiled for one SCALAR type, a LOSS of losses.cuh, and WEIGHTED
// 1 where rows or columns may have weights.

#include "losses.cuh"
#include "predecessor.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace lt {

constexpr int kInFlight = WEIGHTED ? 1 : 2;  // octets of each operand that a thread waits for at once
// Blocks that a multiprocessor shall hold, which bounds a thread's registers: as many as let it keep all in them. From
// Blackwell on the compiler takes more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kFewBlocks = 2;
#else
constexpr int kFewBlocks = 3;
#endif
constexpr int kBlocks = LOSS::kIsShort && !WEIGHTED ? 4 : kFewBlocks;

struct ElementwiseLossParams {
  Matrix prediction;
  Matrix target;
  Matrix gradient;          // may be `prediction`
  const float* grad_scale;  // on the device; may be absent
  float* partial;           // a sum of each block
  float* loss;
  uint32* ticket;
  const float* row_weights;  // one a row, multiplies its losses; may be absent
  const float* pos_weight;   // one a column, see LossOptions; may be absent
  int64 rows;                // 1 where all three matrices have no gaps
  int64 cols;
  int64 width;           // columns that an element's row and column are counted by, also where `rows` is 1
  float gradient_scale;  // 1 / size, times the factor of the gradient
  float size;            // rows · cols
  float delta;
};

// Where the octet `index` of a matrix begins, and how many of its columns exist; none beyond the last octet.
struct OctetPlace {
  int64 row;
  int64 col;
  int count;
};

__device__ inline OctetPlace place_octet(const ElementwiseLossParams& p, int64 index, int64 octets_per_row) {
  const int64 row = p.rows == 1 ? 0 : index / octets_per_row;  // a division of 64 bits is slow
  const int64 col = (index - row * octets_per_row) * kOctet;
  const bool exists = row < p.rows && col < p.cols;
  return {row, col, exists ? octet_count(col, p.cols) : 0};
}

// How octets are moved where not all of them are whole and aligned to 16 bytes: decided for each octet.
struct EachAsItLies {
  using Raw = Octet;
  using Place = OctetPlace;
  static __device__ Place place(const ElementwiseLossParams& p, int64 index, int64 octets_per_row) {
    return place_octet(p, index, octets_per_row);
  }
  static __device__ Raw load(const Matrix& m, const OctetPlace& at) {
    return lt::load<SCALAR>(m, at.row, at.col, at.count);
  }
  static __device__ Octet unpack(const Raw& raw) { return raw; }
  static __device__ int count(const OctetPlace& at) { return at.count; }
  static __device__ OctetPlace octet(const OctetPlace& at) { return at; }
  static __device__ void store(const Matrix& m, const OctetPlace& at, const Octet& octet) {
    lt::store<SCALAR>(m, at.row, at.col, at.count, octet);
  }
};

// How they are moved where all are. Nothing is converted before all loads are under way.
struct Whole {
  using Raw = Packed<SCALAR>;
  using Place = int64;  // index of the octet's first element; there is none beyond the last
  static __device__ Place place(const ElementwiseLossParams&, int64 index, int64 octets) {
    return index < octets ? index * kOctet : -1;
  }
  static __device__ Raw load(const Matrix& m, Place at) {
    return at >= 0 ? load_packed(static_cast<const SCALAR*>(m.data) + at) : Raw{};
  }
  static __device__ Octet unpack(const Raw& raw) { return lt::unpack<SCALAR>(raw); }
  static __device__ int count(Place at) { return at >= 0 ? kOctet : 0; }
  static __device__ OctetPlace octet(Place at) { return {0, at, count(at)}; }
  static __device__ void store(const Matrix& m, Place at, const Octet& octet) {
    if (at >= 0) store_packed(static_cast<SCALAR*>(m.data) + at, pack<SCALAR>(octet));
  }
};

__device__ inline bool all_whole(const ElementwiseLossParams& p) {
  const uint64 addresses = reinterpret_cast<uint64>(p.prediction.data) | reinterpret_cast<uint64>(p.target.data) |
                           reinterpret_cast<uint64>(p.gradient.data);
  const bool contiguous = p.prediction.col_stride == 1 && p.target.col_stride == 1 && p.gradient.col_stride == 1;
  return p.rows == 1 && p.cols % kOctet == 0 && contiguous && addresses % 16 == 0;
}

// Row and column of an element, and then of the elements after it.
struct Position {
  int64 row;
  int64 col;

  Position() = default;
  // Rows that were joined have fewer elements than 32 bits count: a division of 64 bits takes registers that loads need.
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

// The weights of an octet's elements: 0 for those that do not exist.
struct Weights {
  Octet of_rows;
  Octet of_columns;

  // Of the first `count` elements from `at` on.
  __device__ Weights(const ElementwiseLossParams& p, Position at, int count) {
    if (count == kOctet && at.col + kOctet <= p.width) {  // in one row
      const float weight = p.row_weights ? p.row_weights[at.row] : 1.0f;
      if (p.pos_weight) of_columns = load<float>(Matrix{const_cast<float*>(p.pos_weight), 0, 1}, 0, at.col, kOctet);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        of_rows.v[i] = weight;
        if (!p.pos_weight) of_columns.v[i] = 1.0f;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const bool exists = i < count;
      of_rows.v[i] = !exists ? 0.0f : p.row_weights ? p.row_weights[at.row] : 1.0f;
      of_columns.v[i] = exists && p.pos_weight ? p.pos_weight[at.col] : 1.0f;
      at.advance(p.width);
    }
  }
};

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

// Writes the gradient, and returns the calling thread's share of the sum of losses.
template <class Octets>
__device__ inline float sum_losses(const ElementwiseLossParams& p, float scale) {
  const int64 octets_per_row = (p.cols + kOctet - 1) / kOctet, octets = p.rows * octets_per_row;
  float sum = 0.0f;
  for (int64 first = static_cast<int64>(blockIdx.x) * blockDim.x * kInFlight; first < octets;
       first += static_cast<int64>(gridDim.x) * blockDim.x * kInFlight) {
    typename Octets::Place at[kInFlight];
    typename Octets::Raw prediction[kInFlight], target[kInFlight];
#if WEIGHTED
    Position position[kInFlight];
#endif
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      at[k] = Octets::place(p, first + k * blockDim.x + threadIdx.x, octets_per_row);
#if WEIGHTED
      position[k] = Position(p, Octets::octet(at[k]));
#endif
      prediction[k] = Octets::load(p.prediction, at[k]);
      target[k] = Octets::load(p.target, at[k]);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const Octet left = Octets::unpack(prediction[k]), right = Octets::unpack(target[k]);
      LossTerm terms[kOctet];
#if WEIGHTED
      weighted_terms(p, left, right, Weights(p, position[k], Octets::count(at[k])), terms);
#else
      plain_terms(p, left, right, Octets::count(at[k]), terms);
#endif
      Octet gradient;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        sum += terms[i].value;
        gradient.v[i] = terms[i].slope * scale;
      }
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
  if (sum_over_grid(sum, p.partial, p.ticket, scratch) && threadIdx.x == 0) *p.loss = sum / p.size;
}
