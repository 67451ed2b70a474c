// Writes the octets of a sweep into a transposed matrix, by way of shared memory.
#pragma once

#include "sweep.cuh"

namespace lt {

// `rows` rounded up to a multiple of blockDim.y. As the bound of a loop over rows it gives all threads of a block
// equally many iterations, so that all reach every barrier.
__device__ inline uint32 block_rows(uint32 rows) { return (rows + blockDim.y - 1) / blockDim.y * blockDim.y; }

// Stores the octets of a sweep into a column-major matrix. The octets of a block, 8 · blockDim.x columns of blockDim.y
// rows, are written to shared memory; then each thread reads eight rows of one column and writes 16 bytes or more of
// contiguous global memory. blockDim.y is a power of two, at least eight.
template <class T>
class TransposedWriter {
 public:
  __device__ TransposedWriter(const Matrix& m, uint32 rows, int64 cols)
      : matrix_(m), rows_(rows), block_row_(blockIdx.y * blockDim.y) {
    const int self = threadIdx.y * blockDim.x + threadIdx.x, octets = blockDim.y / kOctet;
    row_ = self % octets * kOctet;
    column_ = self / octets;
    col_ = static_cast<int64>(blockIdx.x) * blockDim.x * kOctet + column_;
    exists_ = col_ < cols;
  }

  // Stores the calling thread's octet of the current row. Every thread of the block must call it, even one beyond the
  // last row or column.
  __device__ void store(const Octet& octet) {
    T* tile = shared_tile();
    const int pitch = blockDim.y + kPad;
    __syncthreads();  // all threads have read the previous tile, so that it may be overwritten
#pragma unroll
    for (int i = 0; i < kOctet; ++i) tile[(threadIdx.x * kOctet + i) * pitch + threadIdx.y] = from_float<T>(octet.v[i]);
    __syncthreads();
    const uint32 row = block_row_ + row_;
    if (exists_ && row < rows_) take_up(tile + column_ * pitch + row_, row);
    block_row_ += gridDim.y * blockDim.y;
  }

 private:
  // Padding of one 32-bit word, so that neighbouring columns begin in different banks.
  static constexpr int kPad = 4 / sizeof(T);
  static constexpr int kMaxThreads = 256, kMaxColumns = 256;

  static __device__ T* shared_tile() {
    __shared__ T tile[kMaxThreads * kOctet + kMaxColumns * kPad];
    return tile;
  }

  __device__ void take_up(const T* tile, uint32 row) const {
    Octet octet;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) octet.v[i] = to_float(tile[i]);
    const Matrix transposed{matrix_.data, matrix_.col_stride, matrix_.row_stride};
    const int count = octet_count(row, rows_);
    if (count == kOctet) {
      Access<T>::store(element<T>(transposed, col_, row), transposed.col_stride, count, octet);
    } else {
      Scattered<T>::store(element<T>(transposed, col_, row), transposed.col_stride, count, octet);
    }
  }

  Matrix matrix_;
  uint32 rows_;
  uint32 block_row_;
  int row_;     // number of the thread's first row in the tile; the thread reads eight rows
  int column_;  // the thread's column in the tile
  int64 col_;
  bool exists_;
};

}  // namespace lt
