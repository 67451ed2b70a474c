// The instructions of cuda_src/mma.cuh, given by the CPU: the same fragments in the same lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

namespace shim {

// One of the two 16-bit numbers of a word, the first in the low half.
template <class T>
inline float number_of(unsigned word, unsigned place) {
  T pair[2];
  memcpy(static_cast<void*>(pair), &word, sizeof(pair));
  return static_cast<float>(pair[place]);
}

// mma.m16n8k16: sums in FP32, one product after another.
template <class T>
inline void multiply_add(const char* file, int line, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned words[] = {a[0], a[1], a[2], a[3], b0, b1};
  const Gathered& lanes = gather(file, line, words, 6);
  const unsigned self = thread_index() % kWarp;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = self / 4 + i / 2 * 8, col = self % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned lane_in_group = k % 8 / 2;
      const float left = number_of<T>(lanes[row % 8 * 4 + lane_in_group][row / 8 + k / 8 * 2], k % 2);
      const float right = number_of<T>(lanes[col * 4 + lane_in_group][4 + k / 8], k % 2);
      c[i] += left * right;
    }
  }
}

// ldmatrix.x4: lane l hands over the address of row l % 8 of the 8 × 8 matrix l / 8. Each row is 16 bytes.
template <bool TRANSPOSED>
inline void load_matrices(const char* file, int line, unsigned (&out)[4], const void* row) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(row);
  if (address % 16 != 0) {
    fprintf(stderr, "%s:%d: a row of a matrix is not aligned to 16 bytes\n", file, line);
    abort();
  }
  unsigned words[2];
  memcpy(words, &address, sizeof(address));
  const Gathered& lanes = gather(file, line, words, 2);
  const unsigned self = thread_index() % kWarp;
  for (unsigned j = 0; j < 4; ++j) {
    unsigned short pair[2];
    for (unsigned e = 0; e < 2; ++e) {
      const unsigned of_row = TRANSPOSED ? self % 4 * 2 + e : self / 4, of_col = TRANSPOSED ? self / 4 : self % 4 * 2 + e;
      uintptr_t from;
      memcpy(&from, lanes[8 * j + of_row].data(), sizeof(from));
      pair[e] = reinterpret_cast<const unsigned short*>(from)[of_col];
    }
    memcpy(&out[j], pair, sizeof(pair));
  }
}

// cp.async: sixteen bytes, those beyond `bytes` being zero. Here they are there at once. The sanitizers check the alignment
// of references.
inline void copy_async(void* shared, const void* global, int bytes) {
  uint4& to = *static_cast<uint4*>(shared);
  const uint4& from = *static_cast<const uint4*>(global);
  to = uint4{};
  memcpy(&to, &from, static_cast<size_t>(bytes));
}

}  // namespace shim
