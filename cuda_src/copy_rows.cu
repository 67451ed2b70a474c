// Copies the rows of up to three arrays, of any element types, into contiguous buffers, in one launch. blockIdx.y is
// the number of the array.

#include "instructions.cuh"
#include "rows.cuh"

namespace lt {

constexpr uint32 kCopied = 3;

// The destination of an array. The rows are split into parts of equally many rows; each part is contiguous in memory.
struct RowBuffers {
  void* data;
  int64 rows;    // number of rows of each part
  int64 width;   // number of bytes of a row
  int64 stride;  // bytes from the beginning of a part to that of the next
};

struct CopyRowsParams {
  const Rows* table;  // if not null, replaces `sources`: read at each launch, so that a captured graph finds new arrays
  Rows sources[kCopied];
  RowBuffers targets[kCopied];
  int64 parts;
};

// Copies lines in words of one type. A line is a row or, where the source has no gaps either, a whole part.
template <class Word>
__device__ inline void copy_lines(const Rows& from, const RowBuffers& to, int64 lines, int64 width, int64 lines_a_part) {
  const int64 words = width / sizeof(Word), step = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < lines * words; i += step) {
    const int64 line = lines == 1 ? 0 : i / words, word = i - line * words;
    const int64 part = lines_a_part == 1 ? line : line / lines_a_part;
    const char* source = static_cast<const char*>(from.data) + line * from.pitch;
    char* target = static_cast<char*>(to.data) + part * to.stride + (line - part * lines_a_part) * width;
    reinterpret_cast<Word*>(target)[word] = reinterpret_cast<const Word*>(source)[word];
  }
}

__device__ inline void copy_array(Rows from, const RowBuffers& to, int64 parts) {
  int64 lines = parts * to.rows, width = to.width, lines_a_part = to.rows;
  if (from.pitch == width) {
    width *= to.rows, from.pitch = width;
    lines = parts, lines_a_part = 1;
  }
  uint64 places = reinterpret_cast<uint64>(from.data) | reinterpret_cast<uint64>(to.data) | width;
  if (lines > 1) places |= from.pitch | to.stride;
  if (places % 16 == 0) {
    copy_lines<uint4>(from, to, lines, width, lines_a_part);
  } else if (places % 4 == 0) {
    copy_lines<uint32>(from, to, lines, width, lines_a_part);
  } else if (places % 2 == 0) {
    copy_lines<unsigned short>(from, to, lines, width, lines_a_part);
  } else {
    copy_lines<unsigned char>(from, to, lines, width, lines_a_part);
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) copy_rows(const lt::CopyRowsParams p) {
  using namespace lt;
  wait_for_predecessor();
  // Unrolled, so that the compiler knows the array's index: indexed at run time, the kernel's parameters would be
  // copied to local memory.
#pragma unroll
  for (uint32 i = 0; i < kCopied; ++i) {
    if (blockIdx.y == i) copy_array(p.table != nullptr ? p.table[i] : p.sources[i], p.targets[i], p.parts);
  }
}
