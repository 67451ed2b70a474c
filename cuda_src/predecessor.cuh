// Overlap with the previous kernel on the same stream (programmatic dependent launch).
#pragma once

namespace lt {

// Before this call a kernel may run beside its predecessor, which may still be writing what the kernel will read. After
// it the next kernel may start, and will wait at its own call. That hides the cost of a launch: half a microsecond on an
// H200. Every kernel is launched with the attribute for it, and all threads of every kernel make this call before they
// touch global memory that any kernel writes. Below compute capability 9.0 the attribute and the call do nothing.
__device__ inline void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace lt
