// Sums over the rows of a flat matrix (ALIGNED 2, see sweep.cuh), always in the same order: over the rows of a block,
// then over the blocks.
//
// The octets of a row of threads begin `lead` columns after the block's first column, and so reach up to seven columns
// into the next block's columns or, at the end of a row, into the next row's first columns, which belong to the first
// block.
#pragma once

#include "column_sum.cuh"

namespace lt {

constexpr int kFlatRows = 64;  // largest blockDim.y: rows of threads of a block

// Sums each column that a block's octets touch over the block's rows. `lead` is the distance from the block's first
// column to the first octet of the thread's row. Calls `use(i, sum)` once for each i below 8 · (blockDim.x + 1), where
// i counts columns from the block's first one. Every thread of the block must call this function.
template <class Use>
__device__ inline void sum_flat_over_block(const Octet& octet, int lead, Use use) {
  constexpr int kSlice = 8;
  __shared__ float sums[(kThreads + kFlatRows) * kOctet];
  const int self = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const int width = (blockDim.x + 1) * kOctet, rows = blockDim.y / kSlice;
  float* own = sums + threadIdx.y * width;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    own[threadIdx.x * kOctet + lead + i] = octet.v[i];
    if (threadIdx.x == 0) own[i < lead ? i : width - kOctet + i] = 0.0f;  // zeros in the places that no octet of the row covers
  }
  __syncthreads();
  for (int at = self; at < rows * width; at += threads) sums[at] = sum_column(sums + at, rows * width, kSlice);
  __syncthreads();
  for (int place = self; place < width; place += threads) use(place, sum_column(sums + place, width, rows));
}

// How the grid's blocks share the columns of a flat matrix. Each block stores three groups of partial sums, together
// called its slot: the sums of its own columns; eight sums for the next block's first columns; and eight for the first
// block's columns, into which octets at a row's end reach.
struct FlatBlocks {
  int width;  // number of columns that a block sums
  int blocks;
  int last;  // number of columns that the last block sums

  __device__ explicit FlatBlocks(int64 cols) : width(blockDim.x * kOctet), blocks(gridDim.x) {
    last = static_cast<int>(cols - static_cast<int64>(width) * (blocks - 1));
  }

  __device__ int64 slot() const { return width + 2 * kOctet; }
  __device__ int own(int block) const { return block == blocks - 1 ? last : width; }

  // Number of columns from the end of a block's columns to the end of the row, at most 8.
  __device__ int left(int block) const {
    if (block == blocks - 1) return 0;
    return block == blocks - 2 && last < kOctet ? last : kOctet;
  }

  // Number of blocks that have partial sums of a block's columns.
  __device__ uint32 arrivals(int block) const {
    if (blocks == 1) return 1;
    return block == 0 && blocks > 2 && last < kOctet ? 3 : 2;
  }

  // Stores the partial sum of column `place`, counted from the block's first column, into the block's slot.
  __device__ void put(float* at, int block, int place, float sum) const {
    const int beyond = place - own(block), rest = left(block);
    if (beyond < 0) {
      at[place] = sum;
    } else if (beyond >= kOctet) {
      at[place - kOctet] = sum;  // `place` lies beyond the block's columns, so that no sum of a column is overwritten
    } else {
      const bool is_next = beyond < rest;
      at[width + beyond] = is_next ? sum : 0.0f;
      at[width + kOctet + (is_next ? kOctet : 0) + beyond - rest] = is_next ? 0.0f : sum;
    }
  }
};

// Adds up the partial sums of one block's columns over the grid, after all blocks have stored theirs.
template <class T>
__device__ inline void sum_flat_slots(const ColumnSum<T>& c, const FlatBlocks& flat, int block, int64 cols) {
  const int64 slot = flat.slot(), pitch = slot * flat.blocks;
  Octet total = sum_of_octets(c.partial + slot * block + threadIdx.x * kOctet, pitch);
  if (threadIdx.x == 0) {
    const auto add = [&](int other, int from) { total += sum_of_octets(c.partial + slot * other + from, pitch); };
    if (block > 0) {
      add(block - 1, flat.width);
    } else {
      add(flat.blocks - 1, flat.width + kOctet);
      if (flat.blocks > 1 && flat.last < kOctet) add(flat.blocks - 2, flat.width + kOctet);
    }
  }
  const int64 first = static_cast<int64>(flat.width) * block;
  sum_over_block(total, [&](int place, float sum) { store_sum(c, first + place, cols, sum); });
}

// Increments the counters of up to three blocks: those for whose columns the calling block has stored partial sums.
// They are incremented by different threads at once, since each atomic takes a microsecond. `lasts` tells for which
// counters the calling block is the last; see `is_last_block`.
__device__ inline void arrive(uint32* tickets, const FlatBlocks& flat, const int (&blocks)[3], bool (&lasts)[3]) {
  __shared__ uint32 arrived[3];
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    __threadfence();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (blocks[i] >= 0) arrived[i] = atomicInc(tickets + blocks[i], flat.arrivals(blocks[i]) * gridDim.y - 1);
    }
    __threadfence();
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 3; ++i) lasts[i] = blocks[i] >= 0 && arrived[i] == flat.arrivals(blocks[i]) * gridDim.y - 1;
}

// Adds up the sums of all threads over the grid. A block's columns are added up by the last block to finish among those
// that have partial sums of them.
template <class T>
__device__ inline void sum_flat_over_grid(const ColumnSum<T>& c, const Octet& octet, int64 cols, int lead) {
  const FlatBlocks flat(cols);
  const int self = blockIdx.x, next = self + 1 < flat.blocks ? self + 1 : 0;
  float* own = c.partial + flat.slot() * (static_cast<int64>(blockIdx.y) * flat.blocks + self);
  sum_flat_over_block(octet, lead, [&](int place, float sum) { flat.put(own, self, place, sum); });
  const bool is_near_end = self > 0 && self == flat.blocks - 2 && flat.last < kOctet;
  const int blocks[3] = {self, flat.blocks > 1 ? next : -1, is_near_end ? 0 : -1};
  bool lasts[3];
  arrive(c.tickets, flat, blocks, lasts);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (!lasts[i]) continue;
    sum_flat_slots(c, flat, blocks[i], cols);
    __syncthreads();
  }
}

}  // namespace lt
