// Kernels that test the CPU shim (the g++ stand-in for CUDA's blocks, warps and barriers). Some of them break CUDA's
// rules on purpose: the shim has to report these.

#include "instructions.cuh"

struct ShimProbeParams {
  float* out;  // output: one element for each thread of the grid
  unsigned* count;
};

namespace {

__device__ unsigned thread_of_grid() {
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  return (block * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

}  // namespace

extern "C" __global__ void indices(const ShimProbeParams p) {
  p.out[thread_of_grid()] = static_cast<float>(((blockIdx.y * 10 + blockIdx.x) * 10 + threadIdx.y) * 10 + threadIdx.x);
}

// Records the position of each thread in the order of execution.
extern "C" __global__ void turns(const ShimProbeParams p) {
  p.out[thread_of_grid()] = static_cast<float>(atomicAdd(p.count, 1u));
}

extern "C" __global__ void mirror(const ShimProbeParams p) {
  __shared__ float shared[256];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  p.out[thread_of_grid()] = shared[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void missing_barrier(const ShimProbeParams p) {
  __shared__ float shared[256];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  p.out[thread_of_grid()] = shared[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void divergent_barrier(const ShimProbeParams p) {
  if (threadIdx.x < 3) {
    __syncthreads();
  } else {
    p.out[thread_of_grid()] = 1.0f;
    __syncthreads();
  }
}

// Some threads return early: at a barrier they count as arrived.
extern "C" __global__ void early_return(const ShimProbeParams p) {
  __shared__ float shared[256];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (threadIdx.x >= blockDim.x / 2) return;
  __syncthreads();
  p.out[thread_of_grid()] = shared[blockDim.x - 1 - threadIdx.x];
}

// Counts the threads whose numbers are multiples of three, and then those whose numbers are multiples of five.
extern "C" __global__ void votes(const ShimProbeParams p) {
  const int threes = __syncthreads_count(threadIdx.x % 3 == 0), fives = __syncthreads_count(threadIdx.x % 5 == 0);
  p.out[thread_of_grid()] = static_cast<float>(100 * threes + fives);
}

// Every block reads its own shared memory, but only the first block has written to it.
extern "C" __global__ void stale_shared_memory(const ShimProbeParams p) {
  __shared__ float shared;
  if (blockIdx.x == 0) shared = 5.0f;
  __syncthreads();
  p.out[thread_of_grid()] = shared;
}

extern "C" __global__ void beyond_shared_memory(const ShimProbeParams p) {
  __shared__ float shared[8];
  shared[threadIdx.x % 8] = 1.0f;
  __syncthreads();
  const float* volatile start = shared;  // read from memory, so that the compiler does not see the bounds
  p.out[thread_of_grid()] = start[threadIdx.x];
}

extern "C" __global__ void beyond_the_array(const ShimProbeParams p) { p.out[thread_of_grid() + 1] = 1.0f; }

extern "C" __global__ void misaligned_vector(const ShimProbeParams p) {
  p.out[thread_of_grid()] = lt::load_packed(p.out + 1).pairs[0].x;
}

extern "C" __global__ void __launch_bounds__(256) at_most_256_threads(const ShimProbeParams p) {
  p.out[thread_of_grid()] = static_cast<float>(threadIdx.x);
}

namespace {

__device__ unsigned lane() { return (threadIdx.y * blockDim.x + threadIdx.x) % 32; }

}  // namespace

// Computes for each thread the sum over its warp.
extern "C" __global__ void warp_sum(const ShimProbeParams p) {
  float sum = static_cast<float>(thread_of_grid());
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
  p.out[thread_of_grid()] = sum;
}

// Tries every kind of shuffle in segments of eight lanes: 10000 xor + 100 down + from.
extern "C" __global__ void segments(const ShimProbeParams p) {
  const unsigned across = __shfl_xor_sync(0xFFFFFFFF, lane(), 3, 8);
  const int down = __shfl_down_sync(0xFFFFFFFF, static_cast<int>(lane()), 2, 8);
  // Reads the value of the segment's sixth lane.
  const float from = __shfl_sync(0xFFFFFFFF, static_cast<float>(lane()), 13, 8);
  p.out[thread_of_grid()] = static_cast<float>(10000 * across + 100 * down) + from;
}

// A lane that would read beyond its own segment keeps its value.
extern "C" __global__ void beyond_the_segment(const ShimProbeParams p) {
  p.out[thread_of_grid()] = static_cast<float>(__shfl_xor_sync(0xFFFFFFFF, lane(), 8, 8));
}

// The halves of a warp take different branches, each with a mask of its own.
extern "C" __global__ void parted_halves(const ShimProbeParams p) {
  float value = static_cast<float>(lane());
  if (lane() < 16) {
    value = __shfl_sync(0x0000FFFF, value, 5);
  } else {
    for (int i = 0; i < 3; ++i) value = __shfl_down_sync(0xFFFF0000, value, 1);
  }
  p.out[thread_of_grid()] = value;
}

// Wrong on purpose: a shuffle does not wait for lanes that have returned, but to read a value from one is an error.
extern "C" __global__ void shuffle_of_returned_lanes(const ShimProbeParams p) {
  if (threadIdx.x >= 12) return;
  p.out[thread_of_grid()] = __shfl_xor_sync(0xFFFFFFFF, 1.0f, 8);
}

extern "C" __global__ void shuffle_outside_the_mask(const ShimProbeParams p) {
  if (lane() < 8) p.out[thread_of_grid()] = __shfl_sync(0x000000FF, 1.0f, lane() + 1);
}

extern "C" __global__ void shuffle_of_no_width(const ShimProbeParams p) {
  p.out[thread_of_grid()] = __shfl_sync(0xFFFFFFFF, 1.0f, 0, 12);
}

// Lanes pass values to each other through shared memory.
extern "C" __global__ void warp_barrier(const ShimProbeParams p) {
  __shared__ float shared[256];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncwarp();
  p.out[thread_of_grid()] = shared[threadIdx.x ^ 15];
}

// Wrong on purpose: __syncwarp orders the threads of one warp, but a thread here reads what another warp has written.
extern "C" __global__ void barrier_of_warps_alone(const ShimProbeParams p) {
  __shared__ float shared[256];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncwarp();
  p.out[thread_of_grid()] = shared[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void divergent_shuffle(const ShimProbeParams p) {
  float value = 1.0f;
  if (threadIdx.x < 3) {
    value = __shfl_sync(0xFFFFFFFF, value, 0);
  } else {
    value = __shfl_sync(0xFFFFFFFF, value, 0);
  }
  p.out[thread_of_grid()] = value;
}

extern "C" __global__ void shuffle_by_some_lanes(const ShimProbeParams p) {
  if (threadIdx.x < 3) p.out[thread_of_grid()] = __shfl_sync(0xFFFFFFFF, 1.0f, 0);
  __syncthreads();
}

extern "C" __global__ void shuffle_with_different_masks(const ShimProbeParams p) {
  p.out[thread_of_grid()] = __shfl_sync(threadIdx.x < 3 ? 0x0000000F : 0x0000FFFF, 1.0f, 0);
}

extern "C" __global__ void shuffle_without_itself(const ShimProbeParams p) {
  p.out[thread_of_grid()] = __shfl_sync(0x00000001, 1.0f, 0);
}

// The first of two warps hands numbers over to the second, twice through the same memory, by barriers of both.
extern "C" __global__ void named_barriers(const ShimProbeParams p) {
  __shared__ float shared[32];
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    shared[lane] = static_cast<float>(lane);
    lt::pass_barrier(1, 64);
    lt::wait_at_barrier(2, 64);
    shared[lane] = static_cast<float>(100 + lane);
    lt::pass_barrier(1, 64);
    p.out[thread_of_grid()] = 0.0f;
  } else {
    lt::wait_at_barrier(1, 64);
    const float first = shared[31 - lane];
    lt::pass_barrier(2, 64);
    lt::wait_at_barrier(1, 64);
    p.out[thread_of_grid()] = first + shared[31 - lane];
  }
}

extern "C" __global__ void named_barrier_without_all(const ShimProbeParams p) {
  if (threadIdx.x < 32) lt::wait_at_barrier(1, 64);
  p.out[thread_of_grid()] = 1.0f;
}

extern "C" __global__ void named_barrier_that_nobody_awaits(const ShimProbeParams p) {
  if (threadIdx.x < 32) lt::pass_barrier(2, 64);
  p.out[thread_of_grid()] = 1.0f;
}

extern "C" __global__ void named_barrier_of_two_sizes(const ShimProbeParams p) {
  lt::wait_at_barrier(1, threadIdx.x < 32 ? 64 : 96);
  p.out[thread_of_grid()] = 1.0f;
}
