// Single instructions of the special function unit.
#pragma once

namespace lt {

// One instruction of the special function unit each, subnormals taken as zero; <math.h>'s and the intrinsics with their
// ranges take four. Results are good to 2 units in the last place.
__device__ inline float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

__device__ inline float reciprocal_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

constexpr float kLog2E = 1.4426950408889634f;  // makes eˣ of 2ˣ

}  // namespace lt
