"""The cases of the suite `narrow`, and what it shows of rows."""

from __future__ import annotations

import pytest

from benchmarks import narrow
from benchmarks.__main__ import options_of
from benchmarks.narrow import CASES, SUITE, findings
from benchmarks.splits import chain_of
from benchmarks.steps import StepCase
from lt_runtime.kernels.mlp import MAX_WIDTH


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_is_a_narrow_mlp(case: StepCase) -> None:
    passes = chain_of(case).narrow
    assert passes is not None
    assert (passes.rows, passes.dims) == (case.rows, case.dims)
    assert max(case.dims) <= MAX_WIDTH


def test_names_tell_cases_apart() -> None:
    assert len({*SUITE.order}) == len(CASES)
    assert "64x3 2^18 BF16" in SUITE.order


def test_who_takes_part() -> None:
    every = ["torch_graph_bf16", "torch_max_autotune", "jax"]
    for asked, names in (([], every[:1]), (["--jax"], every[::2]), (["--max-autotune", "--jax"], every)):
        assert list(narrow._peers(None, options_of(["narrow", *asked]))) == names


def test_findings() -> None:
    us = {"lt": 100.0, "lt_one_kernel": 101.0, "lt_layers": 210.0, "torch_graph_bf16": 500.0}
    rows = [{"case": "64x3 2^18 BF16", "us": us}, {"case": "16x1 2^10 BF16", "us": {"lt": 10.0, "lt_layers": 9.0}}]
    found = {each.what: each for each in findings(rows)}
    assert found["µs of a step of 64x3 2^18"].value == 100.0
    assert found["µs of a step of 64x3 2^18"].met
    worst = found["lt_layers / lt, least"]
    assert (worst.value, worst.where, worst.met) == (0.9, "16x1 2^10 BF16", False)
    assert found["torch_graph_bf16 / lt, least"].value == 5.0
    assert findings([])[-1].value is None
