// Activation functions and their derivatives. Where the output determines the derivative, there is a function that
// computes it from the output. lt_runtime/reference/activations.py holds the same functions in float64.
#pragma once

#include "instructions.cuh"

namespace lt {

__device__ inline float sigmoid(float z) { return reciprocal_approx(1.0f + exp2_approx(-kLog2E * z)); }

struct None {
  static __device__ float forward(float z, float) { return z; }
  static __device__ float derivative(float, float) { return 1.0f; }
};

struct Relu {
  // NaN stays NaN, forward and backward, as in PyTorch: `NaN <= 0` is false.
  static __device__ float forward(float z, float) { return z <= 0.0f ? 0.0f : z; }
  static __device__ float derivative(float z, float) { return z <= 0.0f ? 0.0f : 1.0f; }
  static __device__ float derivative_from_output(float y) { return y <= 0.0f ? 0.0f : 1.0f; }
};

struct LeakyRelu {
  static __device__ float forward(float z, float slope) { return z > 0.0f ? z : slope * z; }
  static __device__ float derivative(float z, float slope) { return z > 0.0f ? 1.0f : slope; }
};

struct Sigmoid {
  static __device__ float forward(float z, float) { return sigmoid(z); }
  static __device__ float derivative(float z, float) { return derivative_from_output(sigmoid(z)); }
  static __device__ float derivative_from_output(float y) { return y * (1.0f - y); }
};

struct Tanh {
  static __device__ float forward(float z, float) { return tanhf(z); }
  static __device__ float derivative(float z, float) { return derivative_from_output(tanhf(z)); }
  static __device__ float derivative_from_output(float y) { return 1.0f - y * y; }
};

// The tanh form, 0.5 z (1 + tanh(u)) with u = √(2/π) (z + 0.044715 z³), is computed as z σ(2u): tanhf takes some thirty
// instructions, σ takes four.
struct Gelu {
  static constexpr float kLinear = 1.5957691216057308f;  // 2√(2/π), the coefficient of z in 2u
  static constexpr float kCubic = kLinear * 0.044715f;
  static __device__ float gate(float z, float square) {
    return reciprocal_approx(1.0f + exp2_approx(z * (-kLog2E * kLinear - kLog2E * kCubic * square)));
  }
  static __device__ float forward(float z, float) { return z * gate(z, z * z); }
  static __device__ float derivative(float z, float) {
    const float square = fminf(z * z, 256.0f);  // beyond |z| = 16 σ is 0 or 1, and infinity · 0 would be NaN
    const float s = gate(z, square);
    return s + z * (s - s * s) * (kLinear + 3.0f * kCubic * square);
  }
};

// The exact form of GELU: z Φ(z), where Φ is the distribution function of the standard normal distribution.
struct GeluErf {
  static constexpr float kInvSqrt2 = 0.7071067811865476f;
  static constexpr float kInvSqrt2Pi = 0.3989422804014327f;
  static __device__ float cdf(float z) { return 0.5f * (1.0f + erff(z * kInvSqrt2)); }
  static __device__ float forward(float z, float) { return z * cdf(z); }
  static __device__ float derivative(float z, float) { return cdf(z) + z * kInvSqrt2Pi * expf(-0.5f * z * z); }
};

struct Silu {
  static __device__ float forward(float z, float) { return z * sigmoid(z); }
  static __device__ float derivative(float z, float) {
    const float s = sigmoid(z);
    return s * (1.0f + z * (1.0f - s));
  }
};

}  // namespace lt
