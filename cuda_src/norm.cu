// Layer normalisation and root-mean-square normalisation of the rows of a matrix, and their gradients.
//
// Compiled for:
//   SCALAR            the type of all matrices
//   WEIGHT            the type of weight and bias, and of their gradients
//   MEAN              1 for LayerNorm, which subtracts the mean of a row; 0 for RMSNorm, which has no bias
//   ALIGNED           see sweep.cuh: 0 or 1
//   LONG              1 if a row may be too long for the registers of a block; it is then read twice
//   FORWARD_THREADS   largest number of threads of a block of norm_fwd
//   BACKWARD_THREADS  largest number of threads of a block of norm_bwd
//
// A block computes blockDim.y rows at a time, each by blockDim.x threads: a power of two up to a warp, or whole warps.
// A thread holds one octet of each 8 · blockDim.x columns. A block of norm_fwd computes these rows only: while it waits
// for sums over threads, the multiprocessor runs other blocks. A block of norm_bwd loops over further rows, because it
// adds up the gradients of weight and bias over them. If the elements are aligned and have 16 bits, its threads copy
// their octets of the next row to shared memory while they compute.
//
// A result may overwrite an operand, because the thread that writes an element is the only one that reads it. So this
// file must not promise the compiler, by `__restrict__` or `__ldg`, that operands do not overlap or are only read.

#include "column_sum.cuh"
#include "sweep.cuh"

namespace lt {

constexpr bool kShort = ALIGNED && sizeof(SCALAR) == 2, kAhead = kShort && !LONG;
// Octets of a row that a thread holds; lt_runtime/kernels/norm.py has the same constants. With four, norm_fwd needs
// half as many instructions for each element, for addresses and sums over threads, as with two.
constexpr int kForwardOctets = ALIGNED ? 4 : 2, kBackwardOctets = kShort && LONG ? 4 : 2;
// True if LayerNorm corrects the mean by the average difference to it, which removes the rounding error of the first
// sum. For 16-bit elements that error is far below their own rounding, so that only long rows, whose first mean is that
// of a part of the row, are corrected.
constexpr bool kCorrects = MEAN && (LONG || sizeof(SCALAR) == 4);
// Number of sums that norm_bwd makes over each row, and over each column: for the weight and the bias gradient.
constexpr int kSums = 1 + MEAN;
// Launch bounds: blocks that a multiprocessor must hold. They leave a thread 128 registers; in norm_fwd 64 if the
// elements are aligned and have 16 bits, and as many as it needs if rows are LONG.
constexpr int kForwardBlocks = LONG ? 1 : (kShort ? 1024 : 512) / FORWARD_THREADS, kBackwardBlocks = 512 / BACKWARD_THREADS;

#if LONG
using Index = int64;  // the type of a column's index, or of a number of columns
#else
using Index = int;
#endif

struct NormFwdParams {
  Matrix x;
  Matrix add;    // addend of x before the normalisation, such as the residual stream; may be null
  Matrix total;  // the sum of x and `add`, rounded, which is normalised; null without `add`
  Matrix out;
  const WEIGHT* weight;
  const WEIGHT* bias;  // the bias of a LayerNorm; null if there is none
  float* mean;         // (rows); not written if MEAN is 0
  float* rstd;         // (rows) reciprocals of standard deviations, or of root mean squares
  int64 rows;
  int64 cols;
  float eps;
};

struct NormBwdParams {
  Matrix dy;
  Matrix x;
  Matrix add;  // addend of dx; may be null
  Matrix dx;   // the gradient of x; its data is null if the gradient is not wanted
  const WEIGHT* weight;
  const float* mean;  // (rows) means of the rows of x; not read if MEAN is 0
  const float* rstd;  // (rows) reciprocal standard deviations, or reciprocal root mean squares if MEAN is 0
  float* partial;     // (gridDim.x, kSums, pitch) sums over each block's rows; null if none is wanted
  int64 rows;
  int64 cols;
  int64 pitch;     // columns, up to a multiple of the columns that a block's threads hold
  int holds_sums;  // whether shared memory has room for the column sums of LONG rows
};

struct NormSumsParams {
  const float* partial;
  WEIGHT* dweight;  // the gradient of the weight; null if it is not wanted
  WEIGHT* dbias;    // the gradient of the bias; null if it is not wanted
  int64 parts;
  int64 cols;
  int64 pitch;
  int accumulate;
};

// Converts each BF16 number by one instruction. The function of the CUDA header takes two instructions for the second
// number of a word.
__device__ inline Octet unpack(const Packed<__nv_bfloat16>& packed) {
  uint32 words[kOctet / 2];
  memcpy(words, &packed, sizeof(words));
  Octet out;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out.v[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000 : words[i / 2] << 16);
  return out;
}

// Position of a thread's octets in one part of a row; a part is as many columns as the registers of a row's threads
// hold.
template <int kOctets>
struct Place {
  int64 row;
  Index first;  // column of the thread's first octet
  Index cols;   // number of the matrix's columns; 0 if the row does not exist

