"""Known faults of cuBLASLt: the versions, GPUs, problems and algorithms that have them, their effects and sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lt_runtime.cublaslt.enums import ComputeType, DataType, Epilogue

# Number of elements along K that one pipeline stage covers, by STAGES_ID.
_STAGE_K: Final[Mapping[int, int]] = {35: 64, 36: 128}
_MAX_INT32: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """The facts that the conditions of `KNOWN_BAD` test: library, GPU, problem, and configuration of the algorithm.

    Attributes:
        version: the library's, major·10000 + minor·100 + patch.
        capability: the compute capability, major·10 + minor.
        m, n, k: the sizes of the column-major problem that the library sees.
        largest_pitch: the largest leading dimension of an operand, in bytes.
        largest_span: the largest distance between the first and the last element of an operand, in elements.
        vector_alignment: the alignment of the bias or bias gradient, in bytes.
        c_alignment, d_alignment: the alignment that all rows of C, or of D, have in common, in bytes.
        asked_alignment: the algorithm's capability MIN_ALIGNMENT_D_BYTES: the alignment that it requires of D.
        algo_id, splitk, stages: CONFIG_ID, SPLITK_NUM and STAGES_ID of the algorithm.
    """

    version: int
    capability: int
    m: int
    n: int
    k: int
    epilogue: Epilogue
    largest_pitch: int
    largest_span: int
    vector_alignment: int
    c_alignment: int
    d_alignment: int
    asked_alignment: int
    algo_id: int
    splitk: int
    stages: int


def _splitk_drops_tail(c: Candidate) -> bool:
    has_fault = 120603 <= c.version <= 130401 and c.capability >= 90 and c.algo_id == 66
    if not has_fault or c.splitk <= 1 or c.stages not in _STAGE_K:
        return False
    return c.k % c.splitk != 0 and (c.k // c.splitk) % _STAGE_K[c.stages] == 0


KNOWN_BAD: Final[tuple[tuple[Callable[[Candidate], bool], str], ...]] = (
    # Described in NVIDIA's cuBLAS release notes, known and resolved issues.
    (_splitk_drops_tail, "split-K drops the tail of K"),
    # Described in NVIDIA's cuBLAS release notes, known and resolved issues.
    (
        lambda c: c.version <= 130200 and c.capability == 90 and c.algo_id == 66 and c.largest_pitch > _MAX_INT32,
        "wrong results or a fault where a leading dimension spans more than 2**31 - 1 bytes",
    ),
    # Described in issue 3097 of github.com/NVIDIA/raft, for cuBLASLt 13.6. No later version without the fault is known.
    (
        lambda c: c.version >= 130600 and c.algo_id == 68 and c.largest_span > _MAX_INT32,
        "the launch fails where an operand spans 2**31 elements or more",
    ),
    # Faults with K = 1: seen by this package's maintainers in several versions of cuBLASLt. No version without them is
    # known.
    (
        lambda c: c.k == 1 and (c.epilogue.has_derivative or c.epilogue.has_bias_gradient),
        "reads out of bounds, or faults, where K is 1",
    ),
    # Described in issue 1392 of github.com/NVIDIA/apex, for CUDA 11.6. No version without the fault is known.
    (
        lambda c: c.n == 1 and c.epilogue in (Epilogue.BGRADA, Epilogue.BGRADB),
        "illegal memory access in the sum of an operand with one column",
    ),
    # Unwritten sums where M is 1: seen by this package's maintainers on an H200 (cuBLASLt 13.1.0) with algorithm 13, in
    # FP16, for each N from 2 to 64 and K from 256 to 1024 that was tried. No version without the fault is known.
    (
        lambda c: c.m == 1 and c.epilogue in (Epilogue.BGRADA, Epilogue.BGRADB),
        "leaves sums of an operand unwritten where the product has one row",
    ),
    # Described in NVIDIA's cuBLAS release notes, 12.8 update 1.
    (lambda c: c.version <= 120800 and c.epilogue.has_bias and (c.m == 1 or c.n == 1), "wrong bias where M or N is 1"),
    # A misaligned bias faults: seen by this package's maintainers in one version of cuBLASLt. From 13.2 on the library
    # checks the alignment.
    (
        lambda c: (c.epilogue.has_bias or c.epilogue.has_bias_gradient) and c.vector_alignment < 16,
        "a fault where the bias is not aligned to 16 bytes: the heuristic is not told of its alignment",
    ),
    # Misaligned rows of D fault: seen by this package's maintainers on an H200 (cuBLASLt 13.1.0) with algorithm 21, in
    # FP16, BF16 and TF32. No version without the fault is known.
    (
        lambda c: c.d_alignment < min(c.c_alignment, c.asked_alignment),
        "a misaligned address where D's rows are less aligned than C's, by which the library judges them",
    ),
)
"""Faults of single algorithms and epilogues: the condition under which a candidate has the fault, and the effect. The
comment above an entry names the document that describes the fault, or says who saw it.

Faults that no choice of algorithm avoids are handled elsewhere: unchecked alignments and workspaces, heuristic queries
during a capture, ReLU's treatment of NaN."""


def is_known_bad(candidate: Candidate) -> str | None:
    """The effect of the first known fault that affects `candidate`; None if there is none."""
    return next((effect for has_fault, effect in KNOWN_BAD if has_fault(candidate)), None)


def is_inaccurate(epilogue: Epilogue, compute_type: ComputeType, d_type: DataType) -> str | None:
    """Describes the error of an epilogue that is less accurate than its compute type; None if the epilogue is accurate.

    The error was measured on an H200 against FP64. It matters only where D is FP32 and the product is full FP32: the
    rounding to a narrower D hides it, and so does the larger error of a TF32 product.
    """
    if epilogue.has_gelu and compute_type is ComputeType.COMPUTE_32F and d_type is DataType.R_32F:
        return "cuBLASLt's GELU is off by 5e-6, where FP32 arithmetic is off by 5e-7"
    return None
