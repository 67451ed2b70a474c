// Where the rows of an array lie in memory. A step's graph finds the arrays of a batch in a table of these structs,
// which the host writes before a launch.
#pragma once

#include "vector.cuh"

namespace lt {

// The address of the first row, and the distance in bytes from one row's beginning to the next.
struct Rows {
  const void* data;
  int64 pitch;
};

}  // namespace lt
