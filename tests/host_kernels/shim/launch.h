// Running a kernel's grid on the CPU, as the kernels see it. Kept light: every variant of every kernel includes it.
#pragma once

#include <vector_types.h>

// Threads of a block are threads of the process under ThreadSanitizer, fibers of one thread otherwise.
#ifdef __SANITIZE_THREAD__
#define LT_PER_THREAD thread_local
#else
#define LT_PER_THREAD
#endif

extern LT_PER_THREAD uint3 threadIdx;
extern uint3 blockIdx, blockDim, gridDim;

namespace shim {

// What one thread of the grid does.
struct Body {
  void (*run)(const void* context);
  const void* context;

  void operator()() const { run(context); }
};

// Runs a grid. Says what is wrong, or null; the text is good until the next call.
const char* run_grid(Body body, uint3 grid, uint3 block, unsigned order_seed);

void sync_threads(const char* file, int line);

}  // namespace shim
