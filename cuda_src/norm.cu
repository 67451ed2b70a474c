// Layer normalisation and root-mean-square normalisation of the rows of a matrix, and their gradients.
//
// Compiled for:
//   SCALAR            the type of all matrices
//   WEIGHT            the type of weight and bias, and of their gradients
//   MEAN              1 for LayerNorm, which subtracts the mean of a row; 0 for RMSNorm, which has no bias
//   ALIGNED           0 for any layout; 1 if every row of every operand is whole octets and begins at a multiple of 16 bytes
//   LONG              1 if the registers of a block may not hold a row, which is then read twice
//   FORWARD_THREADS   most threads of a block of norm_fwd
//   BACKWARD_THREADS  most threads of a block of norm_bwd
//
// A block has blockDim.y rows at a time, and blockDim.x threads for each row: a power of two up to a warp, or whole warps. A
// thread has one octet in each 8 · blockDim.x columns. The block goes on to later rows. A thread loads its octets of the next row
// while it computes, if they are aligned 16-bit numbers: there are registers for them.
//
// A result may lie where an operand lies, because the thread that writes an element is the only one that reads it. So nothing
// here may promise the compiler that operands do not overlap or are only read (`__restrict__`, `__ldg`).

#include "column_sum.cuh"
#include "instructions.cuh"

namespace lt {

constexpr bool kPacked = ALIGNED && sizeof(SCALAR) == 2;  // whether an octet takes four registers and not eight
constexpr bool kAhead = kPacked && !LONG;
// Octets of a row that a thread holds; lt_runtime/kernels/norm.py has the same numbers.
constexpr int kForwardOctets = 2, kBackwardOctets = kPacked && LONG ? 4 : 2;
// Launch bounds: blocks that a multiprocessor shall hold. A thread has 128 registers, and 64 in a forward pass over aligned rows that are not long.
constexpr int kForwardBlocks = (ALIGNED && !LONG ? 1024 : 512) / FORWARD_THREADS, kBackwardBlocks = 512 / BACKWARD_THREADS;
constexpr int kSums = 1 + MEAN;  // numbers that are summed up for each row; gradients that are summed up for each column

struct NormFwdParams {
  Matrix x;
  Matrix add;    // what is added to x before the normalisation; null for nothing
  Matrix total;  // the sum of x and `add`, rounded, which is normalised; null without `add`
  Matrix out;
  const WEIGHT* weight;
  const WEIGHT* bias;  // null for none
  float* mean;         // (rows); not written if MEAN is 0
  float* rstd;         // (rows) reciprocals of standard deviations, or of root mean squares
  int64 rows;
  int64 cols;
  float eps;
};

struct NormBwdParams {
  Matrix dy;
  Matrix x;
  Matrix add;  // what is added to dx; null for nothing
  Matrix dx;   // null if it is not wanted
  const WEIGHT* weight;
  const float* mean;  // (rows); not read if MEAN is 0
  const float* rstd;  // (rows)
  float* partial;     // (gridDim.x, kSums, pitch) sums over each block's rows; null if none is wanted
  int64 rows;
  int64 cols;
  int64 pitch;     // columns, up to a multiple of the columns that a block's threads hold
  int holds_sums;  // whether shared memory has room for the column sums of LONG rows
};

struct NormSumsParams {
  const float* partial;
  WEIGHT* dweight;  // null if it is not wanted
  WEIGHT* dbias;    // null if it is not wanted
  int64 parts;
  int64 cols;
  int64 pitch;
  int accumulate;
};

#if ALIGNED
template <class T>
struct Access : Aligned<T> {
  static __device__ Packed<T> rounded(const Octet& octet) { return pack<T>(octet); }
};
#else
template <class T>
struct Access : Scattered<T> {
  static __device__ Octet rounded(const Octet& octet) { return unpack(pack<T>(octet)); }
};
#endif

// A thread's octets of a row; `part` counts the pieces of a row that registers hold at a time.
template <int kOctets>
struct Place {
  int64 row;
  int64 first;  // column of the first octet
  int64 cols;   // 0 if the row does not exist

