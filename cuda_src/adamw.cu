// AdamW over every parameter of a model in one launch. A block handles one chunk of one tensor, found in a table on
// the device; the last block to finish advances the step. lt_runtime/reference/adamw.py holds the same update.

#include "predecessor.cuh"
#include "vector.cuh"

namespace lt {

// One tensor. `parameter` is in lower precision where `master` is present, and is then only written.
struct AdamWTensor {
  void* parameter;
  float* master;
  const void* gradient;
  float* m;
  float* v;
  int64 size;
  int parameter_type;  // 0 FP32, 1 FP16, 2 BF16
  int gradient_type;
};

struct AdamWChunk {
  int64 start;  // first element
  int tensor;
  int reserved;
};

struct AdamWParams {
  const AdamWTensor* tensors;
  const AdamWChunk* chunks;
  uint32* step;    // updates done so far
  uint32* ticket;  // blocks finished in this launch; zero between launches
  int64 chunk_size;
  float lr;
  float log_beta1;  // logarithms, so that 1 - βᵗ keeps its precision in FP32
  float log_beta2;
  float beta1;
  float beta2;
  float one_minus_beta1;
  float one_minus_beta2;
  float eps;
  float weight_decay;
  int decay;  // 0 constant, 1 linear, 2 cosine
  uint32 warmup_steps;
  uint32 total_steps;
  float final_factor;
};

struct AdamWStep {
  float lr;
  float correction1;  // 1 / (1 - β₁ᵗ)
  float correction2;  // 1 / √(1 - β₂ᵗ)
};

__device__ inline float schedule_factor(const AdamWParams& p, uint32 t) {
  if (t <= p.warmup_steps) return static_cast<float>(t) / static_cast<float>(p.warmup_steps);
  if (p.decay == 0) return 1.0f;
  const float done = static_cast<float>(t - p.warmup_steps) / static_cast<float>(p.total_steps - p.warmup_steps);
  const float progress = fminf(done, 1.0f);
  const float remaining = p.decay == 1 ? 1.0f - progress : 0.5f * (1.0f + cosf(3.14159265358979f * progress));
  return p.final_factor + (1.0f - p.final_factor) * remaining;
}

__device__ inline AdamWStep make_step(const AdamWParams& p, uint32 t) {
  const float time = static_cast<float>(t);
  return AdamWStep{p.lr * schedule_factor(p, t), 1.0f / -expm1f(time * p.log_beta1),
                   rsqrtf(-expm1f(time * p.log_beta2))};
}

__device__ inline float load_as_float(const void* data, int type, int64 i) {
  if (type == 1) return to_float(static_cast<const __half*>(data)[i]);
  if (type == 2) return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

__device__ inline void store_as_type(void* data, int type, int64 i, float value) {
  if (type == 1) {
    static_cast<__half*>(data)[i] = from_float<__half>(value);
  } else if (type == 2) {
    static_cast<__nv_bfloat16*>(data)[i] = from_float<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

__device__ inline void update(const AdamWParams& p, const AdamWTensor& t, const AdamWStep& s, int64 i) {
  const float g = load_as_float(t.gradient, t.gradient_type, i);
  float* value = t.master ? t.master + i : static_cast<float*>(t.parameter) + i;
  const float m = p.beta1 * t.m[i] + p.one_minus_beta1 * g;
  const float v = p.beta2 * t.v[i] + p.one_minus_beta2 * g * g;
  const float denominator = sqrtf(v) * s.correction2 + p.eps;
  const float next = *value * (1.0f - s.lr * p.weight_decay) - s.lr * (m * s.correction1) / denominator;
  t.m[i] = m;
  t.v[i] = v;
  *value = next;
  if (t.master) store_as_type(t.parameter, t.parameter_type, i, next);
}

// The block that finishes last advances the step: every other has read it by then.
__device__ inline void finish(const AdamWParams& p, uint32 t) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(p.ticket, 1u) + 1 == gridDim.x) {
    *p.ticket = 0;
    *p.step = t;
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) adamw(const lt::AdamWParams p) {
  using namespace lt;
  wait_for_predecessor();
  __shared__ AdamWStep shared_step;
  const uint32 t = *p.step + 1;
  if (threadIdx.x == 0) shared_step = make_step(p, t);
  __syncthreads();
  const AdamWStep step = shared_step;
  const AdamWChunk chunk = p.chunks[blockIdx.x];
  const AdamWTensor tensor = p.tensors[chunk.tensor];
  const int64 end = chunk.start + p.chunk_size < tensor.size ? chunk.start + p.chunk_size : tensor.size;
  for (int64 i = chunk.start + threadIdx.x; i < end; i += blockDim.x) update(p, tensor, step, i);
  finish(p, t);
}
