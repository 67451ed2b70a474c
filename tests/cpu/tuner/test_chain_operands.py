"""`ChainOperands` in host memory: where operands lie, which share buffers, and when two results count as equal."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lt_runtime import reference
from lt_runtime.kernels.call import Call
from lt_runtime.layout import packed
from lt_runtime.plans.cache import LayerProblem, Strategy, plan_for, strategies_of
from lt_runtime.plans.layers import BackwardPlan
from lt_runtime.problem import Activation, Compute, DType, Saved, Spec
from lt_runtime.tuner import chain_operands
from lt_runtime.tuner.chain import Layer, LayerChain, Part
from lt_runtime.tuner.chain_operands import ChainOperands, tensors_of
from lt_runtime.tuner.operands import NORMAL, Buffer, Memory
from tests.support.chain_problems import backward_of, by_themselves, forward_of
from tests.support.fake_clock import STREAM
from tests.support.host_memory import bits, values

RELU = LayerChain.of_mlp(32, (40, 24, 16), Activation("relu"), DType.BFLOAT16, Compute.FLOAT32)
PAIR = RELU.cut(Part(0, 1))


pytestmark = pytest.mark.usefixtures("host_memory")


@pytest.fixture(autouse=True)
def without_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_runtime.plans.layers.ForwardPass", lambda *_, **__: None)
    monkeypatch.setattr(BackwardPlan, "_pass", lambda *_, **__: None)


def filled(chain: LayerChain) -> ChainOperands:
    operands = ChainOperands(Memory(0, STREAM), chain)
    operands.fill(NORMAL, 0)
    return operands


def call(operands: ChainOperands, layer: int, problem: LayerProblem, strategy: Strategy | None = None) -> Call:
    chosen = next(iter(strategies_of(problem))) if strategy is None else strategy
    plan = plan_for(problem, 0, chosen, lambda product, _: SimpleNamespace(problem=product))  # type: ignore[return-value, arg-type]
    return operands.call(layer, plan, 7)


def addresses(operands: ChainOperands, layer: int, problem: LayerProblem, strategy: Strategy | None = None) -> Any:
    found = call(operands, layer, problem, strategy).addresses
    return SimpleNamespace(**dict(zip(problem.operands, found, strict=True)))


def buffer(operands: ChainOperands, layer: int, problem: LayerProblem, name: str, saved: Saved) -> Buffer:
    return operands.buffers[tensors_of(layer, problem, saved)[name]]


def test_backward_reads_what_forward_writes() -> None:
    operands, forward = ChainOperands(Memory(0, STREAM), PAIR), forward_of(PAIR)
    for strategy in strategies_of(forward):
        saved = strategy.saved  # type: ignore[union-attr]
        at = addresses(operands, 0, forward, strategy)
        assert 0 not in (at.x, at.w, at.bias, at.y)
        assert (at.kept != 0) is (saved is Saved.MASK)
        made = call(operands, 0, forward, strategy)
        assert (made.stream, made.dropouts) == (7, (None, None))
        above = addresses(operands, 1, backward_of(PAIR, 1, saved))
        assert above.x == at.y
        assert above.saved_below == (at.kept or at.y)
        assert above.w != at.w
        assert 0 not in (above.w, above.dx, above.dw, above.db, above.db_below)
        assert above.saved == above.dz == 0


def test_a_layers_own_backward_shares_its_operands() -> None:
    layers = LayerChain.of_mlp(32, (40, 24, 8), Activation("gelu"), DType.FLOAT32, Compute.FLOAT32, dropout=True)
    chain = by_themselves(layers).cut(Part(0, 0))
    operands = filled(chain)
    keeps = next(each for each in strategies_of(forward_of(chain)) if each.saved is Saved.PREACTIVATION)  # type: ignore[union-attr]
    at, back = addresses(operands, 0, forward_of(chain), keeps), addresses(operands, 0, backward_of(chain, 0))
    assert (back.x, back.w, back.saved) == (at.x, at.w, at.kept)
    dropouts = call(operands, 0, backward_of(chain, 0)).dropouts
    assert dropouts[0] is not None
    assert dropouts[1] is None
    assert list(operands.results()) == ["y", "dx", "dw", "db"]


def test_backward_alone_has_operands_of_its_own() -> None:
    problem = backward_of(RELU, 1, Saved.MASK)
    operands = filled(LayerChain((Layer(None, problem),)))
    assert addresses(operands, 0, problem).saved_below not in (0, addresses(operands, 0, problem).x)
    assert list(operands.results()) == ["dx", "dw", "db", "db_below"]


@pytest.mark.parametrize("activation", ["gelu", "relu", "none"])
def test_what_one_problem_writes_others_read(activation: str) -> None:
    kind = Activation(activation)
    chain = LayerChain.of_mlp(16, (24, 40, 24), kind, DType.FLOAT32, Compute.FLOAT32, input_gradient=True)
    operands = ChainOperands(Memory(0, STREAM), chain)
    keeps = {"gelu": Saved.PREACTIVATION, "relu": Saved.OUTPUT, "none": Saved.NOTHING}[activation]
    strategy = next(each for each in strategies_of(forward_of(chain)) if each.saved is keeps)  # type: ignore[union-attr]
    first, last = addresses(operands, 0, forward_of(chain), strategy), addresses(operands, 1, forward_of(chain, 1))
    above, below = (addresses(operands, index, backward_of(chain, index)) for index in (1, 0))
    assert last.x == above.x == first.y
    assert last.y != first.x  # two layers of one layout that do not follow each other
    assert (above.w, below.w, below.x) == (last.w, first.w, first.x)
    assert below.dy == above.dx
    assert above.saved_below == {"gelu": first.kept, "relu": first.y, "none": 0}[activation]
    written = [above.dw, below.dw, below.dx, last.y, above.dy]
    assert len({*written}) == len(written)


def test_data_for_comparison_gets_no_other_sign_by_rounding() -> None:
    """Makes two results: one rounded to BF16 before the bias is added, the other only afterwards."""
    data = prepared("relu")
    product, bias = data["x"][0] @ data["w"][0].T, data["bias"][0]
    rounded = product.astype(DType.BFLOAT16.numpy).astype(np.float64)
    assert (np.sign(product + bias) == np.sign(rounded + bias)).all()
    assert (product != rounded).any()
    assert 0.5 < np.std(product) < 4.0


def prepared(activation: str) -> dict[str, Any]:
    """Returns a layer's x, w and bias as `ChainOperands.prepare` fills them before results are compared."""
    chain = LayerChain.of_mlp(64, (768, 96), Activation(activation), DType.BFLOAT16, Compute.FLOAT32)
    operands = ChainOperands(Memory(0, STREAM), chain)
    operands.prepare()
    return {name: values(buffer(operands, 0, forward_of(chain), name, Saved.OUTPUT)) for name in ("x", "w", "bias")}


