"""The table of cuBLASLt's known faults, tested at the boundaries of each entry's condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_runtime.cublaslt import Candidate, ComputeType, DataType, Epilogue, is_inaccurate, is_known_bad

GOOD = Candidate(
    version=130100,
    capability=90,
    m=512,
    n=256,
    k=1024,
    epilogue=Epilogue.DEFAULT,
    largest_pitch=4096,
    largest_span=1 << 20,
    vector_alignment=256,
    c_alignment=256,
    d_alignment=256,
    asked_alignment=16,
    algo_id=66,
    splitk=1,
    stages=35,
)
TAIL: dict[str, Any] = {"k": 3 * 64 + 1, "splitk": 3}
PITCH: dict[str, Any] = {"largest_pitch": 2**31}
SPAN: dict[str, Any] = {"largest_span": 2**31, "algo_id": 68, "version": 130600}
BIAS: dict[str, Any] = {"epilogue": Epilogue.BIAS, "version": 120800, "m": 1}
DERIVATIVES = (Epilogue.DRELU, Epilogue.DGELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU_BGRAD)
SUMS = (Epilogue.BGRADA, Epilogue.BGRADB)

AFFECTED: dict[str, list[dict[str, Any]]] = {
    "tail of K": [
        *(TAIL | change for change in ({}, {"version": 120603}, {"version": 130401}, {"capability": 120})),
        TAIL | {"k": 3 * 128 + 2},
        TAIL | {"stages": 36, "k": 3 * 128 + 2},
    ],
    "leading dimension": [PITCH, PITCH | {"version": 130200}],
    "2**31 elements": [SPAN, SPAN | {"version": 140000}, SPAN | {"capability": 100}],
    "K is 1": [{"epilogue": each, "k": 1} for each in (*DERIVATIVES, *SUMS)],
    "one column": [{"epilogue": each, "n": 1} for each in SUMS],
    "one row": [{"epilogue": each, "m": 1} for each in SUMS],
    "bias where M or N is 1": [
        *(BIAS | change for change in ({}, {"version": 100000}, {"m": 2, "n": 1}, {"capability": 75, "algo_id": 1})),
        *(BIAS | {"epilogue": each} for each in (Epilogue.RELU_BIAS, Epilogue.GELU_BIAS)),
    ],
    "not aligned to 16 bytes": [
        {"epilogue": each, "vector_alignment": 8} for each in (Epilogue.BIAS, Epilogue.GELU_AUX_BIAS, Epilogue.BGRADA)
    ],
    "misaligned": [{"d_alignment": 4}, {"d_alignment": 8, "c_alignment": 16}, {"d_alignment": 2, "asked_alignment": 4}],
}
SOUND: list[dict[str, Any]] = [
    {},
    {"epilogue": Epilogue.GELU_AUX_BIAS},
    *(TAIL | {"version": version} for version in (120602, 130402)),
    *(TAIL | change for change in ({"capability": 89}, {"algo_id": 67}, {"splitk": 1})),
    TAIL | {"k": 3 * 64},  # K is a multiple of a stage's depth, so that there is no tail.
    TAIL | {"k": 3 * 65 + 1},  # The parts into which split-K divides K are no multiples of a stage's depth.
    TAIL | {"stages": 36},  # Stages of depth 128 are longer than the parts of K, of 64.
    *(TAIL | {"stages": stages} for stages in (34, 37)),
    *(PITCH | change for change in ({"largest_pitch": 2**31 - 1}, {"version": 130300}, {"algo_id": 65})),
    *(PITCH | {"capability": capability} for capability in (89, 100)),
    *(SPAN | change for change in ({"largest_span": 2**31 - 1}, {"version": 130599}, {"algo_id": 66}, {"algo_id": 67})),
    *({"epilogue": each, "k": 2} for each in (*DERIVATIVES, *SUMS)),
    {"epilogue": Epilogue.RELU_BIAS, "k": 1},
    *({"epilogue": each, "m": 2, "n": 2} for each in SUMS),
    {"epilogue": Epilogue.DRELU_BGRAD, "m": 1, "n": 1},
    *(BIAS | change for change in ({"version": 120801}, {"m": 2})),
    *(BIAS | {"epilogue": each} for each in (Epilogue.DEFAULT, Epilogue.GELU)),
    *({"epilogue": each, "vector_alignment": 16} for each in (Epilogue.BIAS, Epilogue.BGRADA)),
    {"vector_alignment": 1},
    {"d_alignment": 16, "c_alignment": 256},
    # cuBLASLt checks the alignment of C's rows but not of D's, which is harmless where C's rows are aligned no better.
    {"d_alignment": 4, "c_alignment": 4},
    {"d_alignment": 4, "asked_alignment": 4},
]


@pytest.mark.parametrize(("effect", "changes"), [(effect, each) for effect, rows in AFFECTED.items() for each in rows])
def test_an_affected_candidate_is_refused(effect: str, changes: dict[str, Any]) -> None:
    assert effect in str(is_known_bad(replace(GOOD, **changes)))


@pytest.mark.parametrize("changes", SOUND)
def test_a_candidate_beyond_the_boundary_is_accepted(changes: dict[str, Any]) -> None:
    assert is_known_bad(replace(GOOD, **changes)) is None


@pytest.mark.parametrize("epilogue", Epilogue)
def test_only_gelu_in_full_fp32_is_inaccurate(epilogue: Epilogue) -> None:
    full, tf32 = ComputeType.COMPUTE_32F, ComputeType.COMPUTE_32F_FAST_TF32
    assert ("5e-6" in str(is_inaccurate(epilogue, full, DataType.R_32F))) == ("GELU" in epilogue.name)
    others = (tf32, DataType.R_32F), (full, DataType.R_16F), (full, DataType.R_16BF), (full, DataType.R_64F)
    assert [is_inaccurate(epilogue, *other) for other in others] == [None] * 4
