// Loads and stores of octets (eight elements, converted to and from FP32) of matrices of any type and strides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace lt {

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;

constexpr int kOctet = 8;
constexpr int kWarp = 32;  // threads

// A matrix as the host passes it to a kernel. Strides are in elements; `data` is null if the operand is absent.
struct Matrix {
  void* data;
  int64 row_stride;
  int64 col_stride;
};

// Eight elements in FP32: the unit in which a thread loads, computes and stores.
struct Octet {
  float v[kOctet];

  __device__ Octet& operator+=(const Octet& other) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] += other.v[i];
    return *this;
  }
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Sixteen bytes of elements: what one vector load or store moves.
template <class T>
struct alignas(16) Packet {
  static constexpr int kCount = 16 / sizeof(T);
  T v[kCount];
};

// Two elements, which one instruction converts.
template <class T>
struct Pair;
template <>
struct Pair<float> {
  using Type = float2;
  static __device__ float2 unpack(float2 x) { return x; }
  static __device__ float2 pack(float2 x) { return x; }
};
template <>
struct Pair<__half> {
  using Type = __half2;
  static __device__ float2 unpack(__half2 x) { return __half22float2(x); }
  static __device__ __half2 pack(float2 x) { return __float22half2_rn(x); }
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ float2 unpack(__nv_bfloat162 x) { return __bfloat1622float2(x); }
  static __device__ __nv_bfloat162 pack(float2 x) { return __float22bfloat162_rn(x); }
};

// Eight elements in their stored type, which are moved 16 bytes at a time.
template <class T>
struct alignas(16) Packed {
  typename Pair<T>::Type pairs[kOctet / 2];
};

template <class T>
__device__ inline Octet unpack(const Packed<T>& packed) {
  Octet out;
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const float2 pair = Pair<T>::unpack(packed.pairs[i]);
    out.v[2 * i] = pair.x;
    out.v[2 * i + 1] = pair.y;
  }
  return out;
}

// Overload for elements that the load has already converted to FP32.
__device__ inline Octet unpack(const Octet& octet) { return octet; }

template <class T>
__device__ inline Packed<T> pack(const Octet& octet) {
  Packed<T> out;
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) out.pairs[i] = Pair<T>::pack(float2{octet.v[2 * i], octet.v[2 * i + 1]});
  return out;
}

// Loads and stores without cache hints: on an H200, streaming loads (__ldcs) cost 3 % of bandwidth, and streaming
// stores cost 1 %.
template <class T, class Word = uint4>
__device__ inline Packed<T> load_packed(const T* p) {
  Packed<T> out;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(out) / sizeof(Word)); ++i) {
    const Word word = reinterpret_cast<const Word*>(p)[i];
    memcpy(reinterpret_cast<char*>(&out) + i * sizeof(word), &word, sizeof(word));
  }
  return out;
}

template <class T, class Word = uint4>
__device__ inline void store_packed(T* p, const Packed<T>& packed) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(packed) / sizeof(Word)); ++i) {
    Word word;
    memcpy(&word, reinterpret_cast<const char*>(&packed) + i * sizeof(word), sizeof(word));
    reinterpret_cast<Word*>(p)[i] = word;
  }
}

// Unsigned types as large as two and as four elements, which are then moved by one instruction.
template <class T>
struct WordOf;
template <>
struct WordOf<float> {
  using Two = uint2;
  using Four = uint4;
};
template <>
struct WordOf<__half> {
  using Two = uint32;
  using Four = uint2;
};
template <>
struct WordOf<__nv_bfloat16> {
  using Two = uint32;
  using Four = uint2;
};

