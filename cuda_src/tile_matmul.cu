// Matrix product on tensor cores for 16-bit matrices of any alignment and row length: D = act(α·A·B + β·C + bias),
// accumulated in FP32. For such matrices cuBLASLt has only kernels of old GPUs, whose epilogues are sometimes wrong, so
// that the epilogue would be a second pass over D.
//
// A block computes a 64 × 64 tile of D from tiles of A and B in shared memory, which keep the order of their matrices
// (row-major or column-major) and are padded with zeros. The blocks in z divide K among them (split-K); the last block
// of each group to finish adds up the group's sums, in order.
//
// On an H200, BF16 3904x24x21 (MxNxK) with a bias takes 2.6 µs, as long as cuBLASLt takes for the product alone.
// 13830x221x48 takes 9.3 µs and, if it also stores GELU's pre-activation, 16.1 µs; moving their bytes at the bandwidth
// of a copy would take 1.7 and 3.2 µs. Threads load and store elements one by one, since rows of odd length are not
// aligned. Loading 16-byte words and shifting the elements into place needs more instructions: with it the first
// example took 12.4 µs.
//
// Compiled for:
//   SCALAR      the type of all matrices
//   A_ALONG_K   1 if A is row-major, 0 if it is column-major
//   B_ALONG_K   1 if B is column-major, 0 if it is row-major
//   ACTIVATION  a struct of activations.cuh
//   DERIVATIVE  1 if D is multiplied by the activation's derivative at `aux` instead of being activated

#include "activations.cuh"
#include "mma.cuh"
#include "reduce.cuh"

namespace lt {

constexpr int kSide = 64;          // number of rows, and of columns, of every tile
constexpr int kPitch = kSide + 8;  // elements from one line of a tile to the next; padding puts eight lines in different banks
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kLines = kSide / kWarps;         // lines of a tile that each warp copies, or to which it applies the epilogue
constexpr int kShare = kSide / kWarp;          // elements of a copied line that one thread copies
constexpr int kWarpRows = 16, kWarpCols = 32;  // rows and columns of the part of D's tile that a warp computes
constexpr int kWarpsDown = kSide / kWarpRows;
constexpr int kTiles = kWarpCols / 8;          // number of mma instructions side by side in a warp's part of the tile
constexpr int kSums = 4;                       // sums of a thread in each mma instruction

struct TileMatmulParams {
  Matrix a;
  Matrix b;
  Matrix c;         // the operand C; may be null or the same memory as `d`
  Matrix d;
  Matrix aux;       // the pre-activation, written, or with DERIVATIVE read; may be null without DERIVATIVE
  SCALAR* bias;     // the bias (N); may be null
  SCALAR* sums;     // (N) the sum of D over M if DERIVATIVE, (M) that of A over K otherwise; may be absent
  float* partial;   // partial sums of each tile of D over parts of K; then each row of tiles' column sums of D
  uint32* tickets;  // counters of `is_last_block`: of each tile's groups, then of each column of tiles
  int rows;         // M
  int cols;         // N
  int depth;        // K
  int part;         // number of terms of K that a block adds up, a multiple of kSide
  uint32 group;     // size of a group of blocks whose sums one block adds up
  uint32 slots;     // number of stored partial sums of a tile: one for each part of K, each group of parts, and so on
  float alpha;
  float beta;
};

// Joins two elements into one word, the first in its low half.
__device__ inline uint32 joined(SCALAR low, SCALAR high) {
  const SCALAR pair[] = {low, high};
  uint32 word;
  memcpy(&word, pair, sizeof(word));
  return word;
}

// Copies tiles of A or B from global to shared memory. A line is a row or column of the operand whose elements are
// contiguous. A warp copies every kWarps'th line of a tile; a thread copies two neighbouring elements of each, by two
// loads, as a line may not be aligned to pairs.
struct Copier {
  const SCALAR* from;  // the thread's first element
  int64 step;          // stride in elements from one of the warp's lines to the next
  int lines;           // number of the matrix's lines from the warp's first line on
  int length;          // number of elements left in a line, from the thread's first element on
  uint32 pairs[kLines];

