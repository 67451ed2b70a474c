"""The table of what cuBLASLt gets wrong, at the boundaries of its rows."""

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
BIAS: dict[str, Any] = {"epilogue": Epilogue.BIAS, "version": 120800, "m": 1}


def test_an_ordinary_candidate_is_hit_by_nothing() -> None:
    assert is_known_bad(GOOD) is None
    assert is_known_bad(replace(GOOD, epilogue=Epilogue.GELU_AUX_BIAS)) is None


@pytest.mark.parametrize(
    ("changes", "hit"),
    [
        (TAIL, True),
        (TAIL | {"version": 120602}, False),
        (TAIL | {"version": 120603}, True),
        (TAIL | {"version": 130401}, True),
        (TAIL | {"version": 130402}, False),
        (TAIL | {"capability": 89}, False),
        (TAIL | {"capability": 120}, True),
        (TAIL | {"algo_id": 67}, False),
        (TAIL | {"splitk": 1}, False),
        (TAIL | {"k": 3 * 64}, False),  # no tail
        (TAIL | {"k": 3 * 65 + 1}, False),  # the parts are no multiple of a stage
        (TAIL | {"k": 3 * 128 + 2}, True),
        (TAIL | {"stages": 36}, False),  # parts of 64, stages of 128
        (TAIL | {"stages": 36, "k": 3 * 128 + 2}, True),
        (TAIL | {"stages": 34}, False),
        (TAIL | {"stages": 37}, False),
    ],
)
def test_split_k_drops_the_tail(changes: dict[str, Any], hit: bool) -> None:
    effect = is_known_bad(replace(GOOD, **changes))
    assert (effect is not None) == hit
    assert effect is None or "tail of K" in effect


@pytest.mark.parametrize(
    ("changes", "hit"),
    [
        ({}, True),
        ({"largest_pitch": 2**31 - 1}, False),
        ({"version": 130200}, True),
        ({"version": 130300}, False),
        ({"algo_id": 65}, False),
        ({"capability": 89}, False),
        ({"capability": 100}, False),
    ],
)
def test_leading_dimensions_beyond_two_gibibytes(changes: dict[str, Any], hit: bool) -> None:
    effect = is_known_bad(replace(GOOD, **{"largest_pitch": 2**31, **changes}))
    assert (effect is not None) == hit
    assert effect is None or "leading dimension" in effect


@pytest.mark.parametrize(
    ("changes", "hit"),
    [
        ({}, True),
        ({"largest_span": 2**31 - 1}, False),
        ({"version": 130599}, False),
        ({"version": 140000}, True),
        ({"algo_id": 66}, False),
        ({"algo_id": 67}, False),
        ({"capability": 100}, True),
    ],
)
def test_operands_of_two_to_the_31_elements(changes: dict[str, Any], hit: bool) -> None:
    wide = {"largest_span": 2**31, "algo_id": 68, "version": 130600}
    effect = is_known_bad(replace(GOOD, **{**wide, **changes}))
    assert (effect is not None) == hit
    assert effect is None or "2**31 elements" in effect


@pytest.mark.parametrize("epilogue", [Epilogue.BGRADA, Epilogue.BGRADB])
def test_sums_of_an_operand_with_one_column(epilogue: Epilogue) -> None:
    assert "one column" in str(is_known_bad(replace(GOOD, epilogue=epilogue, n=1)))
    assert is_known_bad(replace(GOOD, epilogue=epilogue, n=2)) is None
    assert is_known_bad(replace(GOOD, epilogue=epilogue, m=1)) is None
    assert is_known_bad(replace(GOOD, epilogue=Epilogue.DRELU_BGRAD, n=1)) is None


@pytest.mark.parametrize(
    ("changes", "hit"),
    [
        (BIAS, True),
        (BIAS | {"version": 120801}, False),
        (BIAS | {"version": 100000}, True),
        (BIAS | {"m": 2}, False),
        (BIAS | {"m": 2, "n": 1}, True),
        (BIAS | {"epilogue": Epilogue.DEFAULT}, False),
        (BIAS | {"epilogue": Epilogue.GELU}, False),
        (BIAS | {"epilogue": Epilogue.RELU_BIAS}, True),
        (BIAS | {"epilogue": Epilogue.GELU_BIAS}, True),
        (BIAS | {"capability": 75, "algo_id": 1}, True),
    ],
)
def test_bias_of_one_row_or_column(changes: dict[str, Any], hit: bool) -> None:
    effect = is_known_bad(replace(GOOD, **changes))
    assert (effect is not None) == hit
    assert effect is None or "bias where M or N is 1" in effect


@pytest.mark.parametrize(
    "epilogue",
    [Epilogue.DRELU, Epilogue.DGELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU_BGRAD, Epilogue.BGRADA, Epilogue.BGRADB],
)
def test_derivatives_at_one_input(epilogue: Epilogue) -> None:
    assert "K is 1" in str(is_known_bad(replace(GOOD, epilogue=epilogue, k=1)))
    assert is_known_bad(replace(GOOD, epilogue=epilogue, k=2)) is None
    assert is_known_bad(replace(GOOD, epilogue=Epilogue.RELU_BIAS, k=1)) is None


@pytest.mark.parametrize("epilogue", [Epilogue.BIAS, Epilogue.GELU_AUX_BIAS, Epilogue.BGRADA])
def test_vectors_below_16_bytes_alignment(epilogue: Epilogue) -> None:
    assert "aligned" in str(is_known_bad(replace(GOOD, epilogue=epilogue, vector_alignment=8)))
    assert is_known_bad(replace(GOOD, epilogue=epilogue, vector_alignment=16)) is None
    assert is_known_bad(replace(GOOD, vector_alignment=1)) is None


@pytest.mark.parametrize(
    ("changes", "hit"),
    [
        ({"d_alignment": 4}, True),
        ({"d_alignment": 8, "c_alignment": 16}, True),
        ({"d_alignment": 16, "c_alignment": 256}, False),
        ({"d_alignment": 4, "c_alignment": 4}, False),  # judged by C's rows, which are no better
        ({"d_alignment": 4, "asked_alignment": 4}, False),
        ({"d_alignment": 2, "asked_alignment": 4}, True),
    ],
)
def test_rows_of_d_that_are_less_aligned_than_those_of_c(changes: dict[str, Any], hit: bool) -> None:
    effect = is_known_bad(replace(GOOD, **changes))
    assert (effect is not None) == hit
    assert effect is None or "misaligned address" in effect


@pytest.mark.parametrize("epilogue", Epilogue)
def test_gelu_is_inaccurate_in_full_fp32_alone(epilogue: Epilogue) -> None:
    full, tf32 = ComputeType.COMPUTE_32F, ComputeType.COMPUTE_32F_FAST_TF32
    effect = is_inaccurate(epilogue, full, DataType.R_32F)
    assert (effect is not None) == ("GELU" in epilogue.name)
    assert effect is None or "5e-6" in effect
    assert is_inaccurate(epilogue, tf32, DataType.R_32F) is None
    assert is_inaccurate(epilogue, full, DataType.R_16F) is None
    assert is_inaccurate(epilogue, full, DataType.R_16BF) is None
    assert is_inaccurate(epilogue, ComputeType.COMPUTE_64F, DataType.R_64F) is None