  template <class Params>
  __device__ Place(const Params& p, int64 row_, int64 part)
      : row(row_), first(part * width() + threadIdx.x * kOctet), cols(row_ < p.rows ? p.cols : 0) {}

  // Columns of a part.
  static __device__ int64 width() { return static_cast<int64>(kOctets * kOctet) * blockDim.x; }
  __device__ int64 col(int k) const { return first + static_cast<int64>(k * kOctet) * blockDim.x; }
  __device__ int count(int k) const { return octet_count(col(k), cols); }
};

// A thread's octets as they were loaded. Elements beyond the last column or row are zeros.
template <class T, int kOctets>
struct Held {
  typename Access<T>::Raw raw[kOctets];

  __device__ void load(const Matrix& m, const Place<kOctets>& at) {
#pragma unroll
    for (int k = 0; k < kOctets; ++k) {
      raw[k] = {};
      if (at.count(k)) raw[k] = Access<T>::load(element<T>(m, at.row, at.col(k)), m.col_stride, at.count(k));
    }
  }
  __device__ Octet operator[](int k) const { return unpack(raw[k]); }
};

__device__ inline void store_octet(const Matrix& m, int64 row, int64 col, int count, const Octet& octet) {
  Access<SCALAR>::store(element<SCALAR>(m, row, col), m.col_stride, count, octet);
}

__device__ inline Octet load_vector(const WEIGHT* vector, int64 col, int count) {
  return unpack(Access<WEIGHT>::load(vector + col, 1, count));
}

// Adds up numbers over the threads of a row; all get the sums. `turn` alternates between two halves of the shared memory, so that
// one barrier suffices: a warp may write its next numbers while another warp still reads these.
template <int kCount>
__device__ inline void sum_over_row(float (&values)[kCount], uint32& turn) {
  __shared__ float scratch[2][kCount][kMaxWarps];
  const uint32 lanes = blockDim.x, first = threadIdx.y * lanes / kWarp;
#pragma unroll
  for (uint32 step = kWarp / 2; step > 0; step /= 2) {
    if (step >= lanes) continue;
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] += __shfl_xor_sync(0xFFFFFFFF, values[j], step);
  }
  if (lanes <= kWarp) return;
  turn ^= 1;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (threadIdx.x % kWarp == 0) scratch[turn][j][first + threadIdx.x / kWarp] = values[j];
    values[j] = 0.0f;
  }
  __syncthreads();
  for (uint32 warp = first; warp < first + lanes / kWarp; ++warp) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] += scratch[turn][j][warp];
  }
}

using ForwardPlace = Place<kForwardOctets>;
struct ForwardRow {
  Held<SCALAR, kForwardOctets> x, added;

  __device__ void load(const NormFwdParams& p, const ForwardPlace& at) {
    x.load(p.x, at);
    if (p.add.data) added.load(p.add, at);
  }

  // Adds up both operands, and writes the sum.
  __device__ void add(const NormFwdParams& p, const ForwardPlace& at) {
#pragma unroll
    for (int k = 0; k < kForwardOctets; ++k) {
      if (!at.count(k)) continue;
      Octet total = x[k];
      total += added[k];
      x.raw[k] = Access<SCALAR>::rounded(total);
      store_octet(p.total, at.row, at.col(k), at.count(k), total);
    }
  }

  // The mean of the row's first part.
  __device__ float mean(const NormFwdParams& p, uint32& turn) const {
    float sum[1] = {};
#pragma unroll
    for (int k = 0; k < kForwardOctets; ++k) {
      const Octet octet = x[k];
#pragma unroll
      for (int i = 0; i < kOctet; ++i) sum[0] += octet.v[i];
    }
    sum_over_row(sum, turn);
    const int64 width = ForwardPlace::width();
    return sum[0] / static_cast<float>(p.cols < width ? p.cols : width);
  }

  // Adds to the sums of squares, and of the differences themselves, of elements to `shift`.
  __device__ void accumulate(float (&sums)[kSums], float shift, const ForwardPlace& at) const {
#pragma unroll
    for (int k = 0; k < kForwardOctets; ++k) {
      const Octet octet = x[k];
      const int count = at.count(k);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float difference = (ALIGNED ? count > 0 : i < count) ? octet.v[i] - shift : 0.0f;
        sums[0] += difference * difference;
        if (MEAN) sums[MEAN] += difference;
      }
    }
  }
};