  template <class Params>
  __device__ Place(const Params& p, int64 row_, Index part)
      : row(row_), first(part * width() + threadIdx.x * kOctet), cols(row_ < p.rows ? static_cast<Index>(p.cols) : 0) {}

  // Number of columns of a part: of the columns whose octets a block's threads hold at a time.
  static __device__ Index width() { return static_cast<Index>(kOctets * kOctet) * blockDim.x; }
  // Index of the last part of a row.
  static __device__ Index last(int64 cols) { return LONG ? (cols - 1) / width() : 0; }
  __device__ Index col(int k) const { return first + static_cast<Index>(k * kOctet) * blockDim.x; }
  __device__ bool has(int k) const { return col(k) < cols; }
  // Number of elements of octet `k`, given that `has(k)`.
  __device__ int count(int k) const { return ALIGNED ? kOctet : octet_count(col(k), cols); }

  // Calls `use(k)` for each octet that has elements.
  template <class Use>
  __device__ void each(Use use) const {
#pragma unroll
    for (int k = 0; k < kOctets; ++k) {
      if (has(k)) use(k);
    }
  }
  // The address of octet `k` in a row that begins at `data`. Aligned rows have a column stride of 1.
  template <class T>
  __device__ T* element(T* data, int64 col_stride, int k) const {
    return data + (ALIGNED ? col(k) : col(k) * col_stride);
  }
  __device__ Octet load(const WEIGHT* vector, int k) const {
    return unpack(Access<WEIGHT>::load(element(vector, 1, k), 1, count(k)));
  }
  __device__ void store(const Matrix& m, int k, const Octet& octet) const {
    SCALAR* const data = lt::element<SCALAR>(m, row, 0);
    Access<SCALAR>::store(element(data, m.col_stride, k), m.col_stride, count(k), octet);
  }
};

// A thread's octets of one row of a matrix, or of a vector, in registers. Elements beyond the last column or row are
// zeros.
template <class T, int kOctets>
struct Held {
  typename Access<T>::Raw raw[kOctets];

  __device__ void load(const T* data, int64 col_stride, const Place<kOctets>& at) {
    for (auto& each : raw) each = {};
    at.each([&](int k) { raw[k] = Access<T>::load(at.element(data, col_stride, k), col_stride, at.count(k)); });
  }
  __device__ void load(const Matrix& m, const Place<kOctets>& at) { load(element<T>(m, at.row, 0), m.col_stride, at); }
  __device__ Octet operator[](int k) const { return unpack(raw[k]); }
  // Replaces octet `k` by the numbers of `octet`, rounded to T.
  __device__ void round(int k, const Octet& octet) {
    if constexpr (ALIGNED) {
      raw[k] = pack<T>(octet);
    } else {
      raw[k] = unpack(pack<T>(octet));
    }
  }
};

using Forward = Place<kForwardOctets>;
using Backward = Place<kBackwardOctets>;

struct Statistics {
  float mean, rstd;

