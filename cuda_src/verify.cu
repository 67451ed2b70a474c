// Verifies the results of kernels that the tuner measures. `expect` computes a matrix product with its epilogue in
// FP64, and the largest error that each element of a result may have. `compare` compares two arrays, or an array and a
// number, element by element.
//
// Both kernels read operands of any type and strides through `load`, so that one compilation serves every problem.

#include "instructions.cuh"

#include <math_constants.h>

namespace lt {

// Types of elements; kBit counts strides in bits, from the lowest bit of a byte on.
enum ElementType {
  kBit, kUint8, kUint16, kUint32, kUint64, kFloat8E4m3, kFloat8E5m2, kFloat16, kBfloat16, kFloat32, kFloat64
};

// Converts E4M3 on every architecture: its bits are moved to those of FP16, whose exponent bias is larger by 8, so that
// the result is multiplied by 2⁸.
__device__ inline double from_e4m3(uint32 bits) {
  if ((bits & 0x7F) == 0x7F) return CUDART_NAN_F;
  return 256.0 * to_float(__ushort_as_half(static_cast<unsigned short>((bits & 0x80) << 8 | (bits & 0x7F) << 7)));
}

// An operand as a batch of matrices. `data` is null if the operand is absent; strides are in elements.
struct Elements {
  const void* data;
  int64 batch_stride;
  int64 row_stride;
  int64 col_stride;
  int type;  // element type, an ElementType
};

__device__ inline double load(const Elements& matrices, int64 batch, int64 row, int64 col) {
  const int64 at = batch * matrices.batch_stride + row * matrices.row_stride + col * matrices.col_stride;
  const void* data = matrices.data;
  switch (matrices.type) {
    case kBit:
      return static_cast<const unsigned char*>(data)[at >> 3] >> (at & 7) & 1;
    case kUint8:
      return static_cast<const unsigned char*>(data)[at];
    case kUint16:
      return static_cast<const unsigned short*>(data)[at];
    case kUint32:
      return static_cast<const uint32*>(data)[at];
    case kUint64:
      return static_cast<double>(static_cast<const uint64*>(data)[at]);
    case kFloat8E4m3:
      return from_e4m3(static_cast<const unsigned char*>(data)[at]);
    case kFloat8E5m2:  // an E5M2 number is the upper byte of the FP16 number with the same value
      return to_float(__ushort_as_half(static_cast<unsigned short>(static_cast<const unsigned char*>(data)[at] << 8)));
    case kFloat16:
      return to_float(static_cast<const __half*>(data)[at]);
    case kBfloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[at]);
    case kFloat32:
      return static_cast<const float*>(data)[at];
    default:
      return static_cast<const double*>(data)[at];
  }
}

// Precision and range of the type to which results are rounded.
struct Rounding {
  double unit;     // one unit in the last place, relative to the number
  double least;    // smallest normal number
  double largest;  // results whose expected magnitude is larger are not compared
};

// Outputs of `expect`: the expected results in FP64, and the largest error that each may have; row-major without gaps.
// An absent output is null.
struct Results {
  double* values;
  double* limits;
};

struct ExpectParams {
  Elements a;
  Elements b;
  Elements c;
  Elements bias;
  Elements row_scales;  // factors of the rows of the product of A and B, and of its columns; absent for 1
  Elements col_scales;
  Elements aux;  // argument of the derivative: the pre-activation, or a mask with a bit for each positive pre-activation
  Results d;
  Results kept;  // output: the pre-activation, or a mask with a bit for each positive one
  double* sums;  // (tiles of rows, 3, cols) three sums over the rows of each tile
  Rounding rounding;
  int64 rows;
  int64 cols;
  int64 depth;
  double accumulation;   // relative error allowed for a sum of products, as a fraction of the product of the norms
  double addition;       // relative error allowed for adding C and the bias
  double approximation;  // error allowed for the activation or its derivative, relative to its argument
  int activation;        // activation: 0 none, 1 ReLU, 2 GELU by tanh
  int is_derivative;
  int keeps_mask;  // whether `kept` holds bits rather than numbers
};