// Loads eight contiguous elements by the widest loads that the address allows, because rows of odd length begin at any
// element.
template <class T>
__device__ inline Octet load_contiguous(const T* p) {
  using Two = typename Pair<T>::Type;
  using Four = typename WordOf<T>::Four;
  if (reinterpret_cast<uint64>(p) % sizeof(Four) == 0) return unpack(load_packed<T, Four>(p));
  if (reinterpret_cast<uint64>(p) % sizeof(Two) == 0) return unpack(load_packed<T, typename WordOf<T>::Two>(p));
  Octet out;
  out.v[0] = to_float(p[0]);
#pragma unroll
  for (int i = 1; i < kOctet - 1; i += 2) {
    const float2 pair = Pair<T>::unpack(*reinterpret_cast<const Two*>(p + i));
    out.v[i] = pair.x;
    out.v[i + 1] = pair.y;
  }
  out.v[kOctet - 1] = to_float(p[kOctet - 1]);
  return out;
}

template <class T>
__device__ inline void store_contiguous(T* p, const Octet& octet) {
  using Two = typename Pair<T>::Type;
  using Four = typename WordOf<T>::Four;
  if (reinterpret_cast<uint64>(p) % sizeof(Four) == 0) return store_packed<T, Four>(p, pack<T>(octet));
  if (reinterpret_cast<uint64>(p) % sizeof(Two) == 0) {
    return store_packed<T, typename WordOf<T>::Two>(p, pack<T>(octet));
  }
  p[0] = from_float<T>(octet.v[0]);
#pragma unroll
  for (int i = 1; i < kOctet - 1; i += 2) {
    *reinterpret_cast<Two*>(p + i) = Pair<T>::pack(float2{octet.v[i], octet.v[i + 1]});
  }
  p[kOctet - 1] = from_float<T>(octet.v[kOctet - 1]);
}

template <class T>
__device__ inline T* element(const Matrix& m, int64 row, int64 col) {
  return static_cast<T*>(m.data) + row * m.row_stride + col * m.col_stride;
}

// Two ways to load and store an octet. Aligned: by vector instructions, for eight contiguous elements aligned to 16
// bytes. Scattered: for any strides and any `count` of existing elements; in words if all eight exist and are
// contiguous, otherwise one by one.
template <class T>
struct Aligned {
  using Raw = Packed<T>;
  static __device__ Raw load(const T* p, int64, int) { return load_packed(p); }
  static __device__ void store(T* p, int64, int, const Octet& octet) { store_packed(p, pack<T>(octet)); }
};

template <class T>
struct Scattered {
  using Raw = Octet;
  static __device__ Raw load(const T* p, int64 stride, int count) {
    if (stride == 1 && count == kOctet) return load_contiguous(p);
    Octet out;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) out.v[i] = i < count ? to_float(p[i * stride]) : 0.0f;
    return out;
  }
  static __device__ void store(T* p, int64 stride, int count, const Octet& octet) {
    if (stride == 1 && count == kOctet) return store_contiguous(p, octet);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < count) p[i * stride] = from_float<T>(octet.v[i]);
    }
  }
};

// Chooses between Aligned and Scattered at run time for each octet, for kernels whose speed matters little.
template <class T>
__device__ inline Octet load(const Matrix& m, int64 row, int64 col, int count) {
  const T* p = element<T>(m, row, col);
  if (m.col_stride == 1 && count == kOctet && reinterpret_cast<uint64>(p) % 16 == 0) return unpack(load_packed(p));
  return Scattered<T>::load(p, m.col_stride, count);
}

template <class T>
__device__ inline void store(const Matrix& m, int64 row, int64 col, int count, const Octet& octet) {
  T* p = element<T>(m, row, col);
  if (m.col_stride == 1 && count == kOctet && reinterpret_cast<uint64>(p) % 16 == 0) {
    store_packed(p, pack<T>(octet));
  } else {
    Scattered<T>::store(p, m.col_stride, count, octet);
  }
}

// Unpacks a byte of a ReLU mask into eight numbers 0 or 1; the lowest bit belongs to the first column.
__device__ inline Octet unpack(uint32 bits) {
  Octet out;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out.v[i] = bits >> i & 1 ? 1.0f : 0.0f;
  return out;
}

// Returns how many of the eight columns from `col` on exist.
__device__ inline int octet_count(int64 col, int64 cols) {
  if (col >= cols) return 0;
  return cols - col < kOctet ? static_cast<int>(cols - col) : kOctet;
}

}  // namespace lt
