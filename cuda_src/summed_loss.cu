// Computes the mean of a loss over all elements, its gradient, and the sums of the gradient over its rows. These sums
// are the bias gradient of the layer that made the prediction, which would otherwise read the gradient once more.
//
// Compiled for a SCALAR type, a LOSS of losses.cuh, ALIGNED 0 or 1 (see sweep.cuh), and BLOCKS, the number of blocks
// that a multiprocessor must hold, which limits a thread's registers.

#define WEIGHTED 0

#include "loss_mean.cuh"
#include "losses.cuh"
#include "sweep.cuh"

namespace lt {

struct SummedLossParams {
  Matrix prediction;
  Matrix target;
  Matrix gradient;  // gradient of the prediction; may be the same memory as `prediction`
  ColumnSum<SCALAR> db;
  LossMean mean;
  const float* grad_scale;  // factor in device memory; may be null
  uint32 rows;
  int64 cols;
  float gradient_scale;  // 1 / size, times the caller's factor of the gradient
  float delta;
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, BLOCKS) summed_loss(const lt::SummedLossParams p) {
  using namespace lt;
  const Sweep sweep(p.cols);
  Reader<SCALAR> prediction_at(p.prediction, sweep), target_at(p.target, sweep);
  Cursor<SCALAR> gradient_at(p.gradient, sweep);
  wait_for_predecessor();
  const float factor = LOSS::kFactor * p.gradient_scale;
  const float scale = p.grad_scale ? factor * *p.grad_scale : factor;
  float loss = 0.0f;
  Octet sums{};
  // Threads beyond the last column or row must not return early: the sums have barriers.
  const uint32 rows = sweep.count ? p.rows : 0;
  prediction_at.start(sweep, rows);
  target_at.start(sweep, rows);
#pragma unroll 1
  for (uint32 row = sweep.row; row < rows; row += sweep.step) {
    const Octet prediction = unpack(prediction_at.take(row, rows)), target = unpack(target_at.take(row, rows));
    Octet gradient;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const LossTerm term = LOSS::of(prediction.v[i], target.v[i], LossOptions{p.delta, 1.0f});
      if (ALIGNED || i < sweep.count) loss += term.value;
      gradient.v[i] = term.slope * scale;
    }
    gradient_at.store(gradient, false);
    sums += unpack(pack<SCALAR>(gradient));  // rounded to SCALAR, as if the layer below had read the stored gradient
  }
  sum_over_grid(p.db, sums, p.cols);
  store_mean(p.mean, p.db.tickets, loss);
}
