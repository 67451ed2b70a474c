// An elementwise pass over a matrix: which elements a thread handles, and how it moves them.
// Compiled for ALIGNED 1, where every row of every operand is whole octets and begins at a multiple of 16 bytes, or for
// ALIGNED 0, which takes any layout.
#pragma once

#include "predecessor.cuh"
#include "vector.cuh"

namespace lt {

#if ALIGNED
template <class T>
using Access = Aligned<T>;
#else
template <class T>
using Access = Scattered<T>;
#endif

// A thread's octets: one in every `step`th row from `row` on; the octets of blockDim.x threads lie side by side. The blocks
// of a grid sweep over the rows together, so that the memory that is read at one time lies close together: DRAM is faster
// then.
struct Sweep {
  uint32 row;
  uint32 step;
  int64 col;
  int count;  // elements of the octet that exist; none beyond the last column

  __device__ explicit Sweep(int64 cols)
      : row(blockIdx.y * blockDim.y + threadIdx.y),
        step(gridDim.y * blockDim.y),
        col((static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet),
        count(octet_count(col, cols)) {}

  // Row-major index of the first octet's first element.
  __device__ uint64 index(int64 cols) const { return row * static_cast<uint64>(cols) + static_cast<uint64>(col); }
};

// A pointer to a sweep's current octet of a matrix. It advances from row to row: computing each address anew would cost as
// much as the arithmetic on the elements.
template <class T>
struct Cursor {
  using Raw = typename Access<T>::Raw;

  T* at;
  int64 step;
  int64 col_stride;
  int count;

  __device__ Cursor(const Matrix& m, const Sweep& s)
      : at(element<T>(m, s.row, s.col)), step(s.step * m.row_stride), col_stride(m.col_stride), count(s.count) {}

  __device__ Raw load() {
    const Raw raw = Access<T>::load(at, col_stride, count);
    at += step;
    return raw;
  }

  __device__ void store(const Octet& octet) {
    Access<T>::store(at, col_stride, count, octet);
    at += step;
  }
};

// Loads one row ahead, so that the next load is under way while the thread computes. Loading more rows ahead would need
// registers that are better spent on more threads.
template <class From>
struct ReadAhead {
  From cursor;
  typename From::Raw next{};

  __device__ ReadAhead(const Matrix& m, const Sweep& s) : cursor(m, s) {}
  __device__ void start(bool any) {
    if (any) next = cursor.load();
  }
  __device__ typename From::Raw take(bool more) {
    const typename From::Raw raw = next;
    if (more) next = cursor.load();
    return raw;
  }
};

template <class T>
using Reader = ReadAhead<Cursor<T>>;

}  // namespace lt
