// The mean of a loss over all elements, with its gradient. Compiled for one SCALAR type, a LOSS of losses.cuh, and WEIGHTED
// 1 where rows or columns may have weights.

#include "losses.cuh"
#include "predecessor.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace lt {

constexpr int kInFlight = 2;  // octets of each operand that a thread waits for at once

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
  static __device__ int64 index(const ElementwiseLossParams& p, const OctetPlace& at) { return at.row * p.cols + at.col; }
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
  static __device__ int64 index(const ElementwiseLossParams&, Place at) { return at; }
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
  __device__ Position(int64 index, int64 width) {
    const bool is_short = static_cast<uint64>(index | width) >> 32 == 0;  // a division of 32 bits is much faster
    row = is_short ? static_cast<uint32>(index) / static_cast<uint32>(width) : index / width;
    col = index - row * width;
  }
  __device__ void advance(int64 width) {
    if (++col < width) return;
    col = 0;
    ++row;
  }
};

// The losses of an octet's elements, of which the first `count` exist, with their weights; `at` is the first one's place.
__device__ inline void weighted_terms(const ElementwiseLossParams& p, const Octet& prediction, const Octet& target,
                                      Position at, int count, LossTerm (&terms)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const bool exists = i < count;
    const float weight = !exists ? 0.0f : p.row_weights ? p.row_weights[at.row] : 1.0f;
    const LossOptions options{p.delta, exists && p.pos_weight ? p.pos_weight[at.col] : 1.0f};
    const LossTerm term = LOSS::of(prediction.v[i], target.v[i], options);
    terms[i] = {weight * term.value, weight * term.slope};
    at.advance(p.width);
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
      position[k] = Position(Octets::count(at[k]) ? Octets::index(p, at[k]) : 0, p.width);
#endif
      prediction[k] = Octets::load(p.prediction, at[k]);
      target[k] = Octets::load(p.target, at[k]);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const Octet left = Octets::unpack(prediction[k]), right = Octets::unpack(target[k]);
      LossTerm terms[kOctet];
#if WEIGHTED
      weighted_terms(p, left, right, position[k], Octets::count(at[k]), terms);
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

extern "C" __global__ void __launch_bounds__(256) elementwise_loss(const lt::ElementwiseLossParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const float factor = LOSS::kFactor * p.gradient_scale;
  const float scale = p.grad_scale ? factor * *p.grad_scale : factor;
  float sum = all_whole(p) ? sum_losses<Whole>(p, scale) : sum_losses<EachAsItLies>(p, scale);
  if (sum_over_grid(sum, p.partial, p.ticket, scratch) && threadIdx.x == 0) *p.loss = sum / p.size;
}
