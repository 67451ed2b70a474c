// Elementwise passes over a matrix: which elements a thread handles, and how it loads and stores them, in octets.
//
// Compiled for one value of ALIGNED:
//   0  any layout
//   1  every row of every operand consists of whole octets and begins at a multiple of 16 bytes
//   2  flat: every operand is contiguous and begins at a multiple of 16 bytes; a row has any length from an octet on.
//      Octets are aligned pieces of memory, so that the last octet of a row may end in the next row. With the narrower
//      loads that odd rows allow otherwise, an activation's derivative with its column sum, of 13830 × 221 in BF16,
//      took 23 µs on an H200, where moving the bytes takes 5 µs.
#pragma once

#include "instructions.cuh"

namespace lt {

constexpr bool kFlat = ALIGNED == 2;

#if ALIGNED
template <class T>
using Access = Aligned<T>;
#else
template <class T>
using Access = Scattered<T>;
#endif

// The octets of a thread: one in every `step`th row from `row` on; the octets of blockDim.x threads are adjacent. All
// blocks of the grid move down the rows together, so that concurrent accesses are close together in memory, which is
// faster for DRAM.
//
// In a flat matrix an octet belongs to the row of its first element, and the first octet of a row begins at column
// `lead`. There `step` is a multiple of eight, so that all octets of a thread begin at the same column.
struct Sweep {
  uint32 row;
  uint32 step;
  int lead;
  int64 col;
  int count;  // number of elements of each octet that exist; 0 beyond the last column
  int last;   // like `count`, for the matrix's last row, after which a flat octet has no next row to continue in

  __device__ explicit Sweep(int64 cols)
      : row(blockIdx.y * blockDim.y + threadIdx.y),
        step(gridDim.y * blockDim.y),
        lead(kFlat ? static_cast<int>(-row * static_cast<uint32>(cols) % kOctet) : 0),
        col((static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet + lead),
        count(kFlat && col < cols ? kOctet : octet_count(col, cols)),
        last(octet_count(col, cols)) {}

  // Row-major index of the first octet's first element.
  __device__ uint64 index(int64 cols) const { return row * static_cast<uint64>(cols) + static_cast<uint64>(col); }

  // The column of the octet's element i: index into a vector with one element for each column, such as the bias.
  __device__ int64 column(int i, int64 cols) const { return kFlat && col + i >= cols ? col + i - cols : col + i; }
};

// A pointer to the current octet of a sweep in one matrix. It is advanced from row to row, because computing each
// address from the row number would cost as much as the arithmetic on the elements.
template <class T>
struct Cursor {
  using Raw = typename Access<T>::Raw;

  T* at;
  int64 step;
  int64 col_stride;
  int count;
  int last;

  __device__ Cursor(const Matrix& m, const Sweep& s)
      : at(element<T>(m, s.row, s.col)),
        step(s.step * m.row_stride),
        col_stride(m.col_stride),
        count(s.count),
        last(s.last) {}

  __device__ Raw load(bool is_last_row) {
    const Raw raw = is_part(is_last_row) ? load_part() : Access<T>::load(at, col_stride, count);
    at += step;
    return raw;
  }

  __device__ void store(const Octet& octet, bool is_last_row) {
    if (is_part(is_last_row)) {
#pragma unroll
      for (int i = 0; i < kOctet - 1; ++i) {
        if (i < last) at[i] = from_float<T>(octet.v[i]);
      }
    } else {
      Access<T>::store(at, col_stride, count, octet);
    }
    at += step;
  }

 private:
  __device__ bool is_part(bool is_last_row) const { return kFlat && is_last_row && last < kOctet; }

  __device__ Raw load_part() const {
    Raw raw{};
#pragma unroll
    for (int i = 0; i < kOctet - 1; ++i) {
      if (i < last) memcpy(reinterpret_cast<char*>(&raw) + i * sizeof(T), at + i, sizeof(T));
    }
    return raw;
  }
};

// Loads a sweep's octets kDepth rows ahead, so that the next loads are in flight while the thread computes. In a pass
// that computes much, a depth above 1 would take registers that are better spent on more threads.
template <class From, int kDepth = 1>
struct ReadAhead {
  From cursor;
  typename From::Raw next[kDepth] = {};
  uint32 ahead;  // distance in rows from the row being computed to the row being loaded

  __device__ ReadAhead(const Matrix& m, const Sweep& s) : cursor(m, s), ahead(kDepth * s.step) {}

  __device__ void start(const Sweep& s, uint32 rows) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      load(next[i], s.row + i * s.step, rows);
    }
  }

  __device__ typename From::Raw take(uint32 row, uint32 rows) {
    const typename From::Raw raw = next[0];
#pragma unroll
    for (int i = 1; i < kDepth; ++i) next[i - 1] = next[i];
    load(next[kDepth - 1], row + ahead, rows);
    return raw;
  }

 private:
  __device__ void load(typename From::Raw& raw, uint32 row, uint32 rows) {
    if (row < rows) raw = cursor.load(row == rows - 1);
  }
};

template <class T, int kDepth = 1>
using Reader = ReadAhead<Cursor<T>, kDepth>;

}  // namespace lt