struct CompareParams {
  Elements found;
  Elements wanted;       // expected values; null: `constant` everywhere
  const double* limits;  // allowed error of each element, contiguous; null: `limit` + `relative` · |expected value|
  struct Comparison* parts;  // output: one comparison for each block
  int64 batch;
  int64 rows;
  int64 cols;
  double constant;
  double limit;
  double relative;
};

// The result of a block's comparisons.
struct Comparison {
  uint64 bad;    // elements that are off by more than their limit, or NaN
  uint64 first;  // index of the first bad element, all ones if there is none
  double error_squares;
  double wanted_squares;
};

constexpr double kGeluScale = 0.79788456080286535588;  // sqrt(2/pi)
constexpr double kGeluCubic = 0.044715;

__device__ inline double activated(double z, int activation) {
  if (activation == 1) return z > 0.0 ? z : 0.0;
  if (activation == 2) return 0.5 * z * (1.0 + tanh(kGeluScale * z * (1.0 + kGeluCubic * z * z)));
  return z;
}

__device__ inline double gelu_derivative(double z) {
  const double t = tanh(kGeluScale * z * (1.0 + kGeluCubic * z * z));
  return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * kGeluScale * (1.0 + 3.0 * kGeluCubic * z * z);
}

// Stores an expected FP64 result and its limit: the accumulated error plus one rounding to the result's type.
__device__ inline void store(const Results& results, int64 at, double value, double error, const Rounding& rounding) {
  const double limit = error + rounding.unit * fabs(value) + rounding.least;
  results.values[at] = value;
  results.limits[at] = fabs(value) + limit > rounding.largest ? CUDART_INF_F : limit;
}

constexpr int kTile = 64;   // rows and columns of the tile that a block computes
constexpr int kDepth = 16;  // number of terms along K that a block loads at a time
constexpr int kSide = 16;   // threads of a block along each side
constexpr int kEach = kTile / kSide;
constexpr double kSteepest = 1.13;  // largest derivative of the activations
constexpr double kBiased = 0x1p-20;  // relative error of an FP32 sum whose truncation errors all have the same sign

struct Tile {
  double v[kDepth][kTile + 1];  // padded by one element, so that neighbours in a column lie in different banks
};

// Applies the epilogue to an element's sum of products, and adds the result to the sums over its column.
__device__ inline void finish(const ExpectParams& p, int64 batch, int64 row, int64 col, double (&sums)[3]) {
  const int64 at = (batch * p.rows + row) * p.cols + col;
  double product = p.d.values[at], error = p.d.limits[at];
  if (p.row_scales.data != nullptr) {
    const double scale = load(p.row_scales, 0, 0, row) * load(p.col_scales, 0, 0, col);
    product *= scale;
    error *= fabs(scale);
  }
  if (p.c.data != nullptr) product += load(p.c, batch, row, col);
  if (p.bias.data != nullptr) product += load(p.bias, batch, 0, col);
  error += p.addition * fabs(product);
  // If the product's error may change its sign, either bit of the mask is accepted.
  if (p.kept.values != nullptr && p.keeps_mask) {
    p.kept.values[at] = product > 0.0;
    p.kept.limits[at] = fabs(product) <= error;
  } else if (p.kept.values != nullptr) {
    store(p.kept, at, product, error, p.rounding);
  }
  const double inexact = p.approximation * fabs(product);
  double value = activated(product, p.activation), rounded = kSteepest * error;
  if (p.is_derivative) {
    const double saved = load(p.aux, batch, row, col), slope = p.activation == 2 ? gelu_derivative(saved) : saved;
    value = product * slope;
    rounded = error * fabs(slope);
  }
  store(p.d, at, value, rounded + inexact, p.rounding);
  const double off = rounded + p.rounding.unit * fabs(value);
  sums[0] += value;
  sums[1] += off * off;
  sums[2] += inexact + kBiased * fabs(value);
}

}  // namespace lt

