"""The shapes of the suite `wide`, and its findings."""

from __future__ import annotations

import pytest

from benchmarks import wide
from benchmarks.layers import presets
from benchmarks.wide import FIT, JUDGE, STRATA, SUITE, findings, shapes


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
            assert [each.layer for each in found[:16]] == shapes(stratum)
            assert [each.group.split()[1] for each in found[:16]] == [FIT] * 8 + [JUDGE] * 8
            assert len(found) == 16 + (stratum == "odd")  # and a shape that was not drawn
    assert len({*SUITE.order}) == len(wide.blocks()) == 82


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
