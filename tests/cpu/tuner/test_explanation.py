"""`lt.explain` with fake plans and a real plan cache."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lt_runtime as lt
from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu import peaks
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.gpu.peaks import Hardware
from lt_runtime.ops import tuning as requests
from lt_runtime.plans.cache import LayerProblem
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, MadeBy
from lt_runtime.problem import Activation, Compute, DType, ForwardProblem, MatmulProblem, Saved
from lt_runtime.store.entries import RejectedAlgorithm
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner import explanation
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.roofline import least_us
from tests.support.chain_problems import backward_of, forward_of
from tests.support.plan_entries import H200, algorithm, layer, product

CHAIN = LayerChain.of_mlp(8192, (768, 3072, 768), Activation("gelu"), DType.BFLOAT16, Compute.FLOAT32)
HARDWARE = Hardware(90, 132, 1_980_000, 3_201_000, 6144)
CONFIG: Mapping[str, int] = {"ID": 66, "TILE_ID": 20, "STAGES_ID": 36, "SPLITK_NUM": 1}
FORWARD = forward_of(CHAIN)
X, W, Y = FORWARD.x, FORWARD.w.transposed, FORWARD.y
PRODUCT = MatmulProblem(DType.BFLOAT16, DType.BFLOAT16, Compute.FLOAT32, X, W, Y, Epilogue.GELU_AUX_BIAS, aux=Y)
DX = replace(PRODUCT, a=Y, b=W.transposed, d=X, epilogue=Epilogue.NONE, aux=None)


def pretended_product(problem: MatmulProblem) -> Any:
    return SimpleNamespace(problem=problem, blob=b"")


def pretended_layer(problem: LayerProblem, device: int) -> Any:
    if isinstance(problem, ForwardProblem):
        forward = ForwardStrategy(Epilogue.GELU_AUX_BIAS, Saved.PREACTIVATION)
        return SimpleNamespace(strategy=forward, products={"y": pretended_product(PRODUCT)})
    strategy = BackwardStrategy(MadeBy.KERNEL, MadeBy.EPILOGUE, MadeBy.KERNEL)
    return SimpleNamespace(strategy=strategy, products={"dx": pretended_product(DX)})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanStore:
    made = PlanStore(tmp_path / H200.file_name, H200)
    monkeypatch.setattr(explanation, "plan_store", lambda device: made)
    monkeypatch.setattr(explanation, "activated", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(explanation, "make_layer_plan", pretended_layer)
    monkeypatch.setattr(explanation, "configuration", lambda _: CONFIG)
    monkeypatch.setattr(explanation, "hardware", lambda device: HARDWARE)
    monkeypatch.setattr(requests, "ordinal_of", lambda device: 0)
    return made


@pytest.mark.usefixtures("store")
def test_what_nobody_has_measured(capsys: pytest.CaptureFixture[str]) -> None:
    explanations = lt.explain(FORWARD)
    (found,) = explanations
    assert (found.us, found.roofline_fraction, found.alternatives, found.rejected) == (None, None, (), ())
    assert found.least_us == least_us(FORWARD, HARDWARE)
    assert capsys.readouterr().out == ""
    lines = str(explanations).splitlines()
    assert lines == [
        "forward 8192x3072x768 bfloat16 gelu",
        "  strategy  gelu_aux_bias, keeps preactivation (by the priors)",
        "  time      not measured; at its peaks the GPU needs 36.11 µs",
        "  y         matmul 8192x3072x768 bfloat16 gelu_aux_bias",
        "            id 66, tile 128x128, stages 128xauto, split-K 1",
        "            chosen without a measurement",
    ]


def test_what_was_measured(store: PlanStore) -> None:
    slow = tuple(RejectedAlgorithm(algorithm(), CONFIG, f"far behind: {us} µs") for us in (200, 300))
    wrong = RejectedAlgorithm(algorithm(), CONFIG, "wrong: 3 instead of 4 at [0, 1]")
    store.put({problem_key(PRODUCT): product(rejected=(*slow, wrong))}, {problem_key(FORWARD): layer()})
    (found,) = lt.explain(FORWARD)
    assert (found.us, found.alternatives) == (110.0, (("none, keeps preactivation", 121.0),))
    assert found.roofline_fraction == pytest.approx(36.11 / 110, rel=1e-3)
    assert repr(lt.explain(FORWARD)).splitlines()[1:] == [
        "  strategy  gelu_aux_bias, keeps preactivation",
        "  time      110.00 µs; 33% of the roofline: at its peaks the GPU needs 36.11 µs",
        "  y         matmul 8192x3072x768 bfloat16 gelu_aux_bias",
        "            id 66, tile 128x128, stages 128xauto, split-K 1",
        "            alone 52.50 µs, spread 0.25 µs; best of 14 measured, 1.14 times as fast as untuned",
        "            rejected: 2 algorithms, far behind",
        "            rejected: id 66, tile 128x128, stages 128xauto, split-K 1: wrong: 3 instead of 4 at [0, 1]",
        "  slower    none, keeps preactivation: 121.00 µs, 10% slower",
        "  rejected  gelu_bias: not supported",
    ]


@pytest.mark.usefixtures("store")
def test_a_chain_goes_back_from_what_its_forward_keeps() -> None:
    found = lt.explain([768, 3072, 768], 8192, activation="gelu", dtype="bfloat16")
    forwards, backward = [forward_of(CHAIN, index) for index in range(2)], backward_of(CHAIN, 1, Saved.PREACTIVATION)
    assert [each.problem for each in found] == [*forwards, backward, backward_of(CHAIN, 0)]
    assert [each.problem for each in found[1:3]] == [forwards[1], backward]
    assert found[2].strategy == "db by kernel, derivative by epilogue, db below by kernel (by the priors)"
    assert [each.name for each in found[2].products] == ["dx"]
    assert str(found) == "\n\n".join(map(str, found))


@pytest.mark.parametrize("fuses", [True, False])
def test_a_product(store: PlanStore, fuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = PRODUCT if fuses else replace(PRODUCT, epilogue=Epilogue.NONE, aux=None)
    store.put({problem_key(inside): product()})
    monkeypatch.setattr(explanation, "ProductPlan", lambda *_: SimpleNamespace(product=pretended_product(inside)))
    (found,) = lt.explain(PRODUCT)
    assert found.strategy == ("one product of cuBLASLt's" if fuses else "a plain product, then our kernel")
    assert found.us == (52.5 if fuses else None)
    assert found.products[0].entry is not None


@pytest.mark.usefixtures("store")
def test_peaks_that_are_not_known_and_products_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "hardware", lambda device: HARDWARE._replace(capability=130))
    empty = replace(PRODUCT, batch=0)
    monkeypatch.setattr(explanation, "ProductPlan", lambda *_: SimpleNamespace(product=pretended_product(empty)))
    (found,) = lt.explain(empty)
    assert found.least_us is None
    assert found.products[0].algorithm == ""
    assert "not measured; this GPU's peaks are not known" in str(found)


def test_hardware_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "device_info", lambda _: DeviceInfo(0, "NVIDIA H200", 90, 132, 1 << 37))
    monkeypatch.setattr(peaks, "device_attributes", lambda *_: (1_980_000, 3_201_000, 6144))
    assert peaks.hardware(0) == HARDWARE