  __device__ Copier(const Matrix& m, bool by_rows, int rows, int cols, int row, int col) {
    const int line = (by_rows ? row : col) + threadIdx.x / kWarp, element = (by_rows ? col : row) + threadIdx.x % kWarp * 2;
    const int64 stride = by_rows ? m.row_stride : m.col_stride;
    from = static_cast<const SCALAR*>(m.data) + line * stride + element;
    step = kWarps * stride;
    lines = (by_rows ? rows : cols) - line;
    length = (by_rows ? cols : rows) - element;
  }

  // Loads the thread's elements of a tile, with zeros beyond the matrix, and advances to the next tile along K.
  // `along`: K runs along the lines; otherwise across them.
  __device__ void load(bool along) {
    const SCALAR zero = from_float<SCALAR>(0.0f);
    const SCALAR* p = from;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const bool exists = i * kWarps < lines;
      SCALAR low = zero, high = zero;
      if (exists && length > 0) low = p[0];
      if (exists && length > 1) high = p[1];
      pairs[i] = joined(low, high);
      p += step;
    }
    from = along ? from + kSide : p;
    (along ? length : lines) -= kSide;
  }

  __device__ void store(SCALAR* tile) const {
    SCALAR* to = tile + threadIdx.x / kWarp * kPitch + threadIdx.x % kWarp * 2;
#pragma unroll
    for (int i = 0; i < kLines; ++i) *reinterpret_cast<uint32*>(to + i * kWarps * kPitch) = pairs[i];
  }
};

// Position of the block's tile in D, and of the calling warp's part in the tile.
struct Place {
  int row, col;            // D's tile
  int warp_row, warp_col;  // first row and column of the warp's part of the tile
  int tiles;               // number of the warp's 16 × 8 tiles that hold columns of D or the sums of A

  __device__ Place(const TileMatmulParams& p, int first)
      : row(first),
        col(blockIdx.y * kSide),
        warp_row(threadIdx.x / kWarp % kWarpsDown * kWarpRows),
        warp_col(threadIdx.x / kWarp / kWarpsDown * kWarpCols) {
    const int cols = p.cols + (!DERIVATIVE && p.sums ? 1 : 0) - col - warp_col;
    const bool exists = row + warp_row < p.rows && cols > 0;
    tiles = !exists ? 0 : cols < kWarpCols ? (cols + 7) / 8 : kTiles;
  }
};

// Sets a column of B's tile to ones, so that the product's column holds the sums of A over K.
__device__ inline void add_ones(SCALAR* tile, int col) {
  const int pair = threadIdx.x % kWarp;
  if (pair != col / 2) return;
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    tile[(threadIdx.x / kWarp + i * kWarps) * kPitch + col] = from_float<SCALAR>(1.0f);
  }
}

// Adds the warp's part of the product of two tiles to the warp's sums.
__device__ inline void multiply(float (&sums)[kTiles][kSums], const SCALAR* a, const SCALAR* b, const Place& at, int terms) {
  const int lane = threadIdx.x % kWarp, line = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
  for (int k = 0; k < terms; k += 16) {
    uint32 left[4];
    if (A_ALONG_K) {
      load_matrices<false>(left, a + (at.warp_row + second + line) * kPitch + k + third);
    } else {
      load_matrices<true>(left, a + (k + third + line) * kPitch + at.warp_row + second);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      if (tile >= at.tiles) break;
      uint32 right[4];
      const int col = at.warp_col + tile * 8;
      if (B_ALONG_K) {
        load_matrices<false>(right, b + (col + third + line) * kPitch + k + second);
      } else {
        load_matrices<true>(right, b + (k + second + line) * kPitch + col + third);
      }
      multiply_add<SCALAR>(sums[tile], left, right[0], right[1]);
      multiply_add<SCALAR>(sums[tile + 1], left, right[2], right[3]);
    }
  }
}

