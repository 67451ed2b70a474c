// Stochastic rounding to BF16. lt_runtime/reference/rounding.py draws the same bits and rounds in the same way.
#pragma once

#include "philox.cuh"
#include "quads.cuh"

namespace lt {

// Where the random numbers of an optimizer's update come from. A call of Philox gives eight 16-bit lanes; the call has the
// number `octet`, the thread's eight elements in the order that Quads has them take its lanes.
struct RoundingBits {
  uint64 seed;
  uint64 octet;
  uint32 tensor;
  uint32 step;
};

constexpr uint32 kRoundingCalls = 1u << 31;  // apart from the ids of dropout's layers

// What is rounded: each has numbers of its own.
enum class Rounded : uint32 { kParameter, kFirstMoment, kSecondMoment };

__device__ inline Words rounding_words(const RoundingBits& r, Rounded rounded) {
  const uint32 stream = kRoundingCalls + 4 * r.tensor + static_cast<uint32>(rounded);
  const Words counter{{static_cast<uint32>(r.octet), static_cast<uint32>(r.octet >> 32), stream, r.step}};
  return philox4x32(counter, static_cast<uint32>(r.seed), static_cast<uint32>(r.seed >> 32));
}

// Away from zero with the probability that the bits cut off say; `lane` has 16 random bits. NaN stays NaN.
__device__ inline uint32 round_to_bfloat16(float x, uint32 lane) {
  return x != x ? 0x7FFFu : (bit_cast<uint32>(x) + lane) >> 16;
}

__device__ inline Bits pack_randomly(const Octet& octet, const Words& words) {
  Bits out{};
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const uint32 low = round_to_bfloat16(octet.v[2 * i], words.w[i] & 0xFFFFu);
    const uint32 high = round_to_bfloat16(octet.v[2 * i + 1], words.w[i] >> 16);
    out.w[i] = low | high << 16;
  }
  return out;
}

}  // namespace lt
