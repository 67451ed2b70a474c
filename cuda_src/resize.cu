// Copies of matrices in other sizes: elements of a target beyond its source are zero, elements of the source beyond the
// target are left out. One launch makes up to three copies; blockIdx.y is the number of the copy. Compiled for one SCALAR
// type.
//
// A copy's blocks lie side by side and below each other, and are numbered row by row, so that copies of different shapes need
// few blocks: two of 4128 × 88 and 1 × 4128 took 23 µs on an H200 with a grid that is as wide and as high as both.

#include "predecessor.cuh"
#include "vector.cuh"

namespace lt {

constexpr int kResized = 3;

struct Resized {
  Matrix from;
  Matrix to;  // its rows are contiguous
  int64 from_rows;
  int64 from_cols;
  int64 rows;
  int64 cols;
  int across;   // blocks side by side
  int threads;  // of a block, side by side, with an octet each
};

struct ResizeParams {
  Resized items[kResized];
};

// Octets of one matrix, which may be aligned to 16 bytes or not, as may its source. Where the target's rows are no whole
// octets they begin in the middle of one, so that all octets but a row's first and last are written at once: memory takes
// parts of a sector as slowly as a whole one.
__device__ inline void resize_octets(const Resized& item) {
  const int blocks = gridDim.x / item.across, block = blockIdx.x / item.across;  // below each other
  if (block >= blocks) return;
  const int down = blockDim.x / item.threads;  // rows of a block
  const int64 own = static_cast<int64>(blockIdx.x % item.across * item.threads + threadIdx.x % item.threads) * kOctet;
  const uint64 pitch = item.to.row_stride % kOctet;
  const uint64 before = pitch ? reinterpret_cast<uint64>(item.to.data) / sizeof(SCALAR) : 0;
  int64 row = static_cast<int64>(block) * down + threadIdx.x / item.threads;
  for (; row < item.rows; row += static_cast<int64>(blocks) * down) {
    const int64 col = own - static_cast<int64>((before + row * pitch) % kOctet);
    if (col >= 0) {
      const int count = octet_count(col, item.cols);
      const int there = row < item.from_rows ? octet_count(col, item.from_cols) : 0;
      if (count) store<SCALAR>(item.to, row, col, count, load<SCALAR>(item.from, row, col, there));
      continue;
    }
    for (int64 i = 0; i < col + kOctet && i < item.cols; ++i) {
      const bool exists = row < item.from_rows && i < item.from_cols;
      *element<SCALAR>(item.to, row, i) = exists ? *element<SCALAR>(item.from, row, i) : from_float<SCALAR>(0.0f);
    }
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) resize(const __grid_constant__ lt::ResizeParams p) {
  using namespace lt;
  wait_for_predecessor();
  resize_octets(p.items[blockIdx.y]);
}
