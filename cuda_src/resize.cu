// Copies of matrices in other sizes: elements of a target beyond its source are zero, elements of the source beyond the
// target are left out. One launch makes up to three copies; blockIdx.z is the number of the copy. Compiled for one SCALAR
// type.

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
};

struct ResizeParams {
  Resized items[kResized];
};

// Octets of one matrix. Each matrix may be aligned to 16 bytes or not, which decides how its octets are moved.
__device__ inline void resize_octets(const Resized& item) {
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  const int64 step = static_cast<int64>(gridDim.y) * blockDim.y;
  const int count = octet_count(col, item.cols);
  if (count == 0) return;
  for (int64 row = static_cast<int64>(blockIdx.y) * blockDim.y + threadIdx.y; row < item.rows; row += step) {
    const int there = row < item.from_rows ? octet_count(col, item.from_cols) : 0;
    store<SCALAR>(item.to, row, col, count, load<SCALAR>(item.from, row, col, there));
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) resize(const lt::ResizeParams p) {
  using namespace lt;
  wait_for_predecessor();
  if (blockIdx.z == 0) {
    resize_octets(p.items[0]);
  } else if (blockIdx.z == 1) {
    resize_octets(p.items[1]);
  } else {
    resize_octets(p.items[2]);
  }
}