// Adds up the blocks' sums over parts of K, level by level: the last block of each group to finish adds up the group's
// sums, then groups of groups follow. Returns whether the calling block holds the sum over all of K.
__device__ inline bool sum_over_parts(const TileMatmulParams& p, const Place& at, float (&sums)[kTiles][kSums]) {
  constexpr int64 kSize = kSide * kSide / kSums;
  const int64 tile = blockIdx.y * static_cast<int64>(gridDim.x) + blockIdx.x;
  float4* slots = reinterpret_cast<float4*>(p.partial) + tile * p.slots * kSize + threadIdx.x;
  uint32* tickets = p.tickets + tile * p.slots;
  uint32 part = blockIdx.z;
  for (uint32 parts = gridDim.z; parts > 1;) {
    const uint32 group = part / p.group, first = group * p.group;
    const uint32 count = parts - first < p.group ? parts - first : p.group;
    float4* own = slots + part * kSize;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i < at.tiles) own[i * kThreads] = float4{sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
    }
    if (!is_last_block(tickets + group, count)) return false;
#pragma unroll
    for (int i = 0; i < kTiles * kSums; ++i) sums[i / kSums][i % kSums] = 0.0f;
    const float4* from = slots + first * kSize;
#pragma unroll 2
    for (uint32 each = 0; each < count; ++each) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i >= at.tiles) continue;
        const float4 more = __ldcg(from + each * kSize + i * kThreads);
        sums[i][0] += more.x;
        sums[i][1] += more.y;
        sums[i][2] += more.z;
        sums[i][3] += more.w;
      }
    }
    slots += parts * kSize;
    tickets += parts;
    part = group;
    parts = (parts + p.group - 1) / p.group;
  }
  return true;
}

// Stores the warp's sums into the tile of D in shared memory.
__device__ inline void spread(const float (&sums)[kTiles][kSums], float* tile, const Place& at) {
  const int lane = threadIdx.x % kWarp, row = at.warp_row + lane / 4, col = at.warp_col + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (i >= at.tiles) break;
    float* place = tile + row * kPitch + col + i * 8;
    *reinterpret_cast<float2*>(place) = float2{sums[i][0], sums[i][1]};
    *reinterpret_cast<float2*>(place + 8 * kPitch) = float2{sums[i][2], sums[i][3]};
  }
}

// Sums D over its rows: adds up the column sums of the block's threads, then those of all blocks in a column of the
// grid.
__device__ inline void sum_columns(const TileMatmulParams& p, const float (&own)[kShare]) {
  __shared__ float sums[kWarps][kSide];
#pragma unroll
  for (int i = 0; i < kShare; ++i) sums[threadIdx.x / kWarp][threadIdx.x % kWarp + i * kWarp] = own[i];
  __syncthreads();
  const int local = threadIdx.x % kSide, col = blockIdx.y * kSide + local, turn = threadIdx.x / kSide;
  constexpr int kTurns = kThreads / kSide;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += sums[i][local];
  if (gridDim.x > 1) {
    const int64 tiles = gridDim.x * static_cast<int64>(gridDim.y);
    float* column = p.partial + tiles * p.slots * kSide * kSide + col;
    if (turn == 0 && col < p.cols) column[blockIdx.x * static_cast<int64>(p.cols)] = sum;
    if (!is_last_block(p.tickets + tiles * p.slots + blockIdx.y, gridDim.x)) return;
    sum = 0.0f;
    if (col < p.cols) {
#pragma unroll 16
      for (uint32 each = turn; each < gridDim.x; each += kTurns) sum += __ldcg(column + each * static_cast<int64>(p.cols));
    }
    sums[turn][local] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) sum += sums[i][local];
  }
  if (turn == 0 && col < p.cols) p.sums[col] = from_float<SCALAR>(sum);
}

// The elements of D, C or `aux` to which one thread applies the epilogue: every kWarps'th row of one column of the
// tile.
struct Column {
  SCALAR* first;
  int64 step;

  __device__ Column(const Matrix& m, int row, int col)
      : first(m.data ? element<SCALAR>(m, row, col) : nullptr), step(kWarps * m.row_stride) {}

  __device__ SCALAR& operator[](int i) const { return first[i * step]; }
};

