// Sums and maxima over a block of kBlock threads, always in the same order.
#pragma once

namespace lt {

constexpr int kBlock = 256;

struct Sum {
  static __device__ float combine(float a, float b) { return a + b; }
};

struct Max {
  // Unlike fmaxf, hands NaN on.
  static __device__ float combine(float a, float b) { return a > b || a != a ? a : b; }
};

// Every thread gets the result. `scratch` has kBlock elements and may be reused afterwards.
template <class Op>
__device__ inline float reduce_block(float value, float* scratch) {
  scratch[threadIdx.x] = value;
  __syncthreads();
  for (int width = kBlock / 2; width > 0; width /= 2) {
    if (static_cast<int>(threadIdx.x) < width) {
      scratch[threadIdx.x] = Op::combine(scratch[threadIdx.x], scratch[threadIdx.x + width]);
    }
    __syncthreads();
  }
  const float result = scratch[0];
  __syncthreads();
  return result;
}

}  // namespace lt
