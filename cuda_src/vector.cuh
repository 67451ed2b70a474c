// Eight elements at a time, in FP32, from and to a matrix of any type and strides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace lt {

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;

constexpr int kOctet = 8;

// A matrix argument as the host passes it; strides are in elements, data is null where the operand is absent.
struct Matrix {
  void* data;
  int64 row_stride;
  int64 col_stride;
};

struct Octet {
  float v[kOctet];
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

template <class T>
struct alignas(16) Packet {
  static constexpr int kCount = 16 / sizeof(T);
  T v[kCount];
};

template <class T>
__device__ inline T* element(const Matrix& m, int64 row, int64 col) {
  return static_cast<T*>(m.data) + row * m.row_stride + col * m.col_stride;
}

// 16-byte accesses need a whole octet, contiguous and aligned; anything else goes element by element.
__device__ inline bool is_vector(const void* p, int64 stride, int count) {
  return stride == 1 && count == kOctet && (reinterpret_cast<uint64>(p) & 15) == 0;
}

template <class T>
__device__ inline Octet load(const Matrix& m, int64 row, int64 col, int count) {
  const T* p = element<const T>(m, row, col);
  Octet out;
  if (is_vector(p, m.col_stride, count)) {
    constexpr int n = Packet<T>::kCount;
#pragma unroll
    for (int i = 0; i < kOctet / n; ++i) {
      const Packet<T> packet = reinterpret_cast<const Packet<T>*>(p)[i];
#pragma unroll
      for (int j = 0; j < n; ++j) out.v[i * n + j] = to_float(packet.v[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) out.v[i] = i < count ? to_float(p[i * m.col_stride]) : 0.0f;
  }
  return out;
}

template <class T>
__device__ inline void store(const Matrix& m, int64 row, int64 col, int count, const Octet& octet) {
  T* p = element<T>(m, row, col);
  if (is_vector(p, m.col_stride, count)) {
    constexpr int n = Packet<T>::kCount;
#pragma unroll
    for (int i = 0; i < kOctet / n; ++i) {
      Packet<T> packet;
#pragma unroll
      for (int j = 0; j < n; ++j) packet.v[j] = from_float<T>(octet.v[i * n + j]);
      reinterpret_cast<Packet<T>*>(p)[i] = packet;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < count) p[i * m.col_stride] = from_float<T>(octet.v[i]);
    }
  }
}

// How many of the eight columns from `col` on exist.
__device__ inline int octet_count(int64 col, int64 cols) {
  return cols - col < kOctet ? static_cast<int>(cols - col) : kOctet;
}

}  // namespace lt
