// Casts a matrix to FP8 with a scale for each row, and its transpose with a scale for each row of the transpose, which
// is a column of the matrix. One kernel finds the scales by `Fp8ScaleFinder`, a second one casts by `Fp8RowWriter`.
// Each scale is the largest power of two by which the largest absolute value of the row or column stays in range.
// The kernels store 1 / scale, by which a product multiplies. It grows with the largest absolute value, so that blocks
// combine their results by an atomic maximum.
//
// Compiled for E5M2 and ALIGNED, see fp8.cuh.
#pragma once

#include "fp8.cuh"

namespace lt {

// Returns 1 / scale as the bits of a float: the least power of two, from 2^-126 on, by which the largest absolute value
// must be divided to be at most 1.75 · 2^kLargestExponent, the largest number of the FP8 type. Infinity and NaN count
// as 2^128.
__device__ inline uint32 inverse_scale(uint32 amax_bits) {
  constexpr uint32 kMantissaBits = 23, kInfinity = 0x7F800000;
  constexpr uint32 kBeyond = 0x1FFFFF;  // added to a float's bits, carries a mantissa above 1.75 to the next exponent
  constexpr int kLargestExponent = E5M2 ? 15 : 8;
  const uint32 bits = amax_bits < kInfinity ? amax_bits : kInfinity;
  const int exponent = static_cast<int>((bits + kBeyond) >> kMantissaBits) - kLargestExponent;
  return static_cast<uint32>(exponent > 1 ? exponent : 1) << kMantissaBits;
}

// The reciprocal of a power of two between 2^-126 and 2^126.
__device__ inline float reciprocal(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Finds 1 / scale of every row and column of a matrix: raises each stored number if an element passed to `take`
// requires a larger one. It has the interface of `Fp8Writer`, which casts by known scales.
class Fp8ScaleFinder {
 public:
  __device__ explicit Fp8ScaleFinder(const Fp8Output& out) : out_(out) {}

  // Has the arguments of `Fp8Writer::take`. In rows and columns beyond the matrix, `numbers` must hold zeros or copies
  // of elements of the same row or column, since other elements could raise a maximum.
  __device__ void take(uint32 block_row, int i, const Octet& numbers) {
    float of_row = 0.0f;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      of_row = larger_or_nan(of_row, fabsf(numbers.v[j]));
      of_cols_[j] = larger_or_nan(of_cols_[j], fabsf(numbers.v[j]));
    }
    if (!out_.row_scales) return;
    uint32 bits = __float_as_uint(of_row);
#pragma unroll
    for (int step = kTileBlock / 2; step > 0; step /= 2) bits = larger(bits, __shfl_xor_sync(0xFFFFFFFF, bits, step));
    const uint32 row = block_row + threadIdx.y * kOctet + i;
    if (threadIdx.x == 0 && row < out_.rows) raise(out_.row_scales + row, bits);
  }

  __device__ void store(uint32) const {}

  // Raises 1 / scale of the block's columns in global memory. Every thread of the block must call it.
  __device__ void store_amax() const {
    __shared__ float largest[kTileBlock][kTile];
    if (!out_.col_scales) return;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) largest[threadIdx.y][threadIdx.x * kOctet + j] = of_cols_[j];
    __syncthreads();
    const int self = threadIdx.y * kTileBlock + threadIdx.x;
    const int64 col = static_cast<int64>(blockIdx.x) * kTile + self;
    if (self >= kTile || col >= out_.cols) return;
    float of_col = 0.0f;
#pragma unroll
    for (int y = 0; y < kTileBlock; ++y) of_col = larger_or_nan(of_col, largest[y][self]);
    raise(out_.col_scales + col, __float_as_uint(of_col));
  }

 private:
  static __device__ void raise(float* inverse, uint32 amax_bits) {
    atomicMax(reinterpret_cast<uint32*>(inverse), inverse_scale(amax_bits));
  }

  const Fp8Output& out_;
  float of_cols_[kOctet] = {};
};

// Casts a tile to FP8 as `Fp8Writer` does, but with the scales of rows and columns that `Fp8ScaleFinder` has found;
// `store_amax` does nothing.
class Fp8RowWriter : public Fp8Writer<> {
 public:
  __device__ explicit Fp8RowWriter(const Fp8Output& out) : Fp8Writer<>(out) {
    const int64 col = block_col_ + threadIdx.x * kOctet;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) scales_[j] = j < cols_ && out.col_scales ? reciprocal(out.col_scales[col + j]) : 0.0f;
  }

  __device__ void take(uint32 block_row, int i, const Octet& numbers) const {
    const int row = threadIdx.y * kOctet + i;
    if (out_.transposed.data) keep(row, convert(numbers, [this](int j) { return scales_[j]; }));
    if (!out_.out.data || block_row + row >= out_.rows) return;
    const float scale = reciprocal(out_.row_scales[block_row + row]);
    store_row(block_row + row, convert(numbers, [scale](int) { return scale; }));
  }

  __device__ void store_amax() const {}

 private:
  float scales_[kOctet];  // the scales of the patch's columns
};

}  // namespace lt
