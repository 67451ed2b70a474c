// Writes a matrix in FP8, row-major, transposed or both, and finds the largest absolute value of its elements.
//
// Compiled for:
//   E5M2     1 to convert to E5M2, 0 to E4M3
//   ALIGNED  1 if all rows of all matrices begin at multiples of 16 bytes, the number of columns is a multiple of 8 and,
//            with a transposed result, the number of rows is a multiple of 16; 0 for any layout
//
// The conversion to FP8 is one instruction from compute capability 8.9 on; on older GPUs no kernel with this header is
// launched.
#pragma once

#include "instructions.cuh"

#ifndef __CUDA_ARCH__
#include <cuda_fp8.h>  // conversions to FP8 in software, for tests that run kernels on the CPU
#endif

namespace lt {

constexpr int kTile = 128;                  // rows and columns of a block's tile
constexpr int kTileBlock = kTile / kOctet;  // threads of a block in x and in y; each holds a patch of 8 rows and 8 columns

struct Fp8Output {
  Matrix out;          // (rows, cols); null if absent
  Matrix transposed;   // (cols, rows); null if absent
  const float* scale;  // factor before the conversion; null for 1
  float* amax;         // raised to the largest |x| before scaling, if that is larger; null if it is not wanted
  // 1 / scale of each row of `out`, and of each column of `out`, which is a row of `transposed`. Only casts that scale
  // each row and column by itself write these, see fp8_rows.cuh.
  float* row_scales;
  float* col_scales;
  uint32 rows;
  int64 cols;
};

// Converts two numbers to FP8 in the two low bytes of a word, rounding to nearest even. Numbers beyond the largest FP8
// number saturate to it. NaN stays NaN.
__device__ inline uint32 to_fp8(float low, float high) {
#ifndef __CUDA_ARCH__
  return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, E5M2 ? __NV_E5M2 : __NV_E4M3);
#elif __CUDA_ARCH__ >= 890
  unsigned short both;
#if E5M2
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
#endif
  return both;
#else
  return 0;
#endif
}

// Multiplies by the scale, and turns infinities into NaN, so that products with them are not finite: `number` times 0
// is NaN for infinity, and 0 for finite numbers.
__device__ inline float scaled(float number, float scale) { return fmaf(number, 0.0f, number * scale); }

// Converts four numbers of an octet from number `j` on to FP8, each number i times scale(i), the first in the lowest
// byte.
template <class Scale>
__device__ inline uint32 quad_to_fp8(const Octet& x, int j, Scale scale) {
  const uint32 low = to_fp8(scaled(x.v[j], scale(j)), scaled(x.v[j + 1], scale(j + 1)));
  return low | to_fp8(scaled(x.v[j + 2], scale(j + 2)), scaled(x.v[j + 3], scale(j + 3))) << 16;
}

// Selects four of the eight bytes of two words: hexadecimal digit i of `chosen` is the number of the byte that becomes
// byte i of the result (PRMT).
__device__ inline uint32 choose_bytes(uint32 low, uint32 high, uint32 chosen) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, chosen);
#else
  const uint64 both = static_cast<uint64>(high) << 32 | low;
  uint32 out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32>(both >> (8 * (chosen >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return out;
#endif
}

// The larger of two numbers that are not negative; NaN if either is.
__device__ inline float larger_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a > b || a != a ? a : b;
#endif
}

constexpr int kRun = 16;  // a run: the bytes of a column that a thread stores at once

// Transposes a block of 16 rows and 4 columns of bytes: word(i) returns row i, and runs[j] becomes column j.
template <class Word>
__device__ inline void transpose_runs(uint4 (&runs)[4], Word word) {
  uint32 columns[4][kRun / 4];
#pragma unroll
  for (int k = 0; k < kRun / 4; ++k) {
    const uint32 a = word(4 * k), b = word(4 * k + 1), c = word(4 * k + 2), d = word(4 * k + 3);
    const uint32 left_ab = choose_bytes(a, b, 0x5140), right_ab = choose_bytes(a, b, 0x7362);
    const uint32 left_cd = choose_bytes(c, d, 0x5140), right_cd = choose_bytes(c, d, 0x7362);
    columns[0][k] = choose_bytes(left_ab, left_cd, 0x5410);
    columns[1][k] = choose_bytes(left_ab, left_cd, 0x7632);
    columns[2][k] = choose_bytes(right_ab, right_cd, 0x5410);
    columns[3][k] = choose_bytes(right_ab, right_cd, 0x7632);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) runs[j] = uint4{columns[j][0], columns[j][1], columns[j][2], columns[j][3]};
}

__device__ inline uint32 larger(uint32 a, uint32 b) { return a > b ? a : b; }

// Raises *amax to the largest `value` of a block's kTileBlock² threads, which are numbered by `self`. No value is
// negative. Every thread of the block must call it, and between two calls there must be a barrier.
__device__ inline void store_amax(float* amax, float value, int self) {
  __shared__ uint32 largest[kTileBlock * kTileBlock / kWarp];
  // Non-negative floats are ordered as their bits are, read as integers, and NaN comes last.
  uint32 bits = __float_as_uint(value);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) bits = larger(bits, __shfl_xor_sync(0xFFFFFFFF, bits, step));
  if (self % kWarp == 0) largest[self / kWarp] = bits;
  __syncthreads();
  if (self != 0) return;
  for (uint32 each : largest) bits = larger(bits, each);
  atomicMax(reinterpret_cast<uint32*>(amax), bits);
}

