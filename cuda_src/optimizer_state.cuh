// The state that an optimizer keeps on the device from one step to the next, apart from the moments.
#pragma once

#include "vector.cuh"

namespace lt {

struct alignas(16) OptimizerState {
  uint32 steps;          // updates done
  uint32 skipped;        // number of updates left out because a gradient was NaN or infinite
  uint32 nonfinite;      // number of threads that have seen a NaN or infinite gradient since the last update
  float norm;            // norm of all unscaled gradients at the last update
  uint32 update_ticket;  // number of counters of optimizer.cu that have counted all of their blocks; zero between launches
  uint32 norm_ticket;    // number of blocks of gradient_norm that have finished; zero between launches
  uint32 reserved0;
  uint32 reserved1;
};

}  // namespace lt
