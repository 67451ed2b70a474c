// Stochastic rounding to BF16. lt_runtime/reference/rounding.py draws the same random bits and rounds in the same way.
#pragma once

#include "philox.cuh"
#include "quads.cuh"

namespace lt {

// Added to the word of Philox's counter that dropout sets to a layer's id, which is smaller, so that the counters of
// rounding and dropout differ.
constexpr uint32 kRoundingCalls = 1u << 31;

// Which of the three stored numbers of an element is rounded: parameter, first or second moment.
enum class Rounded { kParameter, kFirstMoment, kSecondMoment };

// The random bits of an optimizer's update. One call of Philox, whose counter contains `octet`, gives eight 16-bit
// random numbers, one for each of a thread's eight elements in the order of Quads.
__device__ inline Words rounding_words(uint64 seed, uint64 octet, uint32 tensor, uint32 step) {
  const Words counter{{static_cast<uint32>(octet), static_cast<uint32>(octet >> 32), kRoundingCalls + tensor, step}};
  return philox4x32(counter, static_cast<uint32>(seed), static_cast<uint32>(seed >> 32));
}

// Reorders the eight random numbers for each of an element's three stored numbers, so that these are rounded by
// different bits: the first moment uses the random number of the neighbouring element, the second moment that of the
// element two places on. A call of Philox for each stored number would cost more than the update itself.
__device__ inline Words lanes_for(Rounded rounded, const Words& words) {
  const uint32* w = words.w;
  if (rounded == Rounded::kParameter) return words;
  if (rounded == Rounded::kSecondMoment) return Words{{w[1], w[2], w[3], w[0]}};
  Words swapped;
#pragma unroll
  for (int i = 0; i < 4; ++i) swapped.w[i] = w[i] >> 16 | w[i] << 16;
  return swapped;
}

// Rounds x to BF16: away from zero with a probability equal to the fraction that truncation cuts off, otherwise towards
// zero. `lane` has 16 random bits. NaN stays NaN.
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
