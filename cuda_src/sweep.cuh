// An elementwise pass over a matrix: which elements a thread handles, and how it moves them.
//
// Compiled for one value of ALIGNED:
//   0  takes any layout
//   1  every row of every operand is whole octets and begins at a multiple of 16 bytes
//   2  no operand has gaps between its rows, which may be of any length from an octet on, and each begins at a multiple of 16
//      bytes. Octets are those of memory then, and the last of a row may go on in the next. In words as wide as odd rows
//      allow, a derivative with its sum over BF16 13830 × 221 took an H200 23 µs, where its bytes take five.
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

// A thread's octets: one in every `step`th row from `row` on; the octets of blockDim.x threads lie side by side. The blocks
// of a grid sweep over the rows together, so that the memory that is read at one time lies close together: DRAM is faster
// then.
//
// In a flat matrix an octet belongs to the row of its first element, and a row's first octet begins `lead` columns behind the
// row's beginning. `step` is a multiple of eight there, so that the octets of a thread all begin at the same column.
struct Sweep {
  uint32 row;
  uint32 step;
  int lead;
  int64 col;
  int count;  // number of elements of the octet that exist; none beyond the last column
  int last;   // elements of the octet that exist in the matrix's last row, which no other row follows

  __device__ explicit Sweep(int64 cols)
      : row(blockIdx.y * blockDim.y + threadIdx.y),
        step(gridDim.y * blockDim.y),
        lead(kFlat ? static_cast<int>(-row * static_cast<uint32>(cols) % kOctet) : 0),
        col((static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet + lead),
        count(kFlat && col < cols ? kOctet : octet_count(col, cols)),
        last(octet_count(col, cols)) {}

  // Row-major index of the first octet's first element.
  __device__ uint64 index(int64 cols) const { return row * static_cast<uint64>(cols) + static_cast<uint64>(col); }

  // The column of the octet's element i, by which a vector with one element for each column is read.
  __device__ int64 column(int i, int64 cols) const { return kFlat && col + i >= cols ? col + i - cols : col + i; }
};

// A pointer to the current octet of a sweep, in one matrix. It advances from row to row: computing each address anew would cost
// as much as the arithmetic on the elements.
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

// Loads kDepth rows ahead, so that the next loads are under way while the thread computes. In a pass that computes
// much, a depth above 1 would need registers that are better spent on more threads.
template <class From, int kDepth = 1>
struct ReadAhead {
  From cursor;
  typename From::Raw next[kDepth] = {};
  uint32 ahead;  // distance in rows from the row that is processed to the row that is loaded

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