  __device__ void load(const NormBwdParams& p, const Backward& at) {
    mean = MEAN && at.cols ? p.mean[at.row] : 0.0f;
    rstd = at.cols ? p.rstd[at.row] : 0.0f;
  }
};

// A thread's octets of one row of x and of dy, with the row's mean and reciprocal standard deviation.
struct Row : Statistics {
  Held<SCALAR, kBackwardOctets> x, dy;

  __device__ void load(const NormBwdParams& p, const Backward& at) {
    x.load(p.x, at);
    dy.load(p.dy, at);
    Statistics::load(p, at);
  }
};

// Prefetches the next row of x and dy into shared memory by asynchronous copies. A thread copies the octets that it
// will itself read, so that no barrier is needed.
struct Ahead : Statistics {
  using Raw = Access<SCALAR>::Raw;

  Raw* const own;
  const int threads;
  int slot = 0;  // number of the slot, of two in shared memory, that the latest copy does not write

  __device__ explicit Ahead(float4* memory)
      : own(reinterpret_cast<Raw*>(memory) + threadIdx.y * blockDim.x + threadIdx.x),
        threads(static_cast<int>(blockDim.x * blockDim.y)) {}

  __device__ Raw& octet(int operand, int k) const { return own[((2 * slot + operand) * kBackwardOctets + k) * threads]; }
  __device__ void copy(const Matrix& m, int operand, const Backward& at) const {
    const SCALAR* const data = element<SCALAR>(m, at.row, 0);
    at.each([&](int k) { copy_async(&octet(operand, k), at.element(data, 1, k)); });
  }
  __device__ void begin(const NormBwdParams& p, const Backward& at) {
    copy(p.x, 0, at);
    copy(p.dy, 1, at);
    end_copies();
    slot ^= 1;
    load(p, at);
  }
  // Waits for the row in `slot`, while the copy of the row after it may go on.
  __device__ void take(Row& row) const {
    wait_for_copies<1>();
#pragma unroll
    for (int k = 0; k < kBackwardOctets; ++k) row.x.raw[k] = octet(0, k), row.dy.raw[k] = octet(1, k);
  }
};

// Adds up each value over groups of min(kLanes, lanes) lanes; all lanes get the sums of their group.
template <int kLanes, int kCount>
__device__ inline void sum_over_lanes(float (&values)[kCount], uint32 lanes) {
#pragma unroll
  for (float& value : values) {
#pragma unroll
    for (uint32 step = kLanes / 2; step > 0; step /= 2) {
      // Steps of `lanes` or more shuffle too and drop the result: a branch around the shuffle took longer than it.
      const float other = __shfl_xor_sync(0xFFFFFFFF, value, step);
      if (step < lanes) value += other;
    }
  }
}

// Adds up each value over the threads of a row, in a block of at most `kThreads`. `turn` alternates between two halves
// of the shared memory, so that one barrier suffices: a warp may write values of the next call while another warp still
// reads those of this call.
template <int kThreads, int kCount>
__device__ inline void sum_over_row(float (&values)[kCount], uint32& turn) {
  constexpr uint32 kWarps = kThreads / kWarp;
  __shared__ float scratch[2][kCount][kWarps];
  sum_over_lanes<kWarp>(values, blockDim.x);
  if (blockDim.x <= kWarp) return;
  const uint32 warps = blockDim.x / kWarp, first = threadIdx.y * warps, one = threadIdx.x % kWarps;
  turn ^= 1;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (threadIdx.x % kWarp == 0) scratch[turn][j][first + threadIdx.x / kWarp] = values[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = one < warps ? scratch[turn][j][first + one] : 0.0f;
  sum_over_lanes<kWarps>(values, kWarps);
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, lt::kForwardBlocks) norm_fwd(const lt::NormFwdParams p) {
  using namespace lt;
  const int64 row = static_cast<int64>(blockIdx.x) * blockDim.y + threadIdx.y;
  const Index last = Forward::last(p.cols);
  const float share = 1.0f / static_cast<float>(p.cols);
  uint32 turn = 0;
  float shift = 0.0f, sums[1 + kCorrects] = {};
  Octet x[kForwardOctets];  // the row's elements; after the first sum, their differences to `shift`
  wait_for_predecessor();
  const auto load = [&](const Matrix& m, const Forward& at, bool adds) {  // `adds`: whether p.add is added and the sum stored
    Held<SCALAR, kForwardOctets> now, other;
    now.load(m, at);
    if (adds) {
      other.load(p.add, at);
      at.each([&](int k) {
        Octet total = now[k];
        total += other[k];
        at.store(p.total, k, total);
        now.round(k, total);
      });
    }
#pragma unroll
    for (int k = 0; k < kForwardOctets; ++k) x[k] = now[k];
  };
  const auto subtract = [&](const Forward& at) {
#pragma unroll
    for (int k = 0; k < kForwardOctets; ++k) {
      const float mean = at.has(k) ? shift : 0.0f;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) x[k].v[i] -= ALIGNED || i < at.count(k) ? mean : 0.0f;
    }
  };
  // LayerNorm computes the variance from differences to the mean: in the difference between mean square and squared
  // mean, leading digits would cancel. In a long row the differences are taken to the mean of its first part, and the
  // sum of the differences corrects mean and variance.
#pragma unroll 1
  for (Index part = 0; part <= last; ++part) {
    const Forward at(p, row, part);
    load(p.x, at, p.add.data);
    if (MEAN && part == 0) {
      float total[1] = {};
#pragma unroll
      for (int i = 0; i < kForwardOctets * kOctet; ++i) total[0] += x[i / kOctet].v[i % kOctet];
      sum_over_row<FORWARD_THREADS>(total, turn);
      shift = total[0] / static_cast<float>(last ? Forward::width() : static_cast<Index>(p.cols));
    }
    if (MEAN) subtract(at);
#pragma unroll
    for (int i = 0; i < kForwardOctets * kOctet; ++i) {
      const float each = x[i / kOctet].v[i % kOctet];
      sums[0] += each * each;
      if (kCorrects) sums[kCorrects] += each;
    }
  }
  sum_over_row<FORWARD_THREADS>(sums, turn);
  const float offset = kCorrects ? sums[kCorrects] * share : 0.0f, variance = sums[0] * share - offset * offset;
  const float rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + p.eps);
  if (threadIdx.x == 0 && row < p.rows) {
    if (MEAN) p.mean[row] = shift + offset;
    p.rstd[row] = rstd;
  }
#pragma unroll 1
  for (Index part = last; part >= 0; --part) {
    const Forward at(p, row, part);
    if (part < last) {
      load(p.add.data ? p.total : p.x, at, false);
      if (MEAN) subtract(at);
    }
    at.each([&](int k) {
      const Octet factors = at.load(p.weight, k), terms = MEAN && p.bias ? at.load(p.bias, k) : Octet{};
      Octet y;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) y.v[i] = (x[k].v[i] - offset) * rstd * factors.v[i] + terms.v[i];
      at.store(p.out, k, y);
    });
  }
}

