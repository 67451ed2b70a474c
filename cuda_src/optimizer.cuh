// The arithmetic of an optimizer's update, for eight elements of a thread. lt_runtime/reference/optimizer.py holds the
// same update in NumPy.
//
// Compiled for:
//   RULE        lt::Sgd, lt::Momentum, lt::Lion, lt::AdamW or lt::AmsGrad
//   MOMENT      the type of the moments: float or __nv_bfloat16; float for lt::Sgd, which has none
//   STOCHASTIC  1 if there are BF16 parameters without a master copy, otherwise 0
#pragma once

#include "instructions.cuh"
#include "optimizer_state.cuh"
#include "rounding.cuh"

namespace lt {

// One row of the table of parameters, which the host builds: a chunk of a tensor. Every address points to the chunk's
// first element.
struct alignas(16) OptimizerChunk {
  void* value;  // read and written: FP32, or BF16 if there is no master copy
  void* copy;   // written only: the parameter in lower precision; null if not wanted
  const void* gradient;
  void* m;      // first moment; m, v and v_max are null if the rule does not use them
  void* v;
  void* v_max;  // the largest v so far
  uint64 octet;  // number of the tensor's elements before the chunk, divided by eight
  uint32 tensor;
  uint32 count;
  unsigned char value_type;  // kFloat32, kFloat16 or kBfloat16
  unsigned char copy_type;
  unsigned char gradient_type;
  unsigned char aligned;  // whether every address is a multiple of 16 bytes
  uint32 reserved[3];
};

// Settings that the host may write between two updates, so that a captured graph follows them.
struct alignas(16) OptimizerSettings {
  float lr;
  int decay;  // of the learning rate: 0 constant, 1 linear, 2 cosine
  uint32 warmup_steps;
  uint32 total_steps;  // number of updates after which the factor is constant; the table's length if there is one
  float final_factor;
  uint32 reserved;
  const float* table;  // the factor of each update, in place of a decay; null without a table
};

struct OptimizerParams {
  const OptimizerChunk* chunks;  // null for optimizer_fp8.cu, which has a table of tiles
  OptimizerState* state;
  // kCounters counters of finished blocks, zero between launches. Null if another rule's launch of the same update
  // follows: the last launch alone advances the state, which all launches read.
  uint32* tickets;
  const OptimizerSettings* settings;
  const float* lr_scales;  // factor of the learning rate for each tensor
  const float* weight_decays;
  float* scale;         // the loss scale; null without loss scaling
  int* growth_tracker;  // number of updates since the scale changed
  uint64 seed;
  float log_beta1;  // log β rather than β, so that 1 - βᵗ keeps its precision in FP32
  float log_beta2;
  float beta1;  // the momentum of lt::Momentum
  float beta2;
  float one_minus_beta1;
  float one_minus_beta2;
  float eps;
  float max_norm;      // largest norm; 0 disables clipping
  int skip_nonfinite;  // whether an update with a NaN or infinite gradient is left out
  float growth_factor;
  float backoff_factor;
  int growth_interval;
  int nesterov;  // whether lt::Momentum uses Nesterov's form; other rules do not read it
};

// The values that one thread reads for its block: the first words of OptimizerState, the loss scale, and the tensor's
// settings.
struct Progress {
  uint32 steps;
  uint32 skipped;
  uint32 nonfinite;
  float norm;
  float scale;
  OptimizerSettings settings;
  float lr_scale;
  float weight_decay;
};

// The factors of this update, which one thread of each block computes from the settings.
struct UpdateStep {
  uint32 number;  // number of this update, counted from 1
  bool skipped;
  float kept;             // 1 - lr·λ, the factor of weight decay
  float rate;             // lr; with AdamW and AMSGrad lr / (1 - β₁ᵗ)
  float correction2;      // 1 / √(1 - β₂ᵗ)
  float gradient_factor;  // clipping factor divided by the loss scale
};

// sin(π/2 · x) for x in [0, 1], exactly 0 at 0: the Taylor series. cosf would need a stack for arguments of any size.
__device__ inline float quarter_sine(float x) {
  const float y = 1.57079632679f * x, z = y * y;
  const float series = 1.0f + z * (-1.66666667e-1f + z * (8.33333333e-3f + z * (-1.98412698e-4f +
                       z * (2.75573192e-6f - z * 2.50521084e-8f))));
  return y * series;
}

__device__ inline float schedule_factor(const OptimizerSettings& s, uint32 t) {
  if (s.table) return s.table[(t < s.total_steps ? t : s.total_steps) - 1];
  if (t <= s.warmup_steps) return __fdividef(static_cast<float>(t), static_cast<float>(s.warmup_steps));
  if (s.decay == 0) return 1.0f;
  const float span = static_cast<float>(s.total_steps - s.warmup_steps);
  const float left = t < s.total_steps ? __fdividef(static_cast<float>(s.total_steps - t), span) : 0.0f;
  const float sine = quarter_sine(left);
  // (1 + cos(π·(1 - left))) / 2, the cosine schedule, equals sin²(π/2 · left)
  return s.final_factor + (1.0f - s.final_factor) * (s.decay == 1 ? left : sine * sine);
}

// The clipping factor, as in torch.nn.utils.clip_grad_norm_; NaN if the norm is NaN.
__device__ inline float clip_factor(const OptimizerParams& p, float norm) {
  if (p.max_norm == 0.0f) return 1.0f;
  const float factor = p.max_norm / (norm + 1e-6f);
  return factor > 1.0f ? 1.0f : factor;
}

__device__ inline Progress read_progress(const OptimizerParams& p, uint32 tensor) {
  const OptimizerState& state = *p.state;
  return Progress{state.steps, state.skipped,       state.nonfinite,        state.norm, p.scale ? *p.scale : 1.0f,
                  *p.settings, p.lr_scales[tensor], p.weight_decays[tensor]};
}

// √x by the special function unit, which only has an instruction for 1/√x. It is right for 0 and infinity too.
__device__ inline float fast_sqrt(float x) { return __fdividef(1.0f, rsqrtf(x)); }

// An element of a parameter and its moments. A rule uses only as many moments as it has.
struct Element {
  float value, m, v, v_max;
};

// The update rules. Each has its number of moments, and a function that updates an element by its gradient g, which is
// already unscaled and clipped. All rules decay weights as AdamW does: they multiply the value by 1 - lr·λ, and do not
// add λ·value to the gradient.
struct Sgd {
  static constexpr int kMoments = 0;
  __device__ static void update(const OptimizerParams&, const UpdateStep& s, float g, Element& x) {
    x.value = x.value * s.kept - s.rate * g;
  }
};

struct Momentum {
  static constexpr int kMoments = 1;
  __device__ static void update(const OptimizerParams& p, const UpdateStep& s, float g, Element& x) {
    x.m = p.beta1 * x.m + g;
    x.value = x.value * s.kept - s.rate * (p.nesterov ? p.beta1 * x.m + g : x.m);
  }
};

struct Lion {
  static constexpr int kMoments = 1;
  __device__ static void update(const OptimizerParams& p, const UpdateStep& s, float g, Element& x) {
    const float mixed = p.beta1 * x.m + p.one_minus_beta1 * g;
    const float sign = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;  // 0 and NaN stay as they are
    x.value = x.value * s.kept - s.rate * sign;
    x.m = p.beta2 * x.m + p.one_minus_beta2 * g;
  }
};

struct AdamW {
  static constexpr int kMoments = 2;
  __device__ static void update(const OptimizerParams& p, const UpdateStep& s, float g, Element& x) {
    average(p, g, x);
    move(p, s, x.v, x);
  }
  __device__ static void average(const OptimizerParams& p, float g, Element& x) {
    x.m = p.beta1 * x.m + p.one_minus_beta1 * g;
    x.v = p.beta2 * x.v + p.one_minus_beta2 * g * g;
  }
  __device__ static void move(const OptimizerParams& p, const UpdateStep& s, float second, Element& x) {
    const float denominator = fast_sqrt(second) * s.correction2 + p.eps;
    x.value = x.value * s.kept - __fdividef(s.rate * x.m, denominator);
  }
};

struct AmsGrad {
  static constexpr int kMoments = 3;
  __device__ static void update(const OptimizerParams& p, const UpdateStep& s, float g, Element& x) {
    AdamW::average(p, g, x);
    if (!(x.v_max > x.v)) x.v_max = x.v;  // a comparison keeps NaN, which fmaxf would drop
    AdamW::move(p, s, x.v_max, x);
  }
};

constexpr int kMoments = RULE::kMoments;

__device__ inline UpdateStep make_step(const OptimizerParams& p, const Progress& now) {
  const uint32 t = now.steps + 1;
  const float time = static_cast<float>(t);
  const float lr = now.settings.lr * schedule_factor(now.settings, t) * now.lr_scale;
  const bool corrects = kMoments >= 2;  // AdamW and AMSGrad divide averages that began at 0 by their weights' sum
  return UpdateStep{t,
                   p.skip_nonfinite && now.nonfinite != 0,
                   1.0f - lr * now.weight_decay,
                   corrects ? lr * __fdividef(1.0f, -expm1f(time * p.log_beta1)) : lr,
                   corrects ? rsqrtf(-expm1f(time * p.log_beta2)) : 1.0f,
                   clip_factor(p, now.norm) / now.scale};
}

constexpr int kMoment = kTypeOf<MOMENT>;

struct Tensors {
  Bits value, m, v, v_max, gradient;
};

__device__ inline int value_type(const OptimizerChunk& chunk) { return STOCHASTIC ? chunk.value_type : kFloat32; }

// The gradient is loaded last: its type is read from the table at run time, and no other load must wait for that.
__device__ inline Tensors load_tensors(const OptimizerChunk& chunk, const Quads& at) {
  Tensors out;
  out.value = load_bits(chunk.value, value_type(chunk), at);
  if (kMoments > 0) out.m = load_bits(chunk.m, kMoment, at);
  if (kMoments > 1) out.v = load_bits(chunk.v, kMoment, at);
  if (kMoments > 2) out.v_max = load_bits(chunk.v_max, kMoment, at);
  out.gradient = load_bits(chunk.gradient, chunk.gradient_type, at);
  return out;
}

struct Octets {
  Octet value, m, v, v_max;
};

__device__ inline Octets update(const OptimizerParams& p, const OptimizerChunk& chunk, const UpdateStep& s, const Tensors& old) {
  Octets out{unpack(old.value, value_type(chunk)), {}, {}, {}};
  if (kMoments > 0) out.m = unpack(old.m, kMoment);
  if (kMoments > 1) out.v = unpack(old.v, kMoment);
  if (kMoments > 2) out.v_max = unpack(old.v_max, kMoment);
  const Octet gradient = unpack(old.gradient, chunk.gradient_type);
#pragma unroll
  for (int k = 0; k < kOctet; ++k) {
    Element element{out.value.v[k], out.m.v[k], out.v.v[k], out.v_max.v[k]};
    RULE::update(p, s, gradient.v[k] * s.gradient_factor, element);
    out.value.v[k] = element.value;
    out.m.v[k] = element.m;
    out.v.v[k] = element.v;
    out.v_max.v[k] = element.v_max;
  }
  return out;
}

// BF16 moments are rounded stochastically: rounded to nearest, v would never move with β₂ = 0.999.
__device__ inline void store_moments(const OptimizerChunk& chunk, const Quads& at, const Words& random,
                                     const Octets& result) {
  if (kMoment == kFloat32) {
    if (kMoments > 0) store_bits(chunk.m, kMoment, at, pack(result.m, kMoment));
    if (kMoments > 1) store_bits(chunk.v, kMoment, at, pack(result.v, kMoment));
    if (kMoments > 2) store_bits(chunk.v_max, kMoment, at, pack(result.v_max, kMoment));
  } else {
    const Words words = lanes_for(Rounded::kSecondMoment, random);
    store_bits(chunk.m, kMoment, at, pack_randomly(result.m, lanes_for(Rounded::kFirstMoment, random)));
    if (kMoments > 1) store_bits(chunk.v, kMoment, at, pack_randomly(result.v, words));
    if (kMoments > 2) store_bits(chunk.v_max, kMoment, at, pack_randomly(result.v_max, words));
  }
}

// The parameter's values: the rounding of its master copy, or the values themselves if it has none.
__device__ inline Octet of_parameter(const OptimizerChunk& chunk, const Octet& value) {
  return chunk.copy ? unpack(pack(value, chunk.copy_type), chunk.copy_type) : value;
}

// Returns the parameter's new values as they are stored.
__device__ inline Octet store_value(const OptimizerChunk& chunk, const Quads& at, const Words& random, const Octet& value) {
  if (value_type(chunk) == kFloat32) {
    store_bits(chunk.value, kFloat32, at, pack(value, kFloat32));
    if (chunk.copy) store_bits(chunk.copy, chunk.copy_type, at, pack(value, chunk.copy_type));
    return of_parameter(chunk, value);
  }
  const Bits bits = pack_randomly(value, lanes_for(Rounded::kParameter, random));
  store_bits(chunk.value, kBfloat16, at, bits);
  return unpack(bits, kBfloat16);
}

}  // namespace lt
