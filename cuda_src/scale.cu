// Multiplies FP32 numbers by a factor and rounds them to another type: converts a loss's gradient for the layers below.

#include "instructions.cuh"

namespace lt {

struct ScaleParams {
  const float* source;
  void* target;
  const float* scale;  // factor in device memory, multiplied by `share`; null: the factor is `share` alone
  int64 size;
  float share;
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) scale(const lt::ScaleParams p) {
  using namespace lt;
  wait_for_predecessor();
  const float factor = p.scale != nullptr ? *p.scale * p.share : p.share;
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (int64 at = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; at < p.size; at += step) {
    static_cast<SCALAR*>(p.target)[at] = from_float<SCALAR>(p.source[at] * factor);
  }
}
