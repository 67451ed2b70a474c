// Updates weights of layers in FP8, and writes each new weight in FP8 too, row-major and transposed, with the scale
// that the next step's products use. It also finds the largest absolute value of the new weight. So the next step needs
// no pass that casts the weight. The updated numbers have the same bits as those of optimizer.cu.
//
// A block updates a tile of 32 rows and 256 columns, a warp a row of the tile at a time. The number of the weight's
// columns is a multiple of 256, so that a row of a tile is what a warp of optimizer.cu updates, and draws the same
// random bits. If the step is skipped, the present weight is written in FP8 again, because the next step needs its
// largest absolute value.
//
// Compiled for RULE, MOMENT and STOCHASTIC, see optimizer.cuh.

#define E5M2 0
#define ALIGNED 1

#include "fp8.cuh"
#include "optimizer.cuh"

namespace lt {

// One row of the table of tiles, which the host builds. Every address points to the tile's first element.
struct alignas(16) OptimizerTile {
  OptimizerChunk chunk;       // every address in the chunk is a multiple of 16 bytes
  unsigned char* out;         // the weight in FP8
  unsigned char* transposed;  // the transpose of the weight in FP8; null if not wanted
  const float* scale;
  float* amax;
  uint32 rows;   // number of the tile's rows, at most kRows
  uint32 pitch;  // elements from one row of the weight to the next
  uint32 transposed_pitch;
  uint32 reserved;
};

struct OptimizerFp8Params {
  OptimizerParams update;
  const OptimizerTile* tiles;
};

constexpr uint32 kThreads = 256;
constexpr uint32 kWarps = kThreads / kWarp;
constexpr uint32 kRows = 32;              // with 64 rows an update takes 1 to 2 % longer on an H200
constexpr uint32 kWords = kWarpTile / 4;  // words of a row of the tile in FP8
constexpr uint32 kRuns = kRows / kRun;
// Launch bounds: blocks that a multiprocessor must hold, as many as possible without spilling registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = kMoments > 2 || (kMoments == 2 && kMoment == kFloat32 && STOCHASTIC) ? 3 : 4;
#endif

__device__ inline void* moved(const void* data, int type, uint64 elements) {
  return const_cast<char*>(static_cast<const char*>(data)) + elements * (type == kFloat32 ? 4 : 2);
}

// The part of a chunk from an element on. Absent moments get addresses too, which are never used.
__device__ inline OptimizerChunk chunk_from(const OptimizerChunk& chunk, uint64 elements) {
  OptimizerChunk out = chunk;
  out.value = moved(chunk.value, value_type(chunk), elements);
  out.copy = chunk.copy ? moved(chunk.copy, chunk.copy_type, elements) : nullptr;
  out.gradient = moved(chunk.gradient, chunk.gradient_type, elements);
  out.m = moved(chunk.m, kMoment, elements);
  out.v = moved(chunk.v, kMoment, elements);
  out.v_max = moved(chunk.v_max, kMoment, elements);
  return out;
}

// Starts to load a line of 128 bytes into the L2 cache.
__device__ inline void prefetch(const void* line) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#else
  static_cast<void>(line);
#endif
}

// Starts to load a row, which begins at element `start` of the tile, into the L2 cache. Eight lanes have the lines of
// one array; v_max of AMSGrad is left out.
__device__ inline void prefetch_row(const OptimizerChunk& chunk, uint64 start) {
  constexpr uint32 kLine = 128, kLanes = kWarp / 4;
  const uint32 array = threadIdx.x % kWarp / kLanes, at = threadIdx.x % kLanes * kLine;
  const void* data = array == 0 ? chunk.value : array == 1 ? chunk.gradient : array == 2 ? chunk.m : chunk.v;
  const int type = array == 0 ? value_type(chunk) : array == 1 ? chunk.gradient_type : kMoment;
  if (array < 2 + kMoments && at < kWarpTile * (type == kFloat32 ? 4 : 2)) {
    prefetch(static_cast<const char*>(moved(data, type, start)) + at);
  }
}

