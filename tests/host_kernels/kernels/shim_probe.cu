// Small kernels that show what the shim does, some of them wrong on purpose.

#include "vector.cuh"

struct ShimProbeParams {
  float* out;  // one a thread of the grid
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

// The turn that each thread had.
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

// Threads that have returned count as arrived.
extern "C" __global__ void early_return(const ShimProbeParams p) {
  __shared__ float shared[256];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (threadIdx.x >= blockDim.x / 2) return;
  __syncthreads();
  p.out[thread_of_grid()] = shared[blockDim.x - 1 - threadIdx.x];
}

// Only the first block writes what every block reads.
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
  const float* volatile start = shared;  // so that the compiler does not see the bounds
  p.out[thread_of_grid()] = start[threadIdx.x];
}

extern "C" __global__ void beyond_the_array(const ShimProbeParams p) { p.out[thread_of_grid() + 1] = 1.0f; }

extern "C" __global__ void misaligned_vector(const ShimProbeParams p) {
  p.out[thread_of_grid()] = lt::load_packed(p.out + 1).pairs[0].x;
}