using BackwardPlace = Place<kBackwardOctets>;
struct BackwardRow {
  Held<SCALAR, kBackwardOctets> dy, x;
  float mean;
  float rstd;

  __device__ void load(const NormBwdParams& p, const BackwardPlace& at) {
    dy.load(p.dy, at);
    x.load(p.x, at);
    mean = MEAN && at.cols ? p.mean[at.row] : 0.0f;
    rstd = at.cols ? p.rstd[at.row] : 0.0f;
  }
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, lt::kForwardBlocks) norm_fwd(const lt::NormFwdParams p) {
  using namespace lt;
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.y, last = LONG ? (p.cols - 1) / ForwardPlace::width() : 0;
  uint32 turn = 0;
  ForwardRow now, next;
  wait_for_predecessor();
  int64 base = static_cast<int64>(blockIdx.x) * blockDim.y;
  if (kAhead) next.load(p, ForwardPlace(p, base + threadIdx.y, 0));
  for (; base < p.rows; base += step) {
    const int64 row = base + threadIdx.y;
    if (kAhead) {
      now = next;
      next.load(p, ForwardPlace(p, row + step, 0));
    }
    // The variance is computed from differences to the mean of the columns that are read first, so that no digits cancel.
    float shift = 0.0f, sums[kSums] = {};
    for (int64 part = 0; part <= last; ++part) {
      const ForwardPlace at(p, row, part);
      if (!kAhead) now.load(p, at);
      if (p.add.data) now.add(p, at);
      if (MEAN && part == 0) shift = now.mean(p, turn);
      now.accumulate(sums, shift, at);
    }
    sum_over_row(sums, turn);
    const float n = static_cast<float>(p.cols), offset = MEAN ? sums[MEAN] / n : 0.0f, mean = shift + offset;
    const float variance = sums[0] / n - offset * offset;
    const float rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + p.eps);
    if (threadIdx.x == 0 && row < p.rows) {
      if (MEAN) p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
    for (int64 part = last; part >= 0; --part) {
      const ForwardPlace at(p, row, part);
      if (part < last) now.x.load(p.add.data ? p.total : p.x, at);
#pragma unroll
      for (int k = 0; k < kForwardOctets; ++k) {
        const int count = at.count(k);
        if (!count) continue;
        Octet y = now.x[k];
        const Octet weight = load_vector(p.weight, at.col(k), count);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) y.v[i] = (y.v[i] - mean) * rstd * weight.v[i];
        if (MEAN && p.bias) y += load_vector(p.bias, at.col(k), count);
        store_octet(p.out, row, at.col(k), count, y);
      }
    }
  }
}

