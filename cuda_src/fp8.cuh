// Writing a matrix in FP8, row by row, transposed or both, and the largest absolute value of its elements.
//
// Compiled for:
//   E5M2     1 for that format, 0 for E4M3
//   ALIGNED  1 where all rows of all matrices begin at multiples of 16 bytes, and where the columns, and with a transposed
//            result the rows, are a multiple of 16; 0 for any layout
//
// The conversion is one instruction from compute capability 8.9 on; below it no kernel with this header is launched.
#pragma once

#include "instructions.cuh"

#ifndef __CUDA_ARCH__
#include <cuda_fp8.h>  // the conversions where the tests run kernels on the host
#endif

namespace lt {

constexpr int kTile = 128;                  // rows and columns of a block's tile
constexpr int kTileBlock = kTile / kOctet;  // threads of a block in x and in y; each holds a patch of 8 rows and 8 columns

struct Fp8Output {
  Matrix out;          // (rows, cols); null if absent
  Matrix transposed;   // (cols, rows); null if absent
  const float* scale;  // factor before the conversion; null for 1
  float* amax;         // becomes the maximum of its value and of all |x| before the scale; null if it is not wanted
  uint32 rows;
  int64 cols;
};

// Two numbers as two bytes, rounded to nearest even. Numbers beyond the largest, and infinities, become the largest.
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

// Bytes of two words, chosen by the hexadecimal digits of `chosen`, the lowest byte first.
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

// Takes the eight rows of a thread's patch, and stores the patches of a block. Blocks are kTileBlock × kTileBlock threads.
class Fp8Writer {
 public:
  __device__ explicit Fp8Writer(const Fp8Output& out)
      : out_(out),
        scale_(out.scale ? *out.scale : 1.0f),
        block_col_(static_cast<int64>(blockIdx.x) * kTile),
        cols_(octet_count(block_col_ + threadIdx.x * kOctet, out.cols)) {}

  // Converts the patch's row `i`; elements that do not exist are zeros.
  __device__ void take(int i, const Octet& row) {
    const float* v = row.v;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) amax_ = larger_or_nan(amax_, fabsf(v[j]));
    words_[i].x = to_fp8(v[0] * scale_, v[1] * scale_) | to_fp8(v[2] * scale_, v[3] * scale_) << 16;
    words_[i].y = to_fp8(v[4] * scale_, v[5] * scale_) | to_fp8(v[6] * scale_, v[7] * scale_) << 16;
  }

  // Stores the tile whose first row is `block_row`. Every thread of the block must call it.
  __device__ void store(uint32 block_row) const {
    if (out_.transposed.data) put_into_tile();
    if (out_.out.data) store_rows(block_row + threadIdx.y * kOctet);
    if (!out_.transposed.data) return;
    __syncthreads();
    store_tile(block_row);
    __syncthreads();  // the tile may be overwritten
  }

  // Stores the largest absolute value of all rows that were taken. Every thread of the block must call it.
  __device__ void store_amax() const {
    __shared__ uint32 largest[kTileBlock * kTileBlock / kWarp];
    if (!out_.amax) return;
    const int self = threadIdx.y * kTileBlock + threadIdx.x;
    // Numbers that are not negative have the order of their bits, and NaN comes last.
    uint32 bits = __float_as_uint(amax_);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) bits = larger(bits, __shfl_xor_sync(0xFFFFFFFF, bits, step));
    if (self % kWarp == 0) largest[self / kWarp] = bits;
    __syncthreads();
    if (self != 0) return;
    for (uint32 each : largest) bits = larger(bits, each);
    atomicMax(reinterpret_cast<uint32*>(out_.amax), bits);
  }

 private:
  static constexpr int kVectors = kTile / 16;  // of a column of the tile

  static __device__ uint4* shared_tile() {
    __shared__ uint4 tile[kTile * kVectors];
    return tile;
  }

  static __device__ uint32 larger(uint32 a, uint32 b) { return a > b ? a : b; }

  // Puts the transposed patch into shared memory, where the tile's columns are contiguous: eight bytes of each column.
  // The place within a column is permuted by the number of the eight columns: so 16 threads side by side, which write
  // to 16 columns, reach all banks.
  __device__ void put_into_tile() const {
    uint2* tile = reinterpret_cast<uint2*>(shared_tile()) + threadIdx.x * kOctet * 2 * kVectors;
    const int place = threadIdx.y ^ threadIdx.x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32 upper[4], lower[4];
      transpose(0, half, upper);
      transpose(4, half, lower);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[(4 * half + i) * 2 * kVectors + place] = uint2{upper[i], lower[i]};
    }
  }

  // Transposes four columns of the four rows from `first` on.
  __device__ void transpose(int first, int half, uint32 (&columns)[4]) const {
    uint32 rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = half ? words_[first + i].y : words_[first + i].x;
    const uint32 left01 = choose_bytes(rows[0], rows[1], 0x5140), right01 = choose_bytes(rows[0], rows[1], 0x7362);
    const uint32 left23 = choose_bytes(rows[2], rows[3], 0x5140), right23 = choose_bytes(rows[2], rows[3], 0x7362);
    columns[0] = choose_bytes(left01, left23, 0x5410);
    columns[1] = choose_bytes(left01, left23, 0x7632);
    columns[2] = choose_bytes(right01, right23, 0x5410);
    columns[3] = choose_bytes(right01, right23, 0x7632);
  }

  __device__ void store_rows(uint32 row) const {
    const int rows = octet_count(row, out_.rows);
    const Matrix& m = out_.out;
    unsigned char* at = element<unsigned char>(m, row, block_col_ + threadIdx.x * kOctet);
#pragma unroll
    for (int i = 0; i < kOctet; ++i, at += m.row_stride) {
      if (i >= rows) return;
#if ALIGNED
      if (cols_) *reinterpret_cast<uint2*>(at) = words_[i];
#else
      for (int j = 0; j < cols_; ++j) at[j * m.col_stride] = (j < 4 ? words_[i].x : words_[i].y) >> (8 * (j % 4)) & 0xFF;
#endif
    }
  }

  // Stores the columns that `put_into_tile` has put into shared memory: eight threads one column, 16 bytes each.
  __device__ void store_tile(uint32 block_row) const {
    constexpr int kStep = kTileBlock * kTileBlock / kVectors;  // columns at a time
    const int self = threadIdx.y * kTileBlock + threadIdx.x, part = self % kVectors;
    const uint32 row = block_row + part * 16;
    if (row >= out_.rows) return;
    const Matrix& m = out_.transposed;
#pragma unroll
    for (int column = self / kVectors; column < kTile; column += kStep) {
      const int place = column / kOctet;
      if (block_col_ + column >= out_.cols) return;
      uint4 found = shared_tile()[column * kVectors + (part ^ (place >> 1))];
      if (place & 1) found = uint4{found.z, found.w, found.x, found.y};
      unsigned char* at = element<unsigned char>(m, block_col_ + column, row);
#if ALIGNED
      *reinterpret_cast<uint4*>(at) = found;
#else
      const uint32 words[] = {found.x, found.y, found.z, found.w};
      for (int i = 0; i < 16 && row + i < out_.rows; ++i) at[i * m.col_stride] = words[i / 4] >> (8 * (i % 4)) & 0xFF;
#endif
    }
  }

  const Fp8Output& out_;
  float scale_;
  float amax_ = 0.0f;
  int64 block_col_;
  int cols_;  // number of the patch's columns that exist
  uint2 words_[kOctet];
};

}  // namespace lt
