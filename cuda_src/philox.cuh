// The random-number generator Philox4x32-10 (Salmon et al., SC 2011), and dropout masks drawn from it.
// lt_runtime/reference/philox.py computes the same bits, and says which counter and key belong to which element.
#pragma once

#include "vector.cuh"

namespace lt {

constexpr int kRounds = 10;

// Options of dropout, as the host passes them. `step_pointer`, unless null, overrides `step`: a captured graph can
// change the number in memory.
struct Dropout {
  uint32 keys[kRounds][2];  // a key for each round: keys in constant memory cost neither registers nor additions
  const uint32* step_pointer;
  uint32 step;
  uint32 layer;
  uint32 limit;  // 65536 · n - 1: an element is kept if its 16-bit random number is below n
  float scale;
};

struct Words {
  uint32 w[4];
};

__device__ inline Words philox_round(const Words& c, uint32 k0, uint32 k1) {
  const uint64 p0 = 0xD2511F53ull * c.w[0];
  const uint64 p1 = 0xCD9E8D57ull * c.w[2];
  return Words{{static_cast<uint32>(p1 >> 32) ^ c.w[1] ^ k0, static_cast<uint32>(p1),
                static_cast<uint32>(p0 >> 32) ^ c.w[3] ^ k1, static_cast<uint32>(p0)}};
}

__device__ inline Words philox4x32(Words c, uint32 k0, uint32 k1) {
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    c = philox_round(c, k0, k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

__device__ inline uint32 dropout_step(const Dropout& d) { return d.step_pointer ? *d.step_pointer : d.step; }

__device__ inline Words dropout_words(const Dropout& d, uint32 step, uint64 block) {
  Words c{{static_cast<uint32>(block), static_cast<uint32>(block >> 32), d.layer, step}};
#pragma unroll
  for (int round = 0; round < kRounds; ++round) c = philox_round(c, d.keys[round][0], d.keys[round][1]);
  return c;
}

// Removes the first `lanes` (0 to 7) of the sixteen 16-bit numbers in eight words, by shifting the others forward. It
// shifts by powers of two (a barrel shifter), so that every index is known at compile time and the words stay in
// registers.
__device__ inline void drop_lanes(uint32 (&w)[8], int lanes) {
  if (lanes & 1) {
#pragma unroll
    for (int i = 0; i < 7; ++i) w[i] = (w[i] >> 16) | (w[i + 1] << 16);
  }
  if (lanes & 2) {
#pragma unroll
    for (int i = 0; i < 7; ++i) w[i] = w[i + 1];
  }
  if (lanes & 4) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
}

// Multiplies the eight elements from row-major index `index` on by their dropout factors. One call of Philox gives the
// random numbers of eight elements, from a multiple of eight on. For any other `index` this function makes two calls.
// kWhole states that `index` is a multiple of eight.
template <bool kWhole>
__device__ inline void apply_dropout(Octet& octet, const Dropout& d, uint32 step, uint64 index) {
  const int shift = kWhole ? 0 : static_cast<int>(index & 7);
  const Words first = dropout_words(d, step, index >> 3);
  uint32 w[8] = {first.w[0], first.w[1], first.w[2], first.w[3]};
  if (shift != 0) {
    const Words second = dropout_words(d, step, (index >> 3) + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) w[4 + i] = second.w[i];
    drop_lanes(w, shift);
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    // The element's random number is in the upper half of the word. The lower half does not change the comparison,
    // because the lower half of the limit is all ones.
    const uint32 lane = i % 2 ? w[i / 2] : w[i / 2] << 16;
    octet.v[i] *= lane <= d.limit ? d.scale : 0.0f;
  }
}

}  // namespace lt
