"""The cases of the suite `narrow`, and what it shows of rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks import narrow, report
from benchmarks.__main__ import options_of
from benchmarks.copies import Ceiling
from benchmarks.narrow import CASES, SUITE, findings, least_bytes
from benchmarks.splits import chain_of
from benchmarks.steps import StepCase
from benchmarks.timing import Timing
from lt_runtime.kernels.mlp import MAX_WIDTH

BY_NAME = {case.name: case for case in CASES}
NAMED = "64x3 2^18 BF16"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_is_a_narrow_mlp(case: StepCase) -> None:
    passes = chain_of(case).narrow
    assert passes is not None
    assert (passes.rows, passes.dims) == (case.rows, case.dims)
    assert max(case.dims) <= MAX_WIDTH


def test_names_tell_cases_apart() -> None:
    assert len({*SUITE.order}) == len(CASES)
    assert NAMED in SUITE.order


def test_every_width_has_depths_and_batches_in_order() -> None:
    shapes = [(max(case.dims), len(case.dims) - 2, case.rows) for case in CASES]
    assert shapes == sorted(shapes)
    for width in (16, 32, 64, 128):
        assert {1, 3, 5, 7} <= {hidden for cols, hidden, rows in shapes if (cols, rows) == (width, 1 << 18)}
    assert {each for each in shapes if each[2] == 1 << 20} == {(32, 3, 1 << 20), (64, 3, 1 << 20), (128, 2, 1 << 20)}


# The least times, by hand.


def test_the_named_case_by_hand() -> None:
    case, rows = BY_NAME[NAMED], 262_144
    assert case.dims == (64, 64, 64, 64, 3)
    parameters = 3 * (64 * 64 + 64) + (64 * 3 + 3)
    assert parameters == 12_675
    # x and targets; then BF16 parameters, FP32 masters and two FP32 moments, each read and written
    assert least_bytes(case) == rows * 64 * 2 + rows * 3 * 2 + parameters * 2 * (2 + 4 + 4 + 4) == 35_482_196
    forward, input_gradients = 3 * 4096 + 192, 2 * 4096 + 192  # multiplications of a row; weight gradients as forward
    assert case.flops == 2 * rows * (2 * forward + input_gradients) == 17_481_859_072


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_least_bytes_and_operations_are_those_of_a_step_s_arrays(case: StepCase) -> None:
    """By arrays, which take no memory, of their dtypes; and by the terms of the products that a step needs."""

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    read = [array((case.rows, cols), ml_dtypes.bfloat16) for cols in (case.dims[0], case.dims[-1])]
    updated, terms = list[Any](), 0
    for layer in range(1, len(case.dims)):
        inputs, outputs = case.dims[layer - 1], case.dims[layer]
        for shape in ((outputs, inputs), (outputs,)):
            updated += [array(shape, dtype) for dtype in (ml_dtypes.bfloat16, "f4", "f4", "f4")]
        products = [(case.rows, outputs, inputs), (outputs, inputs, case.rows)]  # y and dw
        products += [(case.rows, inputs, outputs)] if layer > 1 else []  # dx
        terms += sum(m * n * k for m, n, k in products)
    assert least_bytes(case) == sum(each.nbytes for each in read) + 2 * sum(each.nbytes for each in updated)
    assert case.flops == 2 * terms


@pytest.mark.parametrize(("gpu", "peak"), [("NVIDIA H200", 17.6691), ("another GPU", None)])
def test_a_row_tells_the_least_times_by_the_copy_of_its_run(
    monkeypatch: pytest.MonkeyPatch, gpu: str, peak: float | None
) -> None:
    measured: list[Any] = []

    def copies(stream: Any) -> Ceiling:
        measured.append(stream)
        return Ceiling("fast", 4000.0, {})

    monkeypatch.setattr(narrow, "measure_copies", copies)
    monkeypatch.setattr(narrow, "_times", lambda *_: ({"lt": Timing(50.0, 0.5)}, {"rounds": 3}, {}))
    monkeypatch.setattr(report, "machine", lambda: {"gpu": gpu})
    jobs = SUITE.jobs(options_of(["narrow", "--rounds", "3"]))
    row, _ = (jobs[name]("stream").as_json() for name in (NAMED, "16x1 2^10 BF16"))
    assert measured == ["stream"], "once in a run"
    assert (row["copy_gb_s"], row["bytes"], row["flops"]) == (4000.0, 35_482_196, 17_481_859_072)
    assert row["floors_us"].pop("copy") == pytest.approx(8.8705, abs=1e-4)
    assert row["floors_us"] == ({} if peak is None else {"peak": pytest.approx(peak, abs=1e-4)})
    assert row["fraction_of_copy"] == pytest.approx(0.1774, abs=1e-4)
    assert row.get("fraction_of_peak") == (peak and pytest.approx(0.3534, abs=1e-4))


def test_who_takes_part() -> None:
    every = ["torch_graph_bf16", "torch_max_autotune", "jax"]
    for asked, names in (([], every[:1]), (["--jax"], every[::2]), (["--max-autotune", "--jax"], every)):
        assert list(narrow._peers(None, options_of(["narrow", *asked]))) == names


def test_findings() -> None:
    us = {"lt": 100.0, "lt_one_kernel": 101.0, "lt_layers": 210.0, "torch_graph_bf16": 500.0}
    rows = [{"case": NAMED, "us": us}, {"case": "16x1 2^10 BF16", "us": {"lt": 10.0, "lt_layers": 9.0}}]
    found = {each.what: each for each in findings(rows)}
    assert found["µs of a step of 64x3 2^18"].value == 100.0
    assert found["µs of a step of 64x3 2^18"].met
    worst = found["lt_layers / lt, least"]
    assert (worst.value, worst.where, worst.met) == (0.9, "16x1 2^10 BF16", False)
    assert found["torch_graph_bf16 / lt, least"].value == 5.0
    assert findings([])[-1].value is None
