// Copies matrices into matrices of other sizes: target elements beyond the source become zero, source elements beyond
// the target are left out. One launch makes up to three copies; blockIdx.y is the number of the copy. Compiled for one
// SCALAR type.
//
// blockIdx.x numbers a copy's blocks, which cover its target in two dimensions, row by row. So copies of different
// shapes share a small grid: with a grid as wide and as high as the larger of both, copies of 4128 × 88 and 1 × 4128
// together took 23 µs on an H200.

#include "instructions.cuh"

namespace lt {

constexpr int kResized = 3;
constexpr int kBlocks = 3;  // launch bounds: with more than 3 blocks, registers spill for some architectures

struct Resized {
  Matrix from;
  Matrix to;  // the target, whose rows are contiguous
  int64 from_rows;
  int64 from_cols;
  int64 rows;
  int64 cols;
  int across;   // number of blocks side by side, across the columns
  int down;     // number of blocks below each other, down the rows
  int threads;  // log2 of the number of a block's threads across the columns; each has one octet of a row
};

struct ResizeParams {
  Resized items[kResized];
};

constexpr int kWords = sizeof(Packed<SCALAR>) / sizeof(uint32);
constexpr uint64 kAligned = sizeof(uint4);

// The bits of an octet, two elements in each word.
struct Words {
  uint32 w[kWords];

  static __device__ Words ones() {
    Words out;
#pragma unroll
    for (int i = 0; i < kWords; ++i) out.w[i] = ~0u;
    return out;
  }
};

__device__ inline Words operator&(const Words& a, const Words& b) {
  Words out;
#pragma unroll
  for (int i = 0; i < kWords; ++i) out.w[i] = a.w[i] & b.w[i];
  return out;
}

__device__ inline Words operator|(const Words& a, const Words& b) {
  Words out;
#pragma unroll
  for (int i = 0; i < kWords; ++i) out.w[i] = a.w[i] | b.w[i];
  return out;
}

// Loads eight elements from any address: reads the one or two aligned 16-byte words that contain them, and shifts the
// elements into place. Rows of odd length allow only narrower loads, which would request each 32-byte sector several
// times.
__device__ inline Words load_shifted(const SCALAR* p) {
  constexpr int kQuad = 4;
  const uint64 address = reinterpret_cast<uint64>(p), offset = address % kAligned;
  const uint4* quads = reinterpret_cast<const uint4*>(address - offset);
  uint32 words[kWords + kQuad] = {};
#pragma unroll
  for (int i = 0; i < kWords + kQuad; i += kQuad) {
    if (i == kWords && offset == 0) continue;
    const uint4 quad = quads[i / kQuad];
    memcpy(words + i, &quad, sizeof(quad));
  }
  // A barrel shifter: every index is known at compile time, so that the words stay in registers.
  const int bits = offset & 2 ? 16 : 0;
  Words out;
#pragma unroll
  for (int i = 0; i < kWords + 3; ++i) {
    words[i] = static_cast<uint32>((static_cast<uint64>(words[i + 1]) << 32 | words[i]) >> bits);
  }
#pragma unroll
  for (int i = 0; i < kWords + 2; ++i) words[i] = offset & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < kWords; ++i) out.w[i] = offset & 8 ? words[i + 2] : words[i];
  return out;
}

// Keeps the elements of an octet from `begin` up to `end`, and replaces the others by zeros.
__device__ inline Words masked(Words octet, int begin, int end) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int low = i * 4 / static_cast<int>(sizeof(SCALAR)), high = (i * 4 + 2) / static_cast<int>(sizeof(SCALAR));
    octet.w[i] &= (begin <= low && low < end ? 0xffffu : 0u) | (begin <= high && high < end ? 0xffff0000u : 0u);
  }
  return octet;
}

template <class Use>
__device__ inline void for_part(int begin, int end, Use use) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    if (begin <= i && i < end) use(i);
  }
}

