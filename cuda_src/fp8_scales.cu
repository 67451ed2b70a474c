// Computes the scales of FP8 tensors for the next step from the largest absolute values of the last steps (delayed
// scaling): a block for each layer, a thread for each of its tensors. lt_runtime/reference/fp8.py computes the same bits.

#include "instructions.cuh"

namespace lt {

// A tensor's scale and maximum. A product takes the address of `inverse`, which some versions of cuBLASLt want aligned
// to 16.
struct alignas(16) Fp8Slot {
  float inverse;    // 1 / scale
  float scale;      // a power of two, which the tensor is multiplied by before it is cast; 0 before it is found
  float amax;       // the largest absolute value since the last update
  float largest;    // the largest number of the tensor's FP8 type
  float overflows;  // number of updates that found amax · scale above `largest`, or infinite, or NaN
  float reserved[3];
};

// The state of a layer's tensors.
struct Fp8Layer {
  Fp8Slot* slots;
  float* history;  // (tensors, length) largest absolute values of the last steps, the latest first
};

constexpr int kMostLayers = 32;

struct Fp8ScalesParams {
  Fp8Layer layers[kMostLayers];
  const uint32* skipped;  // if this is not zero, scales and history stay as they are; may be null
  uint32 tensors;
  uint32 length;
  float headroom;  // factor by which later absolute values may exceed those of the history without an overflow
};

constexpr int kMantissaBits = 23;
constexpr int kExponentBias = 127;
constexpr int kMaxExponent = 126;

// The largest power of two s with reached · s <= largest, for positive arguments; its exponent is clamped to
// ±kMaxExponent.
__device__ inline float largest_scale(float largest, float reached) {
  constexpr uint32 kMantissa = (1u << kMantissaBits) - 1;
  const uint32 high = __float_as_uint(largest), low = __float_as_uint(reached);
  int exponent = static_cast<int>(high >> kMantissaBits) - static_cast<int>(low >> kMantissaBits);
  exponent -= (low & kMantissa) > (high & kMantissa);
  exponent = exponent > kMaxExponent ? kMaxExponent : exponent < -kMaxExponent ? -kMaxExponent : exponent;
  return __uint_as_float(static_cast<uint32>(exponent + kExponentBias) << kMantissaBits);
}

__device__ inline bool is_finite(float x) { return fabsf(x) <= 3.4028234663852886e38f; }

// Shifts `value` into the front of a history of `length` values, and returns the largest value in it.
__device__ inline float push(float* history, uint32 length, float value) {
  float peak = 0.0f;
  for (uint32 i = 0; i < length; ++i) {
    const float older = history[i];
    history[i] = value;
    peak = fmaxf(peak, value);
    value = older;
  }
  return peak;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(32) fp8_scales(const lt::Fp8ScalesParams p) {
  using namespace lt;
  wait_for_predecessor();
  const uint32 tensor = threadIdx.x;
  if (tensor >= p.tensors) return;
  const Fp8Layer layer = p.layers[blockIdx.x];
  Fp8Slot slot = layer.slots[tensor];
  const float amax = slot.amax;
  slot.amax = 0.0f;
  if (!(amax * slot.scale <= slot.largest)) slot.overflows += 1.0f;
  if (is_finite(amax) && !(p.skipped && *p.skipped)) {
    const float peak = push(layer.history + static_cast<int64>(tensor) * p.length, p.length, amax);
    if (peak > 0.0f) slot.scale = largest_scale(slot.largest, peak * p.headroom);
  }
  if (slot.scale == 0.0f) slot.scale = 1.0f;  // the tensor has no finite element but 0
  slot.inverse = 1.0f / slot.scale;
  layer.slots[tensor] = slot;
}
