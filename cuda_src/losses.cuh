// Elementwise losses. Each computes its value for one element, and its derivative with respect to the prediction,
// divided by kFactor. lt_runtime/reference/loss.py holds the same functions in float64. Compiled for WEIGHTED 0 or 1.
#pragma once

#include "instructions.cuh"

namespace lt {

struct LossTerm {
  float value;
  float slope;
};

// Parameters of a loss, set by the caller.
struct LossOptions {
  float delta;       // absolute error beyond which the Huber loss is linear
  float pos_weight;  // weight of a positive target, relative to a negative one; 1 unless WEIGHTED
};

// kZeroAtZero: the loss of prediction 0 and target 0 is 0, so that absent elements may be summed as zeros. kIsShort:
// the loss needs few registers.

struct SquaredError {
  static constexpr float kFactor = 2.0f;
  static constexpr bool kZeroAtZero = true;
  static constexpr bool kIsShort = true;
  static __device__ LossTerm of(float prediction, float target, const LossOptions&) {
    const float difference = prediction - target;
    return {difference * difference, difference};
  }
};

struct Huber {
  static constexpr float kFactor = 1.0f;
  static constexpr bool kZeroAtZero = true;
  static constexpr bool kIsShort = true;
  static __device__ LossTerm of(float prediction, float target, const LossOptions& options) {
    const float difference = prediction - target, distance = fabsf(difference), delta = options.delta;
    if (distance <= delta) return {0.5f * difference * difference, difference};
    // NaN reaches this branch and stays NaN.
    const float slope = difference > delta ? delta : difference < -delta ? -delta : difference;
    return {delta * (distance - 0.5f * delta), slope};
  }
};

// log(1 + x) for x from 0 to 1, off by at most 3 units in the last place: x times a polynomial that approximates
// log(1 + x) / x with the least relative error. log1pf takes three times as many instructions.
__device__ inline float log_of_one_and(float x) {
  float sum = 0.005232668947428465f;
  sum = fmaf(sum, x, -0.029505137354135513f);
  sum = fmaf(sum, x, 0.07822578400373459f);
  sum = fmaf(sum, x, -0.13663232326507568f);
  sum = fmaf(sum, x, 0.19106000661849976f);
  sum = fmaf(sum, x, -0.2484298050403595f);
  sum = fmaf(sum, x, 0.3331909775733948f);
  sum = fmaf(sum, x, -0.4999949336051941f);
  return fmaf(sum, x, 0.9999999403953552f) * x;
}

// Binary cross-entropy of sigmoid(z): softplus(z) for target 0, softplus(-z) for target 1, and their weighted mean for
// a target between. With e = exp(-|z|), which cannot overflow, softplus(z) is log(1 + e) + max(z, 0), and sigmoid(z) is
// 1 / (1 + e) or e / (1 + e). Neither subtracts numbers that are nearly equal, as sigmoid(z) - target does.
struct BinaryCrossEntropy {
  static constexpr float kFactor = 1.0f;
  static constexpr bool kZeroAtZero = false;
  static constexpr bool kIsShort = false;
  static __device__ LossTerm of(float z, float target, const LossOptions& options) {
    const float e = exp2_approx(-kLog2E * fabsf(z)), large = reciprocal_approx(1.0f + e);
    const float negative = 1.0f - target, positive = options.pos_weight * target;
    // target weights of the class that the logit's sign does not predict, and of the class that it predicts
    const float wrong = z >= 0.0f ? negative : positive, right = z >= 0.0f ? positive : negative;
    const float slope = large * fmaf(-right, e, wrong), both = WEIGHTED ? wrong + right : 1.0f;
    return {both * log_of_one_and(e) + wrong * fabsf(z), z >= 0.0f ? slope : -slope};
  }
};

}  // namespace lt
