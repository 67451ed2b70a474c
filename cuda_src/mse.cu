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
  float* partial;           // one a block
  float* loss;
  uint32* ticket;
  int64 rows;  // 1 where all three lie without gaps
  int64 cols;
  float gradient_scale;  // 2 / size, times what scales the gradient
  float size;            // rows · cols
};

// Where the octet `index` of a matrix begins, and how many of its columns exist; none beyond the matrix.
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

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) mse_loss(const lt::MseParams p) {
  using namespace lt;
  __shared__ float scratch[kMaxWarps];
  wait_for_predecessor();
  const float scale = p.grad_scale ? p.gradient_scale * *p.grad_scale : p.gradient_scale;
  const int64 octets_per_row = (p.cols + kOctet - 1) / kOctet, octets = p.rows * octets_per_row;
  float sum = 0.0f;
  for (int64 first = static_cast<int64>(blockIdx.x) * blockDim.x * kInFlight; first < octets;
       first += static_cast<int64>(gridDim.x) * blockDim.x * kInFlight) {
    OctetPlace at[kInFlight];
    Octet prediction[kInFlight], target[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      at[k] = place_octet(p, first + k * blockDim.x + threadIdx.x, octets_per_row);
      prediction[k] = load<SCALAR>(p.prediction, at[k].row, at[k].col, at[k].count);
      target[k] = load<SCALAR>(p.target, at[k].row, at[k].col, at[k].count);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      Octet gradient;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float difference = prediction[k].v[i] - target[k].v[i];
        sum += difference * difference;
        gradient.v[i] = difference * scale;
      }
      store<SCALAR>(p.gradient, at[k].row, at[k].col, at[k].count, gradient);
    }
  }
  if (sum_over_grid(sum, p.partial, p.ticket, scratch) && threadIdx.x == 0) *p.loss = sum / p.size;
}