// Applies the epilogue to the thread's elements of one column, and writes D and `aux`; returns the sum of the thread's
// elements of D.
__device__ inline float finish(const TileMatmulParams& p, const float* products, int row, int col) {
  const int rows = p.rows - row;
  const Column d(p.d, row, col), aux(p.aux, row, col);
  float z[kLines], total = 0.0f;
  const float bias = p.bias ? to_float(p.bias[col]) : 0.0f;
#pragma unroll
  for (int i = 0; i < kLines; ++i) z[i] = p.alpha * products[i * kWarps * kPitch] + bias;
  if (p.c.data) {
    const Column c(p.c, row, col);
#pragma unroll
    for (int i = 0; i < kLines; ++i) z[i] += i * kWarps < rows ? p.beta * to_float(c[i]) : 0.0f;
  }
  if (DERIVATIVE) {
    float arguments[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) arguments[i] = i * kWarps < rows ? to_float(aux[i]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      z[i] *= ACTIVATION::derivative(arguments[i], 0.0f);
      total += i * kWarps < rows ? z[i] : 0.0f;
    }
  } else if (aux.first) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (i * kWarps < rows) aux[i] = from_float<SCALAR>(z[i]);
    }
  }
  if (!DERIVATIVE) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) z[i] = ACTIVATION::forward(z[i], 0.0f);
  }
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    if (i * kWarps < rows) d[i] = from_float<SCALAR>(z[i]);
  }
  return total;
}

// Applies the epilogue to all columns of the thread. The column after D's last one holds the sums of A.
__device__ inline void finish(const TileMatmulParams& p, const Place& at, const float* tile, float (&totals)[kShare]) {
  const int line = threadIdx.x / kWarp, row = at.row + line;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int local = threadIdx.x % kWarp + i * kWarp, col = at.col + local;
    const float* products = tile + line * kPitch + local;
    if (col < p.cols) {
      totals[i] += finish(p, products, row, col);
    } else if (!DERIVATIVE && p.sums && col == p.cols) {
#pragma unroll 1
      for (int j = 0; j < kSide && row + j < p.rows; j += kWarps) p.sums[row + j] = from_float<SCALAR>(products[j * kPitch]);
    }
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, 3) tile_matmul(const lt::TileMatmulParams p) {
  using namespace lt;
  __shared__ float4 shared[kSide * kPitch / 4];  // holds the tiles of A and B, and when these are multiplied D's tile
  static_assert(2 * sizeof(SCALAR) == sizeof(float), "the tiles of A and B take as much as that of D");
  float* tile = reinterpret_cast<float*>(shared);
  SCALAR* left = reinterpret_cast<SCALAR*>(shared);
  SCALAR* right = left + kSide * kPitch;
  const int first = blockIdx.z * p.part, left_over = p.depth - first;
  float totals[kShare] = {};
  wait_for_predecessor();
  for (int row = blockIdx.x * kSide; row < p.rows; row += gridDim.x * kSide) {
    const Place at(p, row);
    Copier a(p.a, A_ALONG_K, p.rows, p.depth, at.row, first), b(p.b, !B_ALONG_K, p.depth, p.cols, first, at.col);
    float sums[kTiles][kSums] = {};
    for (int terms = left_over < p.part ? left_over : p.part; terms > 0; terms -= kSide) {
      a.load(A_ALONG_K);
      b.load(B_ALONG_K);
      a.store(left);
      b.store(right);
      if (!DERIVATIVE && !B_ALONG_K && p.sums && at.col + kSide > p.cols) add_ones(right, p.cols - at.col);
      __syncthreads();
      multiply(sums, left, right, at, terms < kSide ? terms : kSide);
      __syncthreads();
    }
    if (!sum_over_parts(p, at, sums)) return;  // a block that shares K has one tile: TileMatmulPass asserts it
    spread(sums, tile, at);
    __syncthreads();
    finish(p, at, tile, totals);
    __syncthreads();
  }
  if (DERIVATIVE && p.sums) sum_columns(p, totals);
}
