// Overlap with the kernel before on the same stream (programmatic dependent launch).
#pragma once

namespace lt {

// Until a kernel comes here it may run beside the one before it, which may still be writing what it will read; the one
// after it may start, and wait at its own such place. That hides what a launch costs: half a microsecond on an H200.
// Every kernel is launched so, and every one comes here, with all its threads, before it touches global memory that any
// kernel writes. Below compute capability 9.0 it does nothing, as does the launch.
__device__ inline void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace lt
