"""A kernel with a fault for one of compute-sanitizer's tools: `python -m tests.support.faulty_kernels TOOL`."""

from __future__ import annotations

import sys

import cupy as cp

BODIES = {
    "memcheck": "out[1 << 24] = 1.0f;",  # this kernel writes beyond the end of the array
    "racecheck": """
        __shared__ float shared[256];
        shared[threadIdx.x] = out[threadIdx.x];
        out[threadIdx.x] = shared[255 - threadIdx.x];  // without a barrier
    """,
    "initcheck": "out[threadIdx.x] = in[threadIdx.x];",  # this kernel reads memory that was never written
}


def launch(tool: str) -> None:
    """Launches the kernel once. The tool must report the fault; errors of the driver do not matter."""
    code = f'extern "C" __global__ void faulty_kernel(const float* in, float* out) {{ {BODIES[tool]} }}'
    out = cp.zeros(256, cp.float32)
    # The array is not from CuPy's pool, whose memory may have been written before, which would hide the fault.
    fresh = cp.cuda.Memory(1 << 20)
    pointer = cp.cuda.MemoryPointer(fresh, 0)
    cp.RawKernel(code, "faulty_kernel")((1,), (256,), (cp.ndarray(256, cp.float32, pointer), out))
    cp.cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    launch(sys.argv[1])