// The part of a source matrix that is copied, since its target may have fewer rows and columns.
struct Source {
  int64 rows;
  int64 cols;
  int64 col_stride;
  uint64 first;  // first address of the source that is a multiple of 16 bytes
  // Bytes from `first` on at which an octet may begin so that all 16-byte words read for it lie within the source.
  uint64 reach;

  __device__ explicit Source(const Resized& item)
      : rows(item.from_rows < item.rows ? item.from_rows : item.rows),
        cols(item.from_cols < item.cols ? item.from_cols : item.cols),
        col_stride(item.from.col_stride),
        first((reinterpret_cast<uint64>(item.from.data) + kAligned - 1) / kAligned * kAligned),
        reach(0) {
    const uint64 end = reinterpret_cast<uint64>(element<SCALAR>(item.from, item.from_rows - 1, item.from_cols));
    const uint64 least = first + sizeof(Words) + kAligned;
    if (col_stride == 1 && end > least) reach = end - least;
  }

  // Reads eight elements of a row that begins at `line`, from column `col` on; `col` may lie before the row.
  __device__ Words octet(const SCALAR* line, int64 row, int64 col) const {
    const int begin = col < 0 ? static_cast<int>(-col) : 0, end = row < rows ? octet_count(col, cols) : 0;
    const SCALAR* p = line + col;
    if (begin < end && reinterpret_cast<uint64>(p) - first < reach) {
      const Words found = load_shifted(p);
      return end - begin == kOctet ? found : masked(found, begin, end);
    }
    Words found{};
    for_part(begin, end, [&](int i) {
      memcpy(reinterpret_cast<char*>(&found) + i * sizeof(SCALAR), line + (col + i) * col_stride, sizeof(SCALAR));
    });
    return found;
  }
};

__device__ inline void store_octet(SCALAR* to, const Words& octet) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    reinterpret_cast<uint4*>(to)[i / 4] = uint4{octet.w[i], octet.w[i + 1], octet.w[i + 2], octet.w[i + 3]};
  }
}

// Stores the elements of an octet from `begin` up to `end`: by one 16-byte store if these are all eight and aligned,
// else one by one.
__device__ inline void store_part(SCALAR* to, const Words& octet, int begin, int end) {
  if (end - begin == kOctet && reinterpret_cast<uint64>(to) % kAligned == 0) return store_octet(to, octet);
  for_part(begin, end, [&](int i) {
    memcpy(to + i, reinterpret_cast<const char*>(&octet) + i * sizeof(SCALAR), sizeof(SCALAR));
  });
}

// The positions of a thread's octets: octet number `place` of every `step`th row, from row `row` on.
struct Place {
  int64 row;
  int64 step;
  int64 place;
};

// True if a target is contiguous: its octets are then those of one long row, and the last octet of a row ends in the
// next row.
__device__ inline bool is_flat(const Resized& item) {
  return item.to.row_stride == item.cols && item.cols >= kOctet;
}