// dx = rstd · (g - mean(g) - n · mean(g · n)), where g is dy · weight and n the normalised row; RMSNorm has no mean(g).
extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, lt::kBackwardBlocks) norm_bwd(const lt::NormBwdParams p) {
  using namespace lt;
  DYNAMIC_SHARED(float4, memory);
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.y;
  const Index last = Backward::last(p.cols);
  float* const partial = p.partial ? p.partial + blockIdx.x * kSums * p.pitch : nullptr;
  // The column sums of LONG rows, in shared memory if it has room, otherwise in global memory. A thread reads and
  // writes only the columns of its own octets, so that no barrier is needed.
  float* const long_sums = p.holds_sums ? &memory->x : partial;
  const int64 own = threadIdx.x * kOctet, own_step = static_cast<int64>(kOctet) * blockDim.x;
  const int64 end = LONG && partial ? kSums * p.pitch : 0;
  const float share = 1.0f / static_cast<float>(p.cols);
  Octet sums[kSums][kBackwardOctets] = {};
  uint32 turn = 0;
  Row now;
  Held<SCALAR, kBackwardOctets> added;
  Held<WEIGHT, kBackwardOctets> weights;
  Ahead ahead(memory);
  wait_for_predecessor();
  const auto weighted = [&](const Backward& at, int k) {
    const Octet weight = kAhead ? weights[k] : at.load(p.weight, k);
    Octet g = now.dy[k];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) g.v[i] *= weight.v[i];
    return g;
  };
  if (kAhead) weights.load(p.weight, 1, Backward(p, 0, 0));
  for (int64 at = own; at < end; at += own_step) store_packed(long_sums + at, Packed<float>{});
  int64 row = static_cast<int64>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (kAhead) ahead.begin(p, Backward(p, row, 0));
  for (; row - threadIdx.y < p.rows; row += step) {
    if (kAhead) {
      now.mean = ahead.mean, now.rstd = ahead.rstd;
      ahead.begin(p, Backward(p, row + step, 0));
      ahead.take(now);
    }
    float means[kSums] = {};
    Octet g[kBackwardOctets];  // dy times the weight; kept to compute dx unless rows are LONG
#pragma unroll 1
    for (Index part = 0; part <= last; ++part) {
      const Backward at(p, row, part);
      if (!kAhead) now.load(p, at);
      if (!LONG && p.add.data) added.load(p.add, at);
      at.each([&](int k) {
        g[k] = weighted(at, k);
        Octet terms[2] = {now.x[k], now.dy[k]};
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          const float normalised = (terms[0].v[i] - now.mean) * now.rstd;
          means[0] += g[k].v[i] * normalised;
          if (MEAN) means[MEAN] += g[k].v[i];
          terms[0].v[i] = terms[1].v[i] * normalised;
        }
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
          if (!LONG) sums[j][k] += terms[j];
          if (!end) continue;
          float* const sum = long_sums + j * p.pitch + at.col(k);
          terms[j] += unpack(load_packed(sum));
          store_packed(sum, pack<float>(terms[j]));
        }
      });
    }
    if (!p.dx.data) continue;
    sum_over_row<BACKWARD_THREADS>(means, turn);
    const float scale = -now.rstd * share, slope = scale * now.rstd * means[0], constant = MEAN ? scale * means[MEAN] : 0.0f;
