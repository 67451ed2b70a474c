// Functions that are single instructions of the special function unit.
#pragma once

namespace lt {

// Each function is one instruction and treats subnormal numbers as zero; the functions of <math.h> and the intrinsics
// handle subnormal numbers and take four instructions. Results are off by at most 2 units in the last place.
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

constexpr float kLog2E = 1.4426950408889634f;  // log₂ e: eˣ is 2 to the power of x · log₂ e

}  // namespace lt
