// A thread's eight elements of a long array whose type is known only at run time. They are two quads (four consecutive
// elements each), 128 elements apart, so that a warp's accesses are contiguous whether an element has two bytes or
// four. If each thread had eight consecutive FP32 elements, every 16-byte store of a warp would fill only half of each
// 32-byte sector.
#pragma once

#include "vector.cuh"

namespace lt {

constexpr int kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2;

template <class T>
constexpr int kTypeOf = kFloat32;
template <>
constexpr int kTypeOf<__half> = kFloat16;
template <>
constexpr int kTypeOf<__nv_bfloat16> = kBfloat16;

constexpr uint32 kWarpTile = 256;  // elements that a warp handles at a time
constexpr uint32 kQuadDistance = 128;

// Selects the calling thread's elements of a chunk.
struct Quads {
  uint32 first;  // index of the first quad's first element
  uint32 count;  // number of elements in the chunk
  bool vector;   // whether both quads are complete and the arrays are aligned, so that quads are moved as one vector

  // The k-th element's index in the chunk.
  __device__ uint32 index(int k) const { return first + k / 4 * kQuadDistance + k % 4; }
};

// The calling thread's quads in a chunk of `count` elements; `start` is the index of the block's first element, if
// several blocks share the chunk.
__device__ inline Quads quads_of_thread(uint32 count, bool aligned, uint32 start = 0) {
  const uint32 first = start + threadIdx.x / 32 * kWarpTile + threadIdx.x % 32 * 4;
  return Quads{first, count, aligned && first + kQuadDistance + 4 <= count};
}

// The bits of eight elements: eight words, or four words of two elements. They are converted only when they are needed,
// so that the loads of several arrays can be in flight together.
struct Bits {
  uint32 w[kOctet];
};

template <class To, class From>
__device__ inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit_cast keeps the size");
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof(to));
  return to;
}

// The k-th of eight 16-bit elements.
__device__ inline unsigned short half_of(const Bits& bits, int k) {
  return static_cast<unsigned short>(bits.w[k / 2] >> (16 * (k % 2)));
}

// Loads without cache hints: on an H200, streaming loads (__ldcs) cost an optimizer's update 4 % of its bandwidth.
template <class Word>
__device__ inline Word load_word(const void* data, uint32 i) {
  return static_cast<const Word*>(data)[i];
}

template <class Word>
__device__ inline void store_word(void* data, uint32 i, const Word& word) {
  static_cast<Word*>(data)[i] = word;
}

__device__ inline Bits load_bits(const void* data, int type, const Quads& at) {
  Bits out{};
  const uint32 quad = at.first / 4;
  if (at.vector && type == kFloat32) {
    const uint4 a = load_word<uint4>(data, quad), b = load_word<uint4>(data, quad + kQuadDistance / 4);
    out = Bits{{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  } else if (at.vector) {
    const uint2 a = load_word<uint2>(data, quad), b = load_word<uint2>(data, quad + kQuadDistance / 4);
    out = Bits{{a.x, a.y, b.x, b.y}};
  } else if (type == kFloat32) {
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      if (at.index(k) < at.count) out.w[k] = load_word<uint32>(data, at.index(k));
    }
  } else {
    uint32 halves[kOctet] = {};  // the 16-bit elements are joined to words only after all loads were issued
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      if (at.index(k) < at.count) halves[k] = load_word<unsigned short>(data, at.index(k));
    }
#pragma unroll
    for (int k = 0; k < kOctet / 2; ++k) out.w[k] = halves[2 * k] | halves[2 * k + 1] << 16;
  }
  return out;
}

__device__ inline void store_bits(void* data, int type, const Quads& at, const Bits& bits) {
  const uint32* w = bits.w;
  const uint32 quad = at.first / 4;
  if (at.vector && type == kFloat32) {
    store_word(data, quad, uint4{w[0], w[1], w[2], w[3]});
    store_word(data, quad + kQuadDistance / 4, uint4{w[4], w[5], w[6], w[7]});
  } else if (at.vector) {
    store_word(data, quad, uint2{w[0], w[1]});
    store_word(data, quad + kQuadDistance / 4, uint2{w[2], w[3]});
  } else {
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      const uint32 i = at.index(k);
      if (i >= at.count) continue;
      if (type == kFloat32) {
        store_word(data, i, w[k]);
      } else {
        store_word(data, i, half_of(bits, k));
      }
    }
  }
}

__device__ inline Octet unpack(const Bits& bits, int type) {
  Octet out;
#pragma unroll
  for (int k = 0; k < kOctet; ++k) {
    if (type == kFloat32) {
      out.v[k] = bit_cast<float>(bits.w[k]);
    } else if (type == kFloat16) {
      out.v[k] = to_float(bit_cast<__half>(half_of(bits, k)));
    } else {
      out.v[k] = bit_cast<float>(static_cast<uint32>(half_of(bits, k)) << 16);
    }
  }
  return out;
}

// Converts eight elements to `type`, rounded to nearest.
__device__ inline Bits pack(const Octet& octet, int type) {
  Bits out{};
#pragma unroll
  for (int k = 0; k < kOctet; k += 2) {
    const float a = octet.v[k], b = octet.v[k + 1];
    if (type == kFloat32) {
      out.w[k] = bit_cast<uint32>(a);
      out.w[k + 1] = bit_cast<uint32>(b);
    } else if (type == kFloat16) {
      out.w[k / 2] = bit_cast<uint32>(__floats2half2_rn(a, b));
    } else {
      out.w[k / 2] = bit_cast<uint32>(__floats2bfloat162_rn(a, b));
    }
  }
  return out;
}

}  // namespace lt