// dx = rstd · (g - mean(g) - n · mean(g · n)), where g is dy · weight and n the normalised row; RMSNorm has no mean(g).
extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, lt::kBackwardBlocks) norm_bwd(const lt::NormBwdParams p) {
  using namespace lt;
  DYNAMIC_SHARED(float4, memory);
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.y, last = LONG ? (p.cols - 1) / BackwardPlace::width() : 0;
  float* const partial = p.partial ? p.partial + blockIdx.x * kSums * p.pitch : nullptr;
  // The column sums of LONG rows. Each thread alone reads and writes the columns of its octets.
  float* const long_sums = p.holds_sums ? &memory->x : partial;
  const int64 own = threadIdx.x * kOctet, own_step = static_cast<int64>(kOctet) * blockDim.x;
  Octet sums[kSums][LONG ? 1 : kBackwardOctets] = {};
  uint32 turn = 0;
  BackwardRow now, next;
  Held<SCALAR, kBackwardOctets> added;
  wait_for_predecessor();
  if (LONG && partial) {
    for (int64 at = own; at < kSums * p.pitch; at += own_step) store_packed(long_sums + at, Packed<float>{});
  }
  int64 base = static_cast<int64>(blockIdx.x) * blockDim.y;
  if (kAhead) next.load(p, BackwardPlace(p, base + threadIdx.y, 0));
  for (; base < p.rows; base += step) {
    const int64 row = base + threadIdx.y;
    if (kAhead) {
      now = next;
      next.load(p, BackwardPlace(p, row + step, 0));
    }
    float means[kSums] = {};
    for (int64 part = 0; part <= last; ++part) {
      const BackwardPlace at(p, row, part);
      if (!kAhead) now.load(p, at);
      if (!LONG && p.add.data) added.load(p.add, at);
#pragma unroll
      for (int k = 0; k < kBackwardOctets; ++k) {
        const int count = at.count(k);
        if (!count) continue;
        const Octet dy = now.dy[k], weight = load_vector(p.weight, at.col(k), count);
        Octet terms[2] = {now.x[k], dy};
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          const float normalised = (terms[0].v[i] - now.mean) * now.rstd, g = dy.v[i] * weight.v[i];
          means[0] += g * normalised;
          if (MEAN) means[MEAN] += g;
          terms[0].v[i] = dy.v[i] * normalised;
        }
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
          if (!LONG) {
            sums[j][k] += terms[j];
          } else if (partial) {
            float* const sum = long_sums + j * p.pitch + at.col(k);
            terms[j] += unpack(load_packed(sum));
            store_packed(sum, pack<float>(terms[j]));
          }
        }
      }
    }
    if (!p.dx.data) continue;
    sum_over_row(means, turn);
#pragma unroll
    for (int j = 0; j < kSums; ++j) means[j] /= static_cast<float>(p.cols);
    for (int64 part = last; part >= 0; --part) {
      const BackwardPlace at(p, row, part);
      if (part < last) now.load(p, at);
      if (LONG && p.add.data) added.load(p.add, at);
#pragma unroll
      for (int k = 0; k < kBackwardOctets; ++k) {
        const int count = at.count(k);
        if (!count) continue;
        const Octet x = now.x[k], weight = load_vector(p.weight, at.col(k), count);
        Octet dx = now.dy[k];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          const float normalised = (x.v[i] - now.mean) * now.rstd, centre = MEAN ? means[MEAN] : 0.0f;
          dx.v[i] = now.rstd * (dx.v[i] * weight.v[i] - centre - normalised * means[0]);
        }
        if (p.add.data) dx += added[k];
        store_octet(p.dx, row, at.col(k), count, dx);
      }
    }
  }
  if (!partial) return;
  if (LONG) {
    for (int64 at = own; p.holds_sums && at < kSums * p.pitch; at += own_step) {
      store_packed(partial + at, load_packed(long_sums + at));
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
#pragma unroll
    for (int k = 0; k < (LONG ? 1 : kBackwardOctets); ++k) {
      float* const part = partial + j * p.pitch + k * own_step;
      if (blockDim.y == 1) {
        store_packed(part + own, pack<float>(sums[j][k]));
      } else {
        __syncthreads();
        sum_over_block(sums[j][k], [&](int column, float sum) { part[column] = sum; });
      }
    }
  }
}

// Adds up the sums of norm_bwd's blocks, in their order. A second launch is faster than a last block, which would add up some
// megabytes alone. gridDim.y is kSums.
extern "C" __global__ void __launch_bounds__(256) norm_sums(const lt::NormSumsParams p) {
  using namespace lt;
  wait_for_predecessor();
  const ColumnSum<WEIGHT> result{blockIdx.y ? p.dbias : p.dweight, nullptr, nullptr, p.accumulate};
  if (!result.sum) return;
  const int64 first = static_cast<int64>(kOctet) * blockDim.x * blockIdx.x, col = first + threadIdx.x * kOctet;
  Octet total{};
#pragma unroll 4
  for (int64 part = threadIdx.y; part < (col < p.pitch ? p.parts : 0); part += blockDim.y) {
    total += unpack(load_packed(p.partial + (part * gridDim.y + blockIdx.y) * p.pitch + col));
  }
  sum_over_block(total, [&](int column, float sum) { store_sum(result, first + column, p.cols, sum); });
}
