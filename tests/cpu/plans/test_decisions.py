"""The strategy that a plan follows, and how a measured strategy that no longer works is barred."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.layout import packed
from lt_runtime.plans import decisions
from lt_runtime.plans.decisions import Strategy, make_layer_plan
from lt_runtime.plans.strategies import ForwardStrategy
from lt_runtime.problem import Activation, Compute, DType, ForwardProblem, MatmulProblem, Saved, Spec
from lt_runtime.products import choose
from lt_runtime.store.entries import LayerEntry, ProductEntry
from lt_runtime.store.records import to_json
from tests.support.plan_entries import layer, product

_X, _W, _Y = Spec(packed(64, 32)), Spec(packed(16, 32)), Spec(packed(64, 16))
LAYER = ForwardProblem(DType.FLOAT32, Compute.FLOAT32, Activation("relu"), _X, _W, _Y, bias=256)
PRODUCT = MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, _X, _W.transposed, _Y)
FUSED, BIAS, PLAIN = (
    ForwardStrategy(each, Saved.NOTHING) for each in (Epilogue.RELU_BIAS, Epilogue.BIAS, Epilogue.NONE)
)


@dataclass
class World:
    """A plan store with at most one entry, and a plan factory that refuses given strategies and algorithms.

    Attributes:
        barred: entries that were barred, with the reasons.
    """

    entry: LayerEntry | ProductEntry | None = None
    refused: tuple[Any, ...] = ()
    barred: list[tuple[Any, str]] = field(default_factory=list)
    path = "plans.json"

    def layer(self, key: str) -> Any:
        return self.entry

    product = layer

    def bar(self, key: str, entry: Any, reason: str) -> None:
        self.barred.append((entry, reason))

    def plan(self, problem: Any, device: int, by: Any, *_: Any) -> Any:
        if by in self.refused:
            raise PlanError(f"refused: {by}")
        return SimpleNamespace(by=by)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(decisions, "plan_store", lambda _: made)
    monkeypatch.setattr(decisions, "plan_for", made.plan)
    monkeypatch.setattr(decisions, "priors_of", lambda *_: [FUSED, BIAS, PLAIN])
    monkeypatch.setattr(choose, "plan_store", lambda _: made)
    monkeypatch.setattr(choose, "plan_from_blob", made.plan)
    monkeypatch.setattr(choose, "heuristic_algorithm", lambda *_: SimpleNamespace(by="heuristic"))
    return made


def chosen() -> Strategy:
    plan: Any = make_layer_plan(LAYER, 0)
    strategy: Strategy = plan.by
    return strategy


def test_the_first_of_the_priors_that_works(world: World) -> None:
    assert chosen() == FUSED
    world.refused = (FUSED,)
    assert chosen() == BIAS
    world.refused = (FUSED, BIAS, PLAIN)
    with pytest.raises(PlanError, match=r"refused: .*Epilogue\.NONE"):
        make_layer_plan(LAYER, 0)
    assert world.barred == []


def test_the_measured_strategy_comes_first(world: World) -> None:
    world.entry = layer(strategy=to_json(PLAIN))
    assert chosen() == PLAIN
    assert world.barred == []


def test_a_measured_strategy_that_fails_is_barred(world: World) -> None:
    world.entry, world.refused = layer(strategy=to_json(PLAIN)), (PLAIN,)
    assert chosen() == FUSED
    ((entry, reason),) = world.barred
    assert entry is world.entry
    assert reason.startswith("refused: ")


@pytest.mark.parametrize("epilogue", ["softmax", "gelu_bias"])
def test_values_that_are_no_strategy_are_barred(world: World, epilogue: str) -> None:
    world.entry = layer(strategy={"epilogue": epilogue, "saved": "nothing"})
    with pytest.warns(UserWarning, match=r"plans\.json has a damaged entry, which is not used"):
        assert chosen() == FUSED
    assert [entry for entry, _ in world.barred] == [world.entry]


def test_a_measured_algorithm_that_fails_is_barred(world: World) -> None:
    plan: Any = choose.known_algorithm(PRODUCT, 0)
    assert plan.by == "heuristic"
    world.entry = entry = product()
    plan = choose.known_algorithm(PRODUCT, 0)
    assert plan.by == entry.algorithm
    assert world.barred == []
    world.refused = (entry.algorithm,)
    plan = choose.known_algorithm(PRODUCT, 0)
    assert plan.by == "heuristic"
    ((barred, reason),) = world.barred
    assert barred is entry
    assert reason.startswith("refused: ")
