"""A stand-in for the GPU that layers are tuned on: halves cost what a test says, and write ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lt_runtime.errors import PlanError
from lt_runtime.kernels.call import Call
from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.plans.strategies import ForwardStrategy, backward_strategies, forward_strategies
from lt_runtime.problem import ForwardProblem, MatmulProblem
from lt_runtime.store.entries import RejectedAlgorithm
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner import alternatives, candidates, layer_finals, layer_tuner, row_trial, row_tuner, tuning
from lt_runtime.tuner.alternatives import half_name
from lt_runtime.tuner.layer_trial import LayerTrial
from lt_runtime.tuner.product_tuner import ProductVerdict
from lt_runtime.tuner.timing import Timing, take_times
from lt_runtime.tuner.workbench import Bench
from tests.fake_clock import FakeClock
from tests.plan_entries import H200
from tests.support.calls import addresses

TUNED, BY_HEURISTIC = bytes(64), b"\x01" * 64
"""Algorithms that the tuner finds, and that the heuristic offers."""


def _fused_first(problem: ForwardProblem, _: int) -> list[ForwardStrategy]:
    return sorted(forward_strategies(problem), key=lambda each: each.epilogue.has_aux_output)


class LayerGpu:
    """Everything that needs a GPU, replaced for as long as a test runs.

    Attributes:
        us: what a half costs by its name; `default_us` where nothing is said.
        tuned_us: what it costs with tuned algorithms, where that is another time.
        row_us: what it costs with them between its neighbours, where that is another time.
        wrong: names of halves that write twos.
        refused: epilogues' names that the library refuses.
        asked: products that plans were asked for.
        tuned: products that were tuned, with the seconds allowed for each.
        useless: epilogues' names for which no algorithm is right.
        wrong_first: those for which the heuristic's is wrong.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.us: dict[str, float] = {}
        self.default_us = 10.0
        self.tuned_us: dict[str, float] = {}
        self.row_us: dict[str, float] = {}
        self.in_row = False
        self.wrong: set[str] = set()
        self.refused: set[str] = set()
        self.useless: set[str] = set()
        self.wrong_first: set[str] = set()
        self.asked: list[MatmulProblem] = []
        self.tuned: list[tuple[MatmulProblem, float]] = []
        self.trials: list[LayerTrial] = []
        self.forgotten: list[Any] = []
        self.clock = FakeClock()
        self.store = PlanStore(directory / "plans.json", H200)
        self._patch(monkeypatch)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ForwardPlan, "_own_pass", lambda _: None)
        monkeypatch.setattr(BackwardPlan, "_pass", lambda *_, **__: None)
        monkeypatch.setattr(ForwardPlan, "run", self._forward_runner())
        monkeypatch.setattr(BackwardPlan, "run", self._backward_runner())
        monkeypatch.setattr(alternatives, "forward_priors", _fused_first)
        monkeypatch.setattr(alternatives, "backward_priors", lambda problem, _: backward_strategies(problem))
        for module in (layer_tuner, tuning):
            monkeypatch.setattr(module, "plan_store", lambda _: self.store)
            monkeypatch.setattr(module, "tune_on", self._tune_on)
        monkeypatch.setattr(layer_tuner, "heuristic_algorithm", self._plan)
        monkeypatch.setattr(layer_tuner, "known_algorithm", self._known)
        monkeypatch.setattr(candidates, "configuration", lambda _: {"ID": 2})
        monkeypatch.setattr(layer_tuner, "plan_by", self._tuned_plan)
        monkeypatch.setattr(layer_finals, "buffer_sets", lambda *_: 2)
        monkeypatch.setattr(layer_finals, "LayerTrial", self._trial)
        monkeypatch.setattr(row_tuner, "buffer_sets", lambda *_: 2)
        monkeypatch.setattr(row_trial, "LayerTrial", self._trial)
        monkeypatch.setattr(row_tuner, "known_algorithm", self._tuned_or_known)
        monkeypatch.setattr(row_tuner, "heuristic_algorithm", self._plan)
        monkeypatch.setattr(row_tuner, "plan_by", self._tuned_plan)
        monkeypatch.setattr(row_tuner, "take_times", self._take_times_in_row)
        monkeypatch.setattr(tuning, "workbench", self._workbench)
        monkeypatch.setattr(tuning, "forget", lambda problems, _: self.forgotten.extend(problems))
        monkeypatch.setattr(time, "monotonic", lambda: self.clock.now)

    @contextlib.contextmanager
    def _workbench(self, device: int) -> Iterator[Bench]:
        self.trials.clear()
        yield Bench(device, self.clock, np)  # type: ignore[arg-type]

    def _take_times_in_row(self, *arguments: Any, **options: Any) -> dict[str, Timing]:
        self.in_row = True
        try:
            return take_times(*arguments, **options)
        finally:
            self.in_row = False

    def _trial(self, xp: Any, link: Any, shared: Any = None) -> LayerTrial:
        self.trials.append(LayerTrial(xp, link, shared))
        return self.trials[-1]

    def _plan(self, problem: MatmulProblem, _: int, tuned: bool = False) -> Any:
        self.asked.append(problem)
        if problem.epilogue.value in self.refused:
            raise PlanError(f"cuBLASLt offers 0 sound algorithms for {problem.epilogue.value}")
        blob = TUNED if tuned else BY_HEURISTIC
        return SimpleNamespace(problem=problem, tuned=tuned, blob=blob)

    def _known(self, problem: MatmulProblem, device: int) -> Any:
        return self._plan(problem, device)

    def _tuned_or_known(self, problem: MatmulProblem, device: int) -> Any:
        return self._plan(problem, device, tuned=self.store.product(problem_key(problem)) is not None)

    def _tuned_plan(self, problem: MatmulProblem, device: int, algorithm: bytes) -> Any:
        return self._plan(problem, device, tuned=algorithm == TUNED)

    def _tune_on(self, _: Bench, problem: MatmulProblem, effort: Any, budget_s: float) -> ProductVerdict:
        self.tuned.append((problem, budget_s))
        with self.clock.watch.running():
            self.clock.now += budget_s
        if problem.epilogue.value in self.useless | self.refused:
            raise PlanError("none of cuBLASLt's algorithms is of use")
        wrong = RejectedAlgorithm(BY_HEURISTIC, {"ID": 2}, "wrong: d[0, 0, 0] is 1 and not 2")
        rejected = (wrong,) if problem.epilogue.value in self.wrong_first else ()
        return ProductVerdict(TUNED, {"ID": 1}, 5.0, 0.1, 6.0, 3, rejected, effort, budget_s)

    def _pay(self, plan: Any, products: list[Any]) -> None:
        name = half_name(plan.problem, plan.strategy)
        us = self.us.get(name, self.default_us)
        if all(each.tuned for each in products):
            us = self.tuned_us.get(name, us)
            us = self.row_us.get(name, us) if self.in_row else us
        self.clock._spent += us
        self.clock.launched.append((name, 0))

    def _write(self, plan: Any, addresses: list[int]) -> None:
        name = half_name(plan.problem, plan.strategy)
        dtype = plan.problem.dtype.numpy
        value = np.full(1, 2.0 if name in self.wrong else 1.0, dtype)
        for trial in self.trials:
            for buffer in trial._buffers.values():
                if buffer.address in addresses:
                    buffer.bits[...] = value.view(buffer.bits.dtype)[0]

    def _forward_runner(self) -> Any:
        def run(plan: ForwardPlan, call: Call) -> None:
            x, w, bias, y, kept = call.addresses
            assert x
            assert w
            assert (bias != 0) is (plan.problem.bias is not None)
            assert (kept != 0) is (plan.kept_spec is not None)
            self._pay(plan, [*plan.products.values()])
            self._write(plan, [y])

        return run

    def _backward_runner(self) -> Any:
        def run(plan: BackwardPlan, call: Call) -> None:
            problem = plan.problem
            at = SimpleNamespace(**addresses(problem, call))
            assert (at.saved != 0) is (problem.own.saved_spec is not None)
            through = problem.through
            assert (at.saved_below != 0) is (through is not None and through.saved_spec is not None)
            self._pay(plan, [*plan.products.values()])
            self._write(plan, [each for each in (at.dx, at.dw, at.db, at.dz, at.db_below) if each])

        return run
