// Running a kernel's grid on the CPU, as the kernels see it. Kept light: every variant of every kernel includes it.
#pragma once

#include <vector_types.h>

#include <array>

extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

// What one thread of the grid does.
struct Body {
  void (*run)(const void* context);
  const void* context;

  void operator()() const { run(context); }
};

// Runs a grid whose blocks have `shared` bytes besides what their kernel declares. Says what is wrong, or null; the text
// is good until the next call.
const char* run_grid(Body body, uint3 grid, uint3 block, unsigned shared, unsigned order_seed);

// The current block's `shared` bytes, aligned to 16.
void* dynamic_shared();

void sync_threads(const char* file, int line);

// A barrier with a number from 1 to 15, which opens when `threads` threads have come to it, waiting or passing by.
void wait_at_barrier(const char* file, int line, int number, int threads);
void pass_barrier(const char* file, int line, int number, int threads);

constexpr unsigned kWarp = 32;

// A thread's place among the threads of its block, x fastest.
inline unsigned thread_index() { return threadIdx.y * blockDim.x + threadIdx.x; }

// Waits for the lanes of its warp that `mask` names, and reads the 32 bits that lane `source` hands over. All ones, a
// NaN, come from a lane that has returned, that `mask` does not name, or that no warp has.
unsigned exchange(const char* file, int line, unsigned mask, unsigned source, unsigned bits);

// The words of each lane of a warp.
using Gathered = std::array<std::array<unsigned, 8>, kWarp>;

// Waits for all lanes of its warp, each of which lays down `count` words, at most eight, and gives those of all. They stay
// until the lane comes to its next gathering but one.
const Gathered& gather(const char* file, int line, const unsigned* words, unsigned count);

}  // namespace shim
