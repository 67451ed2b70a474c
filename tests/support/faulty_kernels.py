"""A kernel with the fault that one of compute-sanitizer's tools has to find: `-m tests.support.faulty_kernels TOOL`."""

from __future__ import annotations

import sys

import cupy as cp

BODIES = {
    "memcheck": "out[1 << 24] = 1.0f;",  # beyond the end
    "racecheck": """
        __shared__ float shared[256];
        shared[threadIdx.x] = out[threadIdx.x];
        out[threadIdx.x] = shared[255 - threadIdx.x];  // without a barrier
    """,
    "initcheck": "out[threadIdx.x] = in[threadIdx.x];",  # never written
}


def launch(tool: str) -> None:
    """Launches it once; the fault itself, and what it does to the driver, are the tool's business."""
    code = f'extern "C" __global__ void faulty_kernel(const float* in, float* out) {{ {BODIES[tool]} }}'
    out = cp.zeros(256, cp.float32)
    fresh = cp.cuda.Memory(1 << 20)  # not of the pool, whose memory may have been written
    pointer = cp.cuda.MemoryPointer(fresh, 0)
    cp.RawKernel(code, "faulty_kernel")((1,), (256,), (cp.ndarray(256, cp.float32, pointer), out))
    cp.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    launch(sys.argv[1])
