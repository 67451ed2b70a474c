// Matrix product with a small M (number of rows) and a large K, such as the weight gradient of an output layer: A·B,
// where A is passed as its transpose (K, M), and the sum of A over K, the bias gradient. A thread multiplies four
// columns of some rows of B by the same rows of Aᵀ. The threads' sums are added up over a warp, over a block, and over
// the blocks in y, which divide K among them. See narrow.cuh; ALIGNED states the alignment of B alone.
//
// blockDim.x, the number of threads side by side, is a power of two, at most 16. A block consists of whole warps.

#include "narrow.cuh"
#include "reduce.cuh"

namespace lt {

constexpr int kQuad = 4;
constexpr int kTerms = kQuad * WIDTH;  // number of sums that a thread keeps: four columns in each of D's rows
constexpr int kMaxSide = 16, kMostWarps = 8;  // largest blockDim.x, and most warps of a block
constexpr int kUnrolled = WIDTH == 16 ? 2 : 4;  // number of rows whose loads a thread has in flight together

struct Quad {
  float v[kQuad];
};

#if ALIGNED
__device__ inline Quad load_quad(const SCALAR* p, int) {
  const auto word = *reinterpret_cast<const WordOf<SCALAR>::Four*>(p);
  Pair<SCALAR>::Type pairs[kQuad / 2];
  memcpy(static_cast<void*>(pairs), &word, sizeof(word));
  const float2 low = Pair<SCALAR>::unpack(pairs[0]), high = Pair<SCALAR>::unpack(pairs[1]);
  return Quad{{low.x, low.y, high.x, high.y}};
}
#else
__device__ inline Quad load_quad(const SCALAR* p, int count) {
  Quad out;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) out.v[i] = i < count ? to_float(p[i]) : 0.0f;
  return out;
}
#endif

// The four columns of a thread. If the sum of A is wanted, B is extended by a column of ones, whose products are that
// sum.
struct Columns {
  int64 first;
  int count;  // how many of the thread's four columns exist
  int ones;   // which of the thread's four columns is all ones; negative if none is

  __device__ explicit Columns(const NarrowParams& p)
      : first((static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kQuad), count(0), ones(-1) {
    const int64 left = p.cols - first;
    if (left > 0) count = left < kQuad ? static_cast<int>(left) : kQuad;
    if (p.vector && left >= 0 && left < kQuad) ones = static_cast<int>(left);
  }

  __device__ Quad load(const SCALAR* row) const {
    Quad out{};
    if (count > 0) out = load_quad(row, count);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i == ones) out.v[i] = 1.0f;
    }
    return out;
  }
};

// Computes the calling thread's sums over its part of K. sums[4 · i + c] is the sum for row i of D and the thread's
// column c.
__device__ inline void multiply(float (&sums)[kTerms], const NarrowParams& p, const Columns& columns) {
  const int64 step = static_cast<int64>(gridDim.y) * blockDim.y;
  int64 k = static_cast<int64>(blockIdx.y) * blockDim.y + threadIdx.y;
  const SCALAR* a = element<SCALAR>(p.a, k, 0);
  const SCALAR* b = element<SCALAR>(p.b, k, columns.first);
#pragma unroll kUnrolled
  for (; k < p.depth; k += step) {
    const Quad x = columns.load(b);
    float z[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) z[i] = i < p.rows ? to_float(a[i]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kTerms; ++i) sums[i] += z[i / kQuad] * x.v[i % kQuad];
    a += step * p.a.row_stride;
    b += step * p.b.row_stride;
  }
}

