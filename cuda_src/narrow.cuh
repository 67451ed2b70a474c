// Code shared by the narrow products, in which M, N or K is at most 16: D[M,N] = α·A[M,K]·B[K,N] + β·C, accumulated in
// FP32 in a fixed order. A narrow product is small or bound by memory, so that latency decides its time: a thread
// issues as many loads as possible before it computes.
//
// Compiled for one SCALAR type, WIDTH, which is the narrow dimension rounded up to 1, 2, 4, 8 or 16, and ALIGNED (see
// sweep.cuh).
#pragma once

#include "sweep.cuh"

namespace lt {

// Arguments of the narrow products; all matrices are passed as row-major ones.
struct NarrowParams {
  Matrix a;          // the operand A (M, K), or its transpose
  Matrix b;          // the operand B (K, N), or its transpose
  Matrix c;          // the operand C; may be null or the same memory as `d`
  Matrix d;
  SCALAR* vector;    // narrow_n: (N) bias; narrow_m: (M) sum of A over K; narrow_k: (N) sum of D over M; may be null
  float* partial;    // partial sums over parts of K, or of M; used if several blocks share a sum
  uint32* tickets;   // counters of `is_last_block`; used if several blocks share a sum
  int64 rows;        // M
  int64 cols;        // N
  int64 depth;       // K
  float alpha;
  float beta;
  Matrix aux;        // a pre-activation, or ReLU's mask with strides in bytes, of D's shape; may be absent
};

// β·C
__device__ inline float addend(const NarrowParams& p, int64 row, int64 col) {
  return p.c.data ? p.beta * to_float(*element<SCALAR>(p.c, row, col)) : 0.0f;
}

// One step of a reduction over lanes. Two lanes whose numbers differ by `distance` add up their 2 · kHalf terms: the
// lower lane gets the sums of the first half of the terms, the upper lane those of the second half, both in terms[0 ..
// kHalf - 1]. Returns true in the upper lane.
template <int kHalf>
__device__ inline bool add_half(float* terms, uint32 lane, uint32 distance) {
  const bool upper = lane & distance;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float given = upper ? terms[i] : terms[i + kHalf], kept = upper ? terms[i + kHalf] : terms[i];
    terms[i] = kept + __shfl_xor_sync(0xFFFFFFFF, given, distance);
  }
  return upper;
}

}  // namespace lt