// Updates a thread's elements of a row, or leaves them if the step is skipped; returns the parameter's values.
__device__ inline Octet update_row(const OptimizerParams& p, const OptimizerChunk& chunk, const UpdateStep& step,
                                   const Quads& at, uint64 octet) {
  const Tensors old = load_tensors(chunk, at);
  if (step.skipped) return of_parameter(chunk, unpack(old.value, value_type(chunk)));
  const Octets result = update(p, chunk, step, old);
  const bool rounds = STOCHASTIC || kMoment == kBfloat16;
  const Words random = rounds ? rounding_words(p.seed, octet, chunk.tensor, step.number) : Words{};
  store_moments(chunk, at, random, result);
  return store_value(chunk, at, random, result.value);
}

// Returns the place in its row of shared memory of a word that belongs to a given run. Words are permuted, so that the
// 32 threads of a warp, which read 16 neighbouring words in each of two runs, read from 32 different banks.
__device__ inline uint32 permuted(uint32 word, uint32 run) { return word ^ 16 * run; }

// Stores one run of each of four columns; two consecutive threads store four whole columns of the tile.
__device__ inline void store_transposed(const OptimizerTile& tile, const uint32 (&words)[kRows][kWords]) {
  const uint32 run = threadIdx.x % kRuns, word = threadIdx.x / kRuns;
  if (word >= kWords || run * kRun >= tile.rows) return;
  uint4 runs[4];
  transpose_runs(runs, [&](int i) { return words[run * kRun + i][permuted(word, run)]; });
#pragma unroll
  for (uint32 i = 0; i < 4; ++i) {
    unsigned char* at = tile.transposed + static_cast<uint64>(word * 4 + i) * tile.transposed_pitch + run * kRun;
    *reinterpret_cast<uint4*>(at) = runs[i];
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, lt::kBlocks) optimizer_fp8(const lt::OptimizerFp8Params p) {
  using namespace lt;
  // Values that all threads need wait in shared memory, which spares registers.
  __shared__ OptimizerTile tile;
  __shared__ UpdateStep step;
  __shared__ uint32 words[kRows][kWords];
  // The table is constant, so it may be read before the previous kernel has ended.
  const OptimizerTile& entry = p.tiles[blockIdx.x];
  if (threadIdx.x == 0) tile = entry;
  const uint32 first = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint64 pitch = entry.pitch;
  wait_for_predecessor();
  // The first rows are on their way while one thread computes the step's factors, on which the others wait. Prefetching
  // each later row as well would make an update 4 to 19 % slower.
  if (first < entry.rows) prefetch_row(entry.chunk, first * pitch);
  if (threadIdx.x == 0) step = make_step(p.update, read_progress(p.update, tile.chunk.tensor));
  __syncthreads();
  const float scale = *tile.scale;
  const Quads at{4 * lane, kWarpTile, true};
  float amax = 0.0f;
  for (uint32 row = first; row < tile.rows; row += kWarps) {
    const uint64 start = row * pitch;
    const OptimizerChunk chunk = chunk_from(tile.chunk, start);
    const Octet w = update_row(p.update, chunk, step, at, chunk.octet + start / kOctet + lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32 col = at.index(4 * i), word = quad_to_fp8(w, 4 * i, [scale](int) { return scale; });
      words[row][permuted(col / 4, row / kRun)] = word;
      *reinterpret_cast<uint32*>(tile.out + start + col) = word;
#pragma unroll
      for (int k = 0; k < 4; ++k) amax = larger_or_nan(amax, fabsf(w.v[4 * i + k]));
    }
  }
  __syncthreads();
  if (tile.transposed) store_transposed(tile, words);
  store_amax(tile.amax, amax, threadIdx.x);
}