// Adds up terms over the lanes of a warp that have the same columns. The indices of these lanes differ only in the bits
// `distance`, `distance` / 2, … blockDim.x, all powers of two. Calls `use(index, sum)` once for each term, in one of
// these lanes; terms[0] has the index `first`.
template <int kCount, class Use>
__device__ inline void sum_over_lanes(float* terms, int first, uint32 distance, Use use) {
  const uint32 lane = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp;
  if constexpr (kCount > 1) {
    if (distance >= blockDim.x) {
      const int half = add_half<kCount / 2>(terms, lane, distance) ? kCount / 2 : 0;
      sum_over_lanes<kCount / 2>(terms, first + half, distance / 2, use);
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) use(first + i, terms[i]);
  } else {
    // `alike` consecutive lanes form a group, in which terms[0] has the same index `first`. Lanes of a group whose
    // numbers are equal modulo blockDim.x hold parts of the same sum. After the additions below, each of them has the
    // whole sum, and the first blockDim.x lanes of the group pass theirs to `use`.
    const uint32 alike = distance ? 2 * distance : 1;
    const bool uses = lane % alike < blockDim.x;
    for (; distance >= blockDim.x; distance /= 2) *terms += __shfl_xor_sync(0xFFFFFFFF, *terms, distance);
    if (uses) use(first, *terms);
  }
}

// Returns the shared memory of `sum_over_block`; all sums of the kernel use the same memory.
__device__ inline float* shared_sums() {
  __shared__ float sums[kMostWarps * kMaxSide * kTerms];
  return sums;
}

// Adds up `terms` over the threads of a block that have the same columns. Calls `use(i, c, sum)` once for each row i of
// D and each of the block's columns c.
template <class Use>
__device__ inline void sum_over_block(float (&terms)[kTerms], uint32 rows, Use use) {
  float* sums = shared_sums();
  const uint32 self = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const uint32 width = blockDim.x * kQuad, pitch = WIDTH * width;
  float* own = sums + self / kWarp * pitch + threadIdx.x * kQuad;
  sum_over_lanes<kTerms>(terms, 0, kWarp / 2,
                         [&](int term, float sum) { own[term / kQuad * width + term % kQuad] = sum; });
  __syncthreads();
  for (uint32 i = self; i < rows * width; i += threads) {
    float sum = 0.0f;
    for (uint32 warp = 0; warp < threads / kWarp; ++warp) sum += sums[warp * pitch + i];
    use(i / width, i % width, sum);
  }
}

__device__ inline void store(const NarrowParams& p, int64 row, int64 col, float sum) {
  if (col < p.cols) {
    *element<SCALAR>(p.d, row, col) = from_float<SCALAR>(p.alpha * sum + addend(p, row, col));
  } else if (col == p.cols && p.vector) {
    p.vector[row] = from_float<SCALAR>(sum);
  }
}

// Adds up the blocks' sums over their parts of K, in order; the last block to finish in a column of the grid does it.
__device__ inline void sum_over_parts(const NarrowParams& p, float (&terms)[kTerms]) {
  const uint32 width = blockDim.x * kQuad, size = static_cast<uint32>(p.rows) * width;
  const int64 pitch = static_cast<int64>(gridDim.x) * size;
  float* block = p.partial + blockIdx.x * static_cast<int64>(size);
  float* own = block + blockIdx.y * pitch;
  sum_over_block(terms, p.rows, [&](uint32 row, uint32 col, float sum) { own[row * width + col] = sum; });
  if (!is_last_block(p.tickets + blockIdx.x, gridDim.y)) return;
  for (uint32 i = threadIdx.y * blockDim.x + threadIdx.x; i < size; i += blockDim.x * blockDim.y) {
    float sum = 0.0f;
#pragma unroll 8
    for (uint32 part = 0; part < gridDim.y; ++part) sum += __ldcg(block + part * pitch + i);
    store(p, i / width, static_cast<int64>(blockIdx.x) * width + i % width, sum);
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, 1) narrow_m(const lt::NarrowParams p) {
  using namespace lt;
  const Columns columns(p);
  wait_for_predecessor();
  float sums[kTerms] = {};
  multiply(sums, p, columns);
  if (gridDim.y > 1) {
    sum_over_parts(p, sums);
    return;
  }
  const int64 first = static_cast<int64>(blockIdx.x) * blockDim.x * kQuad;
  sum_over_block(sums, p.rows, [&](uint32 row, uint32 col, float sum) { store(p, row, first + col, sum); });
}
