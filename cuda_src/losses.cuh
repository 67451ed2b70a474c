// Losses of one element: each has its value, and its derivative with respect to the prediction, divided by kFactor.
// lt_runtime/reference/loss.py holds the same functions in float64.
#pragma once

#include "approx.cuh"

namespace lt {

struct LossTerm {
  float value;
  float slope;
};

// What a loss may depend on besides prediction and target.
struct LossOptions {
  float delta;       // where Huber's loss becomes linear
  float pos_weight;  // what a positive target counts, against 1 for a negative one
};

// kZeroAtZero: prediction and target 0 have no loss, so that places without an element may be added up as zeros.

struct SquaredError {
  static constexpr float kFactor = 2.0f;
  static constexpr bool kZeroAtZero = true;
  static __device__ LossTerm of(float prediction, float target, const LossOptions&) {
    const float difference = prediction - target;
    return {difference * difference, difference};
  }
};

struct Huber {
  static constexpr float kFactor = 1.0f;
  static constexpr bool kZeroAtZero = true;
  static __device__ LossTerm of(float prediction, float target, const LossOptions& options) {
    const float difference = prediction - target, distance = fabsf(difference), delta = options.delta;
    if (distance <= delta) return {0.5f * difference * difference, difference};
    // NaN comes here, and stays NaN.
    const float slope = difference > delta ? delta : difference < -delta ? -delta : difference;
    return {delta * (distance - 0.5f * delta), slope};
  }
};

// Binary cross-entropy of sigmoid(z): softplus(z) for a negative target and softplus(-z) for a positive one, mixed for one
// between. With e = exp(-|z|), which cannot overflow, softplus(z) is log(1 + e) + max(z, 0), and sigmoid(z) is 1 / (1 + e)
// or e / (1 + e). Neither subtracts numbers that are nearly equal, as sigmoid(z) - target does.
struct BinaryCrossEntropy {
  static constexpr float kFactor = 1.0f;
  static constexpr bool kZeroAtZero = false;
  static __device__ LossTerm of(float z, float target, const LossOptions& options) {
    const float e = exp2_approx(-kLog2E * fabsf(z)), large = reciprocal_approx(1.0f + e), small = e * large;
    const float negative = 1.0f - target, positive = options.pos_weight * target;
    const float sigmoid = z >= 0.0f ? large : small, complement = z >= 0.0f ? small : large;
    const float rest = log1pf(e);
    return {negative * (rest + fmaxf(z, 0.0f)) + positive * (rest + fmaxf(-z, 0.0f)),
            negative * sigmoid - positive * complement};
  }
};

}  // namespace lt