// Copies a thread's octets if they begin at the same column in all of its rows, at multiples of 16 bytes. kFlat: the
// last octet of a row ends in the next row. The loads of two rows are in flight at a time.
template <bool kFlat>
__device__ inline void resize_column(const Resized& item, const Source& source, const Place& at, int64 col) {
  // Numbers of the octet's elements that belong to its row, and to the next row.
  const int there = octet_count(col, item.cols), rest = kFlat ? kOctet - there : 0;
  const Words mask = masked(Words::ones(), 0, octet_count(col, source.cols));
  const Words next_mask = masked(Words::ones(), there, there + octet_count(0, source.cols < rest ? source.cols : rest));
  // In the first and last rows, and beyond the source's last column, `load_shifted` may read outside the matrix; those
  // octets take the slow path.
  const int64 pitch = item.from.row_stride;
  const bool is_plain = source.col_stride == 1 && source.cols >= kOctet && there + rest == kOctet && col < source.cols;
  const int64 last = is_plain ? source.rows - (rest ? 2 : 1) - (pitch < 2 * kOctet ? 1 : 0) : 0;
  const int64 from_step = at.step * pitch, to_step = at.step * item.to.row_stride;
  const auto whole = [&](const SCALAR* from) {
    const Words octet = load_shifted(from + col) & mask;
    return rest ? octet | (load_shifted(from + pitch - there) & next_mask) : octet;
  };
  const auto copy = [&](const SCALAR* from, SCALAR* to, int64 row) {
    const Words octet = source.octet(from, row, col);
    const bool goes_on = rest && row + 1 < item.rows;
    const int end = there + (goes_on ? rest : 0);
    store_part(to, goes_on ? octet | source.octet(from + pitch, row + 1, -there) : octet, 0, end);
  };
  const SCALAR* from = element<SCALAR>(item.from, at.row, 0);
  SCALAR* to = element<SCALAR>(item.to, at.row, col);
  for (int64 row = at.row; row < item.rows; row += 2 * at.step, from += 2 * from_step, to += 2 * to_step) {
    const int64 second = row + at.step;
    if (0 < row && second < last) {
      const Words octets[] = {whole(from), whole(from + from_step)};
      store_octet(to, octets[0]);
      store_octet(to + to_step, octets[1]);
    } else {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        if (row + i * at.step < item.rows) copy(from + i * from_step, to + i * to_step, row + i * at.step);
      }
    }
  }
}

// Copies a thread's octets of a target whose rows are not aligned to 16 bytes. Octets begin at multiples of 16 bytes,
// the first one perhaps before its row, so that most are written by one store: writing a part of a sector takes memory
// as long as writing all of it.
__device__ inline void resize_ragged(const Resized& item, const Source& source, const Place& at) {
  const uint32 pitch = item.to.row_stride % kOctet;
  const uint32 start = pitch ? static_cast<uint32>(reinterpret_cast<uint64>(item.to.data) / sizeof(SCALAR) % kOctet) : 0;
  for (int64 row = at.row; row < item.rows; row += at.step) {
    const int before = static_cast<int>((start + static_cast<uint32>(row) * pitch) % kOctet);
    const int64 col = at.place * kOctet - before;
    if (col >= item.cols) continue;
    const Words octet = source.octet(element<SCALAR>(item.from, row, 0), row, col);
    store_part(element<SCALAR>(item.to, row, col), octet, col < 0 ? before : 0, octet_count(col, item.cols));
  }
}

__device__ inline void resize_octets(const Resized& item) {
  const int block = blockIdx.x / item.across;  // number of the block down the rows
  if (block >= item.down) return;
  const int high = blockDim.x >> item.threads, beside = (1 << item.threads) - 1;
  const int place = ((blockIdx.x - block * item.across) << item.threads) + (threadIdx.x & beside);
  const Place at{block * high + (static_cast<int>(threadIdx.x) >> item.threads), item.down * high, place};
  const Source source(item);
  const bool begins_whole = reinterpret_cast<uint64>(item.to.data) % sizeof(Words) == 0;
  const uint32 pitch = item.to.row_stride % kOctet;
  if (begins_whole && pitch == 0) {
    const int64 col = at.place * kOctet;
    if (col < item.cols) resize_column<false>(item, source, at, col);
  } else if (begins_whole && is_flat(item) && at.step % kOctet == 0) {
    const uint32 before = static_cast<uint32>(at.row) * pitch % kOctet;
    const int64 col = (at.place + (before > 0)) * kOctet - before;
    if (col < item.cols) resize_column<true>(item, source, at, col);
  } else {
    resize_ragged(item, source, at);
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, lt::kBlocks) resize(const __grid_constant__ lt::ResizeParams p) {
  using namespace lt;
  wait_for_predecessor();
  resize_octets(p.items[blockIdx.y]);
}