#pragma unroll 1
    for (Index part = last; part >= 0; --part) {
      const Backward at(p, row, part);
      if (part < last) now.load(p, at);
      if (LONG && p.add.data) added.load(p.add, at);
      at.each([&](int k) {
        const Octet x = now.x[k];
        Octet dx = kAhead ? g[k] : weighted(at, k);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) dx.v[i] = now.rstd * dx.v[i] + (slope * (x.v[i] - now.mean) + constant);
        if (p.add.data) dx += added[k];
        at.store(p.dx, k, dx);
      });
    }
  }
  for (int64 at = own; p.holds_sums && at < end; at += own_step) store_packed(partial + at, load_packed(long_sums + at));
  if (LONG || !partial) return;
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
#pragma unroll
    for (int k = 0; k < kBackwardOctets; ++k) {
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

// Adds up the partial sums of norm_bwd's blocks, in order of the blocks, to the gradients of weight and bias. A second
// launch is faster than leaving this to the last block of norm_bwd, which would add up some megabytes alone. gridDim.y
// is kSums.
extern "C" __global__ void __launch_bounds__(256) norm_sums(const lt::NormSumsParams p) {
  using namespace lt;
  wait_for_predecessor();
  const ColumnSum<WEIGHT> result{blockIdx.y ? p.dbias : p.dweight, nullptr, nullptr, p.accumulate};
  if (!result.sum) return;
  const int64 first = static_cast<int64>(kOctet) * blockDim.x * blockIdx.x, col = first + threadIdx.x * kOctet;
  const int64 parts = col < p.pitch ? p.parts : 0;
  Octet total{};
#pragma unroll 4
  for (int64 part = threadIdx.y; part < parts; part += blockDim.y) {
    total += unpack(load_packed(p.partial + (part * gridDim.y + blockIdx.y) * p.pitch + col));
  }
  sum_over_block(total, [&](int column, float sum) { store_sum(result, first + column, p.cols, sum); });
}
