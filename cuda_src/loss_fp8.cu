// Computes the mean of a loss over all elements, its gradient cast to FP8, row-major and transposed, and the sums of
// the gradient over its rows, which are the bias gradient of the layer that made the prediction. In steps before the
// scale of the cast is known, the kernel writes the gradient in SCALAR instead; loss and sums have the same bits in
// both cases.
//
// Compiled for a SCALAR type, a LOSS of losses.cuh, and E5M2, see fp8.cuh.

#define ALIGNED 1
#define WEIGHTED 0

#include "fp8.cuh"
#include "loss_mean.cuh"
#include "losses.cuh"

namespace lt {

constexpr int kInFlight = 2;  // rows of both operands whose loads a thread has in flight
constexpr int kBlocks = 3;    // blocks that a multiprocessor must hold, which limits a thread's registers

struct LossFp8Params {
  Matrix prediction;
  Matrix target;
  Matrix gradient;  // the gradient in 16 bits or FP32; null if the gradient is cast to FP8
  Fp8Output fp8;    // results of the cast to FP8; its addresses are 0 if the gradient is not cast
  ColumnSum<SCALAR> db;
  LossMean mean;
  const float* grad_scale;  // factor in device memory; may be null
  float gradient_scale;     // 1 / size, times the caller's factor of the gradient
  float delta;
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, lt::kBlocks) loss_fp8(const lt::LossFp8Params p) {
  using namespace lt;
  wait_for_predecessor();
  Fp8Writer<> writer(p.fp8);
  const float factor = LOSS::kFactor * p.gradient_scale;
  const float scale = p.grad_scale ? factor * *p.grad_scale : factor;
  int64 col = static_cast<int64>(blockIdx.x) * kTile + threadIdx.x * kOctet;
  // Threads beyond the last row or column repeat the computation of existing elements, so that all loads are in flight
  // together. Only existing elements are stored and added up.
  const uint32 rows = p.fp8.rows, own_rows = col < p.fp8.cols ? rows : 0;
  if (!own_rows) col = 0;
  float loss = 0.0f;
  Octet sums{};
  for (uint32 block_row = blockIdx.y * kTile; block_row < rows; block_row += gridDim.y * kTile) {
    const uint32 row = block_row + threadIdx.y * kOctet;
#pragma unroll 1
    for (int first = 0; first < kOctet; first += kInFlight) {
      Packed<SCALAR> prediction[kInFlight], target[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const uint32 at = row + first + i < rows ? row + first + i : rows - 1;
        prediction[i] = load_packed(element<SCALAR>(p.prediction, at, col));
        target[i] = load_packed(element<SCALAR>(p.target, at, col));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const bool exists = row + first + i < own_rows;
        const Octet left = unpack(prediction[i]), right = unpack(target[i]);
        Octet gradient;
#pragma unroll
        for (int j = 0; j < kOctet; ++j) {
          const LossTerm term = LOSS::of(left.v[j], right.v[j], LossOptions{p.delta, 1.0f});
          if (exists) loss += term.value;
          gradient.v[j] = term.slope * scale;
        }
        const Packed<SCALAR> rounded = pack<SCALAR>(gradient);
        gradient = unpack(rounded);  // rounded to SCALAR, as if a layer had read the stored gradient and cast it itself
        writer.take(block_row, first + i, gradient);
        if (!exists) continue;
        sums += gradient;
        if (p.gradient.data) store_packed(element<SCALAR>(p.gradient, row + first + i, col), rounded);
      }
    }
    writer.store(block_row);
  }
  writer.store_amax();
  if (p.db.sum) sum_over_grid(p.db, sums, p.fp8.cols);
  store_mean(p.mean, p.db.tickets, loss);
}
