// Mean squared error with its gradient. Compiled for one SCALAR type.

#include "predecessor.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace lt {

constexpr int kInFlight = 2;  // octets of each operand that a thread waits for at once

struct MseParams {
  Matrix prediction;
  Matrix target;
  Matrix gradient;          // may be `prediction`
  const float* grad_scale;  // on the device; may be absent
  float* partial;           // a sum of each block
  float* loss;
  uint32* ticket;
  int64 rows;  // 1 where all three matrices have no gaps
  int64 cols;
  float gradient_scale;  // 2 / size, times the factor of the gradient
  float size;            // rows · cols
};

// Where the octet `index` of a matrix begins, and how many of its columns exist; none beyond the last octet.
struct OctetPlace {
  int64 row;
  int64 col;
  int count;
};

__device__ inline OctetPlace place_octet(const MseParams& p, int64 index, int64 octets_per_row) {
  const int64 row = p.rows == 1 ? 0 : index / octets_per_row;  // a division of 64 bits is slow
  const int64 col = (index - row * octets_per_row) * kOctet;
  const bool exists = row < p.rows && col < p.cols;
  return {row, col, exists ? octet_count(col, p.cols) : 0};
}

// How octets are moved where not all of them are whole and aligned to 16 bytes: decided for each octet.
struct EachAsItLies {
  using Raw = Octet;
  using Place = OctetPlace;
  static __device__ Place place(const MseParams& p, int64 index, int64 octets_per_row) {
    return place_octet(p, index, octets_per_row);
  }
  static __device__ Raw load(const Matrix& m, const OctetPlace& at) {
    return lt::load<SCALAR>(m, at.row, at.col, at.count);
  }
  static __device__ Octet unpack(const Raw& raw) { return raw; }
  static __device__ void store(const Matrix& m, const OctetPlace& at, const Octet& octet) {
    lt::store<SCALAR>(m, at.row, at.col, at.count, octet);
  }
};

// How they are moved where all are. Nothing is converted before all loads are under way.
struct Whole {
  using Raw = Packed<SCALAR>;
  using Place = int64;  // index of the octet's first element; there is none beyond the last
  static __device__ Place place(const MseParams&, int64 index, int64 octets) {
    return index < octets ? index * kOctet : -1;
  }
  static __device__ Raw load(const Matrix& m, Place at) {
    return at >= 0 ? load_packed(static_cast<const SCALAR*>(m.data) + at) : Raw{};
  }
  static __device__ Octet unpack(const Raw& raw) { return lt::unpack<SCALAR>(raw); }
  static __device__ void store(const Matrix& m, Place at, const Octet& octet) {
    if (at >= 0) store_packed(static_cast<SCALAR*>(m.data) + at, pack<SCALAR>(octet));
  }
};

__device__ inline bool all_whole(const MseParams& p) {
  const uint64 addresses = reinterpret_cast<uint64>(p.prediction.data) | reinterpret_cast<uint64>(p.target.data) |
                           reinterpret_cast<uint64>(p.gradient.data);
  const bool contiguous = p.prediction.col_stride == 1 && p.target.col_stride == 1 && p.gradient.col_stride == 1;
  return p.rows == 1 && p.cols % kOctet == 0 && contiguous && addresses % 16 == 0;
}

// Writes the gradient, and returns the calling thread's share of the sum of squares.
template <class Octets>
__device__ inline float sum_squares(const MseParams& p, float scale) {
  const int64 octets_per_row = (p.cols + kOctet - 1) / kOctet, octets = p.rows * octets_per_row;
  float sum = 0.0f;
  for (int64 first = static_cast<int64>(blockIdx.x) * blockDim.x * kInFlight; first < octets;
       first += static_cast<int64>(gridDim.x) * blockDim.x * kInFlight) {
    typename Octets::Place at[kInFlight];
    typename Octets::Raw prediction[kInFlight], target[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      at[k] = Octets::place(p, first + k * blockDim.x + threadIdx.x, octets_per_row);
      prediction[k] = Octets::load(p.prediction, at[k]);
      target[k] = Octets::load(p.target, at[k]);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const Octet left = Octets::unpack(prediction[k]), right = Octets::unpack(target[k]);
      Octet gradient;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float difference = left.v[i] - right.v[i];
        sum += difference * difference;
        gradient.v[i] = difference * scale;
      }
      Octets::store(p.gradient, at[k], gradient);
    }
  }
  return sum;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) mse_loss(const lt::MseParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const float scale = p.grad_scale ? p.gradient_scale * *p.grad_scale : p.gradient_scale;
  float sum = all_whole(p) ? sum_squares<Whole>(p, scale) : sum_squares<EachAsItLies>(p, scale);
  if (sum_over_grid(sum, p.partial, p.ticket, scratch) && threadIdx.x == 0) *p.loss = sum / p.size;
}
