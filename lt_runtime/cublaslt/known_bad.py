"""What cuBLASLt is known to get wrong, as data: where it strikes, what happens, who says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lt_runtime.cublaslt.enums import Epilogue

_STAGE_K: Final[Mapping[int, int]] = {35: 64, 36: 128}  # K that one pipeline stage takes, by stages id
_MAX_INT32: Final = 2**31 - 1
_ALIGNMENT: Final = 16
_DERIVATIVES: Final = frozenset((Epilogue.DRELU, Epilogue.DGELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU_BGRAD))
_BIASES: Final = frozenset(
    (Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.RELU_AUX_BIAS, Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS)
)
_BIAS_GRADIENTS: Final = frozenset((Epilogue.DRELU_BGRAD, Epilogue.DGELU_BGRAD, Epilogue.BGRADA, Epilogue.BGRADB))


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the conditions look at: the library, the GPU, the problem, and the algorithm's configuration.

    Attributes:
        version: of the library, major·10000 + minor·100 + patch.
        capability: compute capability, major·10 + minor.
        m, n, k: of the column-major problem that the library sees.
        largest_pitch: leading dimension times element size, the largest of the operands', in bytes.
        largest_span: elements from the first to the last of an operand, the largest of the operands'.
        vector_alignment: of the bias or bias gradient's address.
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
    algo_id: int
    splitk: int
    stages: int


@dataclass(frozen=True, slots=True)
class KnownBad:
    """One fault.

    Attributes:
        first, last: versions of the library, both included.
        capabilities: compute capabilities, both included, major·10 + minor.
        condition: which problems and algorithms it strikes.
        effect: what happens.
        source: who says so.
    """

    first: int
    last: int
    capabilities: tuple[int, int]
    condition: Callable[[Candidate], bool]
    effect: str
    source: str

    def strikes(self, candidate: Candidate) -> bool:
        """Whether a candidate is hit."""
        low, high = self.capabilities
        in_range = self.first <= candidate.version <= self.last and low <= candidate.capability <= high
        return in_range and self.condition(candidate)


_ANY: Final = (0, 999)
_LATEST: Final = 999999


def _splitk_drops_tail(c: Candidate) -> bool:
    if c.algo_id != 66 or c.splitk <= 1 or c.stages not in _STAGE_K:
        return False
    return c.k % c.splitk != 0 and (c.k // c.splitk) % _STAGE_K[c.stages] == 0


KNOWN_BAD: Final = (
    KnownBad(
        120603,
        130401,
        (90, 999),
        _splitk_drops_tail,
        "split-K drops the tail of K",
        "NVIDIA cuBLAS release notes, known and resolved issues",
    ),
    KnownBad(
        0,
        130200,
        (90, 90),
        lambda c: c.algo_id == 66 and c.largest_pitch > _MAX_INT32,
        "wrong results or a fault where a leading dimension spans more than 2**31 - 1 bytes",
        "NVIDIA cuBLAS release notes, known and resolved issues",
    ),
    KnownBad(
        130600,
        _LATEST,
        _ANY,
        lambda c: c.algo_id == 68 and c.largest_span > _MAX_INT32,
        "the launch fails where an operand spans 2**31 elements or more",
        "github.com/NVIDIA/raft issue 3097 (13.6; no version is known to be cured)",
    ),
    KnownBad(
        0,
        _LATEST,
        _ANY,
        lambda c: c.k == 1 and (c.epilogue in _DERIVATIVES or c.epilogue in _BIAS_GRADIENTS),
        "reads out of bounds, or faults, where K is 1",
        "seen in several versions; no version is known to be cured",
    ),
    KnownBad(
        0,
        _LATEST,
        _ANY,
        lambda c: c.n == 1 and c.epilogue in (Epilogue.BGRADA, Epilogue.BGRADB),
        "illegal memory access in the sum of an operand with one column",
        "github.com/NVIDIA/apex issue 1392 (CUDA 11.6; no version is known to be cured)",
    ),
    KnownBad(
        0,
        120800,
        _ANY,
        lambda c: c.epilogue in _BIASES and (c.m == 1 or c.n == 1),
        "wrong bias where M or N is 1",
        "NVIDIA cuBLAS release notes, 12.8 update 1",
    ),
    KnownBad(
        0,
        _LATEST,
        _ANY,
        lambda c: (c.epilogue in _BIASES or c.epilogue in _BIAS_GRADIENTS) and c.vector_alignment < _ALIGNMENT,
        "a fault where the bias is not aligned to 16 bytes: the heuristic is not told of its alignment",
        "seen in one version; unchecked by the library before 13.2",
    ),
)
"""Every fault of one algorithm or epilogue. What no choice of algorithm avoids is refused or worked round where it
arises: unchecked alignments and workspaces, heuristics during a capture, ReLU's treatment of NaN."""


def is_known_bad(candidate: Candidate) -> str | None:
    """The effect of the first fault that `candidate` is hit by; None if it is hit by none."""
    return next((fault.effect for fault in KNOWN_BAD if fault.strikes(candidate)), None)