// Converts the eight rows of a thread's patch to FP8, and stores them as they are, transposed or both. Blocks have
// kTileBlock × kTileBlock threads. Two writers of one kernel need different kNumber, so that each has its own tile in
// shared memory.
template <int kNumber = 0>
class Fp8Writer {
 public:
  __device__ explicit Fp8Writer(const Fp8Output& out)
      : out_(out),
        scale_(out.scale ? *out.scale : 1.0f),
        block_col_(static_cast<int64>(blockIdx.x) * kTile),
        cols_(octet_count(block_col_ + threadIdx.x * kOctet, out.cols)) {}

  // Converts row `i` of the thread's patch, in the tile whose first row is `block_row`, and stores it. For rows and
  // columns beyond the matrix, `numbers` must hold zeros or copies of other elements, which leave the maximum as it is.
  __device__ void take(uint32 block_row, int i, const Octet& numbers) {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) amax_ = larger_or_nan(amax_, fabsf(numbers.v[j]));
    const uint2 words = convert(numbers, [this](int) { return scale_; });
    const int row = threadIdx.y * kOctet + i;
    if (out_.transposed.data) keep(row, words);
    if (out_.out.data && block_row + row < out_.rows) store_row(block_row + row, words);
  }

  // Stores the transposed tile after `take` was called for all of its rows. Every thread of the block must call it.
  __device__ void store(uint32 block_row) const {
    if (!out_.transposed.data) return;
    __syncthreads();
    store_tile(block_row);
    __syncthreads();  // all threads have read the tile, so that it may be overwritten
  }

  // Stores the largest absolute value of all elements passed to `take`. Every thread of the block must call it.
  __device__ void store_amax() const {
    if (out_.amax) lt::store_amax(out_.amax, amax_, threadIdx.y * kTileBlock + threadIdx.x);
  }

 protected:
  // Converts eight numbers, number i times scale(i).
  template <class Scale>
  static __device__ uint2 convert(const Octet& numbers, Scale scale) {
    return {quad_to_fp8(numbers, 0, scale), quad_to_fp8(numbers, 4, scale)};
  }

  // Keeps an octet of row `row` of the tile for `store`.
  __device__ void keep(int row, uint2 words) const {
    reinterpret_cast<uint2*>(shared_tile())[row * kTileBlock + (threadIdx.x ^ (swizzle(row / kRun) / 2))] = words;
  }

  static constexpr int kRuns = kTile / kRun;  // number of runs in a column of the tile
  static constexpr int kWords = kTile / 4;    // number of 32-bit words in a row of the tile

  static __device__ uint32* shared_tile() {
    __shared__ uint4 tile[kTile * kTile / 16];
    return &tile->x;
  }

  // Avoids bank conflicts: word w of a row lies at w ^ swizzle(run of the row). So the 32 threads of a warp, which read
  // four neighbouring words in each of eight runs, read from 32 different banks.
  static __device__ int swizzle(int run) { return 4 * run; }

  __device__ void store_row(uint32 row, uint2 words) const {
    const Matrix& m = out_.out;
    unsigned char* at = element<unsigned char>(m, row, block_col_ + threadIdx.x * kOctet);
#if ALIGNED
    if (cols_) *reinterpret_cast<uint2*>(at) = words;
#else
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      if (j < cols_) at[j * m.col_stride] = (j < 4 ? words.x : words.y) >> (8 * (j % 4)) & 0xFF;
    }
#endif
  }

  // A thread stores 16 consecutive elements of each of four columns; eight consecutive threads store four whole columns
  // of the tile.
  __device__ void store_tile(uint32 block_row) const {
    const int self = threadIdx.y * kTileBlock + threadIdx.x, run = self % kRuns, word = self / kRuns;
    const uint32* first = shared_tile() + run * kRun * kWords + (word ^ swizzle(run));
    uint4 runs[4];
    transpose_runs(runs, [first](int i) { return first[i * kWords]; });
    const uint32 row = block_row + run * kRun;
    const Matrix& m = out_.transposed;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64 col = block_col_ + word * 4 + i;
      unsigned char* at = element<unsigned char>(m, col, row);
#if ALIGNED
      if (col < out_.cols && row < out_.rows) *reinterpret_cast<uint4*>(at) = runs[i];
#else
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const unsigned char byte = reinterpret_cast<const unsigned char*>(&runs[i])[j];
        if (col < out_.cols && row + j < out_.rows) at[j * m.col_stride] = byte;
      }
#endif
    }
  }

  const Fp8Output& out_;
  float scale_;
  float amax_ = 0.0f;
  int64 block_col_;
  int cols_;  // number of columns of the patch that exist
};

}  // namespace lt