def test_what_is_not_written_shows() -> None:
    operands = filled(PAIR)
    operands.prepare()
    assert all(np.isnan(values(each)).all() for each in operands.results().values())
    operands = filled(LayerChain((Layer(None, replace(backward_of(PAIR, 1), accumulate=True)),)))
    operands.prepare()
    found = operands.results()
    assert np.isnan(values(found["dx"])).all()
    added = filled(LayerChain((Layer(None, replace(backward_of(PAIR, 1), accumulate_dx=True)),)))
    added.prepare()
    assert {name for name, each in added.results().items() if not np.isnan(values(each)).any()} == {"dx"}
    assert not any(np.isnan(values(found[name])).any() for name in ("dw", "db", "db_below"))


def disagreement(actual: dict[str, Any], expected: dict[str, Any], dtype: DType, layers: int = 2) -> Any:
    """Calls `chain_operands.disagreement` with arrays converted to FP64."""
    found, wanted = ({name: _buffer_of(each) for name, each in side.items()} for side in (actual, expected))
    return chain_operands.disagreement(found, wanted, dtype, layers)


def _buffer_of(array: Any) -> Buffer:
    made = Buffer(Memory(0, STREAM), Spec(packed(*array.shape[-2:])), DType.FLOAT64)
    bits(made)[...] = array.view(np.uint64)
    return made


def outputs() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {"y": generator.standard_normal((1, 50, 40)), "dx": generator.standard_normal((1, 50, 60))}


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_results_that_were_rounded_three_times_agree(dtype: DType) -> None:
    wanted = outputs()
    rounded = {name: (1 + 0.9e-3) * values for name, values in wanted.items()}
    for scale in (1.37, 1 / 1.37, 1.0):
        rounded = {name: (values * scale).astype(dtype.numpy).astype(float) / scale for name, values in rounded.items()}
    assert disagreement(rounded, wanted, dtype) is None


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_results_that_do_not_agree(dtype: DType) -> None:
    wanted = outputs()
    for name in wanted:
        off = wanted | {name: wanted[name] * 1.03}
        found = disagreement(off, wanted, dtype)
        assert found is not None
        assert found[0] == name
        nan = wanted | {name: np.where(np.arange(wanted[name].shape[-1]) == 3, np.nan, wanted[name])}
        assert disagreement(nan, wanted, dtype) is not None
        one = {key: values.copy() for key, values in wanted.items()}
        one[name][0, 3, 3] += 4.0
        assert disagreement(one, wanted, dtype) is not None


def test_values_that_have_passed_more_layers_may_differ_by_more() -> None:
    """Differences as seen on an H200 in a gradient of 16 columns, after six layers that round in another order."""
    wanted = outputs()
    off = {name: values * 1.0224 for name, values in wanted.items()}
    assert disagreement(off, wanted, DType.BFLOAT16) is not None
    assert disagreement(off, wanted, DType.BFLOAT16, layers=6) is None
    assert disagreement({name: values * 1.06 for name, values in wanted.items()}, wanted, DType.BFLOAT16, 6) is not None


def test_a_forgotten_bias_is_found() -> None:
    data, gelu = prepared("gelu"), Activation("gelu")
    with_bias, _ = reference.linear_fwd(data["x"][0], data["w"][0], data["bias"][0, 0], gelu)
    without, _ = reference.linear_fwd(data["x"][0], data["w"][0], None, gelu)
    assert disagreement({"y": without}, {"y": with_bias}, DType.BFLOAT16) is not None


def test_one_wrong_element_of_a_million_is_found() -> None:
    wanted = {"y": np.random.default_rng(0).standard_normal((1, 1000, 1000))}
    off = {"y": wanted["y"].copy()}
    off["y"][0, 3, np.abs(wanted["y"][0, 3]).argmin()] += 1.0
    assert disagreement(off, wanted, DType.FLOAT32) == ("y", "1 of 1000000 elements of y are off")
