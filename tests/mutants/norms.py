"""Faults in LayerNorm and RMSNorm: kernels, launches and operations."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_KERNELS: Final = "tests/host_kernels/test_norm.py"
_LAYER: Final = f"{_KERNELS}::test_norms[float32-float32-layer]"
_CALLS: Final = "tests/cpu/test_fake_gpu_norm.py"

FAULTS: Final[Table] = {
    "cuda_src/norm.cu": {
        "digits of the variance cancel": ("shift = total[0] / ", "shift = 0.0f * total[0] / ", _LAYER),
        "elements beyond the last column count in the variance": (
            "ALIGNED || i < at.count(k) ? mean : 0.0f",
            "mean",
            _LAYER,
        ),
        "sums of consecutive rows share memory": ("turn ^= 1;", "turn = 1;", _LAYER),
        "the variance of a row with NaN is 0": (
            "(variance < 0.0f ? 0.0f : variance)",
            "fmaxf(variance, 0.0f)",
            f"{_KERNELS}::test_special_rows[float32-float32-rms]",
        ),
        "a long row is read again without its residual": (
            "load(p.add.data ? p.total : p.x, at, false);",
            "load(p.x, at, false);",
            f"{_KERNELS}::test_wide_rows[True-float32-float32-layer-shape4]",
        ),
        "the gradient that is added is that of the next octets": ("dx += added[k];", "dx += added[k ^ 1];", _LAYER),
        "a block's sums are those of its first row": ("if (blockDim.y == 1) {", "if (threadIdx.y == 0) {", _LAYER),
        "sums in shared memory are lost": (
            "p.holds_sums && at < end",
            "p.holds_sums && at < 0",
            f"{_KERNELS}::test_wide_rows[True-float32-float32-layer-shape3]",
        ),
        "some blocks' sums are added twice": (
            "part < parts; part += blockDim.y",
            "part < parts; part += blockDim.y - 1",
            f"{_CALLS}::test_sums_of_many_blocks[rms_norm]",
        ),
    },
    "lt_runtime/kernels/norm.py": {
        "a norm moves vectors of rows that are not aligned": (
            "are_aligned(norm.dtype, *matrices)",
            "are_aligned(norm.dtype, matrices[0])",
            f"{_CALLS}::test_one_matrix_is_not_aligned[add-layer_norm]",
        ),
        "a norm moves vectors of a weight that is not aligned": (
            " and vectors % VECTOR_BYTES == 0",
            "",
            f"{_CALLS}::test_an_unaligned_weight[rms_norm]",
        ),
        "gradients of weights do not accumulate": (
            "pitch=pitch, accumulate=accumulate",
            "pitch=pitch, accumulate=False",
            f"{_CALLS}::test_same_buffers_with_other_contents[flat-apart-rms_norm]",
        ),
    },
    "lt_runtime/ops/norm.py": {
        "y over the residual is refused": (
            "for operand in (_X, _ADD) for",
            "for operand in (_X,) for",
            f"{_CALLS}::test_same_buffers_with_other_contents[flat-over operands-layer_norm]",
        ),
        "backward reads x without its residual": (
            "NormContext(x if add is None else total,",
            "NormContext(x,",
            "tests/cpu/ops/test_norm.py::test_values[True-float32-float32-rms_norm]",
        ),
        "a gradient is made for a bias that does not exist": (
            "    if not ctx.has_bias:",
            "    if ctx.has_bias is None:",
            "tests/cpu/ops/test_norm.py::test_a_norm_without_bias",
        ),
    },
}
