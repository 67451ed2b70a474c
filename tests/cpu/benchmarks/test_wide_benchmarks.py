"""The shapes of the suite `wide`, what it shows of rows, and what it measures of a block's parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from benchmarks import wide
from benchmarks.layers import Block, presets
from benchmarks.wide import FIT, JUDGE, STRATA, SUITE, findings, shapes
from tests.support.fake_gpu import FakeGpu
from tests.support.hurry import make_work_long


def test_the_shapes_are_what_they_were_when_they_were_measured() -> None:
    assert {stratum: (shapes(stratum)[0], shapes(stratum)[-1]) for stratum in STRATA} == {
        "odd": ((13830, 221, 48), (13374, 841, 735)),
        "tall": ((65536, 32, 80), (65536, 24, 56)),
        "narrow": ((206, 4, 528), (4898, 8, 1144)),
        "ordinary": ((270, 192, 2368), (1792, 1408, 512)),
    }


def test_there_are_64_shapes_half_of_them_for_judging() -> None:
    drawn = [(stratum, shape) for stratum in STRATA for shape in shapes(stratum)]
    assert len({*drawn}) == 64
    assert not {shape for _, shape in drawn} & {tuple(layer) for each in presets()["layers"].values() for layer in each}
    for stratum in STRATA:
        for kind in ("bf16", "tf32") if stratum == "odd" else ("bf16",):
            found = [each for each in wide.blocks() if each.group.startswith(f"{stratum} ") and each.kind == kind]
            assert [each.layer for each in found] == shapes(stratum)
            assert [each.group.split()[1] for each in found] == [FIT] * 8 + [JUDGE] * 8
    assert len({*SUITE.order}) == len(wide.blocks()) == 80


def test_what_is_fitted_further_on_is_not_what_judges() -> None:
    drawn = {(stratum, shape) for stratum in STRATA for shape in wide.shapes_to_fit(stratum)}
    assert len(drawn) == 192
    assert not drawn & {(stratum, shape) for stratum in STRATA for shape in shapes(stratum)}
    assert wide.shapes_to_fit("odd")[0] == (2330, 413, 1888), "as they were when they were measured"
    assert {each.group.split()[1] for each in wide.blocks_to_fit()} == {FIT}


def test_each_stratum_is_what_it_is_called() -> None:
    odd = shapes("odd")
    assert all(min(n, k) >= 13 and max(n, k) <= 5000 for _, n, k in odd)
    assert [(n % 2, k % 2) for _, n, k in odd] == [(1, 0), (0, 1), (1, 1), (1, 1)] * 4
    assert all(m >= 2048 and min(n, k) >= 500 for m, n, k in odd[3::4])
    assert all(m in (1 << 16, 1 << 17, 1 << 18) and 16 <= min(n, k) <= max(n, k) <= 128 for m, n, k in shapes("tall"))
    assert all(n <= 24 and 128 <= k <= 2048 for _, n, k in shapes("narrow"))
    assert all(n % 64 == k % 64 == 0 for _, n, k in shapes("ordinary"))


def test_findings() -> None:
    rows = [
        {"case": "a", "half": JUDGE, "stratum": "odd", "us": {"lt": 9.0, "lt_priors": 10.0, "torch_graph": 12.0}},
        {"case": "b", "half": FIT, "stratum": "odd", "us": {"lt": 5.0, "lt_priors": 10.0, "torch_graph": 8.0}},
        {"case": "c", "half": JUDGE, "stratum": "tall", "us": {"lt": 10.0, "lt_priors": 10.0, "torch_graph": 5.0}},
    ]
    found = {each.what: each for each in findings(rows)}
    worst = found["lt / lt_priors, worst"]
    assert (worst.value, worst.where, worst.met) == (0.9, "a", True), "what priors are fitted on does not count"
    assert found["lt / lt_priors, geometric mean"].met is False
    assert found["torch_graph / lt, odd, worst"].value == pytest.approx(12 / 9)
    assert found["torch_graph / lt_priors, odd, worst"].value == pytest.approx(0.8)
    assert {each.met for each in findings([])} == {None}


@pytest.fixture
def parts(gpu: FakeGpu) -> Iterator[ModuleType]:
    """The module, imported on top of the pretended GPU's package."""
    others = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "benchmarks"}
    for name in others:
        del sys.modules[name]
    yield import_module("benchmarks.parts")
    for name in [each for each in sys.modules if each.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.modules.update(others)


def test_the_suite_of_parts_has_no_layer_twice(parts: ModuleType) -> None:
    found = parts.blocks()
    assert len({(*block.layer, block.kind, block.activation) for block in found.values()}) == len(found) == 408
    assert all(block.group.endswith(" fit") and block.name == name for name, block in found.items())


def test_the_parts_of_a_block(gpu: FakeGpu, parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    make_work_long(gpu, monkeypatch)
    found = parts.times_of_parts(Block("test", 12, 17, 9, "bf16", "gelu")).as_json()
    roles = ["forward", "last forward", "backward preactivation", "last backward"]
    assert [*found["strategies"]] == roles
    for ways in found["strategies"].values():
        assert [*ways] == ["heuristic", "padded", "plain"]
        assert all(us > 0 for times in ways.values() for us in times.values())
    plain = [each for each in found["products"] if each["epilogue"] == "none"]
    shapes_of_products = {tuple(each["shape"]) for each in plain}
    assert shapes_of_products == {(12, 17, 9), (12, 9, 17), (9, 17, 12), (17, 9, 12)}
    for product in plain:
        copies: set[Any] = {algorithm[0] for algorithm in product["algorithms"]}
        if product["types"][0] == product["types"][1]:
            assert {"plain", "PADDED"} <= copies
            assert product["inner"] > 0
    gpu.synchronize_all()