// A block computes a tile of D, a thread every sixteenth of its rows and columns. The error limit of a sum of products
// is proportional to the norm of A's row times that of B's column, which by the Cauchy-Schwarz inequality is at least
// the sum of the products' magnitudes.
extern "C" __global__ void __launch_bounds__(256, 2) expect(const __grid_constant__ lt::ExpectParams p) {
  using namespace lt;
  __shared__ Tile tiles[3];
  Tile &a = tiles[0], &b = tiles[1];
  const unsigned down_tiles = static_cast<unsigned>((p.rows + kTile - 1) / kTile), tile_row = blockIdx.x % down_tiles;
  const int64 batch = blockIdx.z, first_row = static_cast<int64>(tile_row) * kTile;
  const int64 first_col = static_cast<int64>(blockIdx.x / down_tiles) * kTile;
  const int across = threadIdx.x % kSide, down = threadIdx.x / kSide;
  double products[kEach][kEach] = {}, a_squares[kEach] = {}, b_squares[kEach] = {};
  wait_for_predecessor();
  for (int64 first = 0; first < p.depth; first += kDepth) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kTile * kDepth; i += kSide * kSide) {
      const int64 row = first_row + i / kDepth, col = first_col + i % kTile;
      const int64 a_term = first + i % kDepth, b_term = first + i / kTile;
      a.v[i % kDepth][i / kDepth] = row < p.rows && a_term < p.depth ? load(p.a, batch, row, a_term) : 0.0;
      b.v[i / kTile][i % kTile] = col < p.cols && b_term < p.depth ? load(p.b, batch, b_term, col) : 0.0;
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < kDepth; ++k) {
      double x[kEach], y[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        x[i] = a.v[k][down + kSide * i];
        y[i] = b.v[k][across + kSide * i];
        a_squares[i] += x[i] * x[i];
        b_squares[i] += y[i] * y[i];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) products[i][j] += x[i] * y[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64 row = first_row + down + kSide * i, col = first_col + across + kSide * j;
      if (row >= p.rows || col >= p.cols) continue;
      const int64 at = (batch * p.rows + row) * p.cols + col;
      p.d.values[at] = products[i][j];
      p.d.limits[at] = p.accumulation * sqrt(a_squares[i] * b_squares[j]);
    }
  }
#pragma unroll 1
  for (int j = across; j < kTile; j += kSide) {
    double sums[3] = {};
#pragma unroll 1
    for (int i = down; i < kTile; i += kSide) {
      if (first_row + i < p.rows && first_col + j < p.cols) finish(p, batch, first_row + i, first_col + j, sums);
    }
    for (int which = 0; which < 3; ++which) tiles[which].v[down][j] = sums[which];
  }
  __syncthreads();
  const int64 col = first_col + threadIdx.x;
  if (p.sums == nullptr || threadIdx.x >= kTile || col >= p.cols) return;
  for (int which = 0; which < 3; ++which) {
    double sum = 0.0;
    for (int row = 0; row < kSide; ++row) sum += tiles[which].v[row][threadIdx.x];
    p.sums[(3 * static_cast<int64>(tile_row) + which) * p.cols + col] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(256) compare(const __grid_constant__ lt::CompareParams p) {
  using namespace lt;
  __shared__ Comparison found[256];
  Comparison own = {0, ~0ull, 0.0, 0.0};
  wait_for_predecessor();
  const int64 size = p.batch * p.rows * p.cols;
  for (int64 at = blockIdx.x * 256ll + threadIdx.x; at < size; at += gridDim.x * 256ll) {
    const int64 line = at / p.cols, col = at % p.cols, batch = line / p.rows, row = line % p.rows;
    const double wanted = p.wanted.data != nullptr ? load(p.wanted, batch, row, col) : p.constant;
    const double error = fabs(load(p.found, batch, row, col) - wanted);
    const double limit = p.limits != nullptr ? p.limits[at] : p.limit + p.relative * fabs(wanted);
    own.error_squares += error * error;
    own.wanted_squares += wanted * wanted;
    if (error <= limit) continue;  // the comparison is false, so that the element is counted, if the error is NaN
    if (own.bad++ == 0) own.first = at;
  }
  found[threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < 256; ++i) {
    own.bad += found[i].bad;
    if (found[i].first < own.first) own.first = found[i].first;
    own.error_squares += found[i].error_squares;
    own.wanted_squares += found[i].wanted_squares;
  }
  p.parts[blockIdx.x] = own;
}
