// What the products share of which one dimension is at most 16: D[M,N] = α·A[M,K]·B[K,N] + β·C, in FP32, in fixed order.
// Such a product is small or bound by memory: what it takes is latency, so a thread asks for all it needs before it
// computes. Compiled for one SCALAR type, the narrow dimension's WIDTH (1, 2, 4, 8 or 16, rounded up) and ALIGNED (see
// sweep.cuh).
#pragma once

#include "predecessor.cuh"
#include "sweep.cuh"

namespace lt {

constexpr int kWarp = 32;

// All matrices are row-major as they are passed.
struct NarrowParams {
  Matrix a;          // (M, K), or its transpose
  Matrix b;          // (K, N), or its transpose
  Matrix c;          // may be absent, or `d`
  Matrix d;
  SCALAR* vector;    // (N) the bias, (M) where the sum of A over K goes, or (N) that of D over M; may be absent
  float* partial;    // sums over parts of K, or of M; only for more than one part
  uint32* tickets;   // likewise, see last_block.cuh
  int64 rows;        // M
  int64 cols;        // N
  int64 depth;       // K
  float alpha;
  float beta;
  Matrix aux;        // as D, a pre-activation, or ReLU's mask, whose strides are in bytes; may be absent
};

// β·C
__device__ inline float addend(const NarrowParams& p, int64 row, int64 col) {
  return p.c.data ? p.beta * to_float(*element<SCALAR>(p.c, row, col)) : 0.0f;
}

// Adds to the first half of some terms what another lane, `distance` off, has of them, or to the second half, which then
// takes the first one's place: the other lane does it the other way round. Says whether it was the second.
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
