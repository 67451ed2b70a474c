// Tensor-core instructions: mma (products of 16-bit tiles with FP32 accumulation) and ldmatrix (loads of their operands
// from shared memory). With g = lane / 4 and t = lane % 4, a lane holds of the operands and the result of an mma:
//
//   A, 16 × 16  four words: rows g, g + 8, g, g + 8; columns 2t and 2t + 1 in the first two, 2t + 8 and 2t + 9 in the others
//   B, 16 × 8   two words: rows 2t and 2t + 1, 2t + 8 and 2t + 9; column g
//   C, 16 × 8   four sums: the first two in row g, the others in row g + 8; columns 2t and 2t + 1
//
// So the sums of two neighbouring tiles of C, rounded in pairs, are the operand A of a following product, without
// passing through shared memory. All lanes of a warp must call these functions together. Below compute capability 8.0
// the instructions do not exist: the functions end the kernel with an error, and the host does not launch kernels that
// call them.
#pragma once

#include "vector.cuh"

namespace lt {

// c += a · b
template <class T>
__device__ inline void multiply_add(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply_add<__half>(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#elif defined(__CUDA_ARCH__)
template <class T>
__device__ inline void multiply_add(float (&)[4], const uint32 (&)[4], uint32, uint32) {
  __trap();
}
#else
template <class T>
__device__ inline void multiply_add(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  shim::multiply_add<T>(__FILE__, __LINE__, c, a, b0, b1);
}
#endif

// Rounds two numbers into one word, the first in its low half, with zeros in place of negative numbers; NaN stays NaN.
template <class T>
__device__ inline uint32 rounded_positive_pair(float x, float y);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
__device__ inline uint32 rounded_positive_pair<__nv_bfloat16>(float x, float y) {
  uint32 word;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
  return word;
}

template <>
__device__ inline uint32 rounded_positive_pair<__half>(float x, float y) {
  uint32 word;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
  return word;
}
#else
template <class T>
__device__ inline uint32 rounded_positive_pair(float x, float y) {
  const auto pair = Pair<T>::pack(float2{x <= 0.0f ? 0.0f : x, y <= 0.0f ? 0.0f : y});
  uint32 word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
#endif

// Loads four 8 × 8 matrices of 16-bit numbers from shared memory (ldmatrix). Lane l passes the address of row l % 8 of
// matrix l / 8; rows have 16 bytes and are aligned to 16 bytes. Word j of a lane's result holds columns 2t and 2t + 1
// of row g of matrix j; if TRANSPOSED, rows 2t and 2t + 1 of column g.
template <bool TRANSPOSED>
__device__ inline void load_matrices(uint32 (&out)[4], const void* row) {
#ifdef __CUDA_ARCH__
  const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(row));
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  }
#else
  shim::load_matrices<TRANSPOSED>(__FILE__, __LINE__, out, row);
#endif
}

}  // namespace lt
