"""Which layers the rule without measurements runs in FP8, computed with the peak rates of an H200."""

from __future__ import annotations

from typing import Any

import pytest

from lt_runtime.fp8 import FP8, Fp8ChainProblem
from lt_runtime.gpu.peaks import Hardware
from lt_runtime.plans import fp8_rule
from lt_runtime.plans.fp8_rule import expected_slower_in_fp8, slower_for_inference, update_us
from lt_runtime.problem import Activation, Compute, DType

H200 = Hardware(90, 132, 1_980_000, 3_201_000, 6144)
FASTER = {
    "wide": ((4096, 14336, 4096), {}),
    "wide, current": ((4096, 4096, 14336), {"is_current": True, "is_linear": True}),
    "GPT-2's first": ((8192, 3072, 768), {}),
    "GPT-2's second": ((8192, 768, 3072), {"is_linear": True, "needs_dx": True}),
    "in FP32": ((1024, 1024, 1024), {"dtype": DType.FLOAT32}),
    "512 rows, an optimizer writes w": ((512, 4096, 4096), {"written": (True,)}),
    "unknown peaks": ((16, 16, 16), {"capability": 130}),
}
SLOWER = {
    "tiny": ((16, 16, 16), {}),
    "few rows": ((64, 4096, 4096), {}),
    "512 rows": ((512, 4096, 4096), {}),
    "narrow": ((16384, 128, 4096), {}),
    "narrow, without dx": ((8192, 768, 3072), {"is_linear": True}),
    "small, current": ((2048, 2048, 2048), {"is_current": True}),
}


def reason(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], options: dict[str, Any]) -> str | None:
    given = {"needs_dx": False, "is_linear": False, "is_current": False, "capability": 90, "dtype": DType.BFLOAT16}
    given |= {"written": (), **options}
    monkeypatch.setattr(fp8_rule, "hardware", lambda _: H200._replace(capability=given["capability"]))
    recipe = FP8("current" if given["is_current"] else "delayed")
    (m, n, k), activation = shape, Activation("none" if given["is_linear"] else "gelu")
    layer = m, (k, n), (activation,), (True,), given["needs_dx"], recipe, given["written"]
    return expected_slower_in_fp8(Fp8ChainProblem(given["dtype"], Compute.FLOAT32, *layer), 0)


@pytest.mark.parametrize(("shape", "options"), FASTER.values(), ids=FASTER)
def test_faster(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    assert reason(monkeypatch, shape, options) is None


@pytest.mark.parametrize(("shape", "options"), SLOWER.values(), ids=SLOWER)
def test_slower(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    m, n, k = shape
    assert f"{m} rows of {k}-{n}: FP8 is expected to save" in str(reason(monkeypatch, shape, options))


def test_a_chain_is_faster_if_its_layers_are_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer alone would be slower by 25 µs; the first gains more."""
    monkeypatch.setattr(fp8_rule, "hardware", lambda _: H200)
    given = DType.BFLOAT16, Compute.FLOAT32, 4096

    def slower(*dims: int) -> str | None:
        activations, biases = (Activation("gelu"),) * (len(dims) - 1), (True,) * (len(dims) - 1)
        return expected_slower_in_fp8(Fp8ChainProblem(*given, dims, activations, biases, True, FP8()), 0)

    assert (slower(8192, 8192), slower(8192, 8192, 128)) == (None, None)
    assert slower(8192, 128) is not None


@pytest.mark.parametrize(("written", "us"), [((), 0.0), ((False, True), 2.437), ((True, True), 4.875)])
def test_time_in_which_an_update_writes_weights_in_fp8(written: tuple[bool, ...], us: float) -> None:
    """Two bytes for each of 4,194,304 elements of a weight, at seven tenths of 4.917 TB/s."""
    layers = (1024, 4096, 1024), (Activation("gelu"), Activation()), (True, True), False, FP8()
    problem = Fp8ChainProblem(DType.BFLOAT16, Compute.FLOAT32, 1024, *layers, written)
    assert update_us(problem, H200) == pytest.approx(us, rel=1e-3)
    assert update_us(problem, H200._replace(memory_clock_khz=0)) == 0


def test_the_rule_adds_the_time_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts of 16 rows take 0.08 µs, three launches 4.5, and an update's 33.6 MB at 3.44 TB/s 9.75."""
    assert "and to add 14.3 of casts" in str(reason(monkeypatch, (16, 4096, 4096), {"written": (True,)}))


INFERENCE = {
    "few rows": ((64, 4096, 14336), True),
    "few rows, cast in each call": ((64, 4096, 14336), False, {"keeps_w": False}),
    "many rows, cast in each call": ((4096, 14336, 4096), True, {"keeps_w": False}),
    "many rows, current": ((4096, 14336, 4096), True, {"keeps_w": False, "is_current": True}),
    "GPT-2's first": ((8192, 3072, 768), True),
    "GPT-2's first, few rows": ((64, 3072, 768), False),
    "tiny": ((16, 16, 16), False),
    "narrow": ((16384, 128, 4096), False),
    "unknown peaks": ((16, 16, 16), True, {"capability": 130}),
}


@pytest.mark.parametrize("case", INFERENCE.values(), ids=INFERENCE)
def test_inference(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    shape, is_faster, *more = case
    options = {"keeps_w": True, "is_current": False} | dict(*more)
    capability = options.pop("capability", 90)
    monkeypatch.setattr(fp8_rule, "hardware", lambda _: H200._replace(capability=capability))
    slower_for_inference.cache_clear()
    assert slower_for_inference(shape, DType.BFLOAT16, Compute.FLOAT32, 0, **options) is not is_faster
    slower_for_inference.cache_clear()
