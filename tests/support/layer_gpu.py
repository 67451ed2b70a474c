"""Simulates a GPU in tests of the tuner: a test sets how long each plan takes, and plans write ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.kernels.call import Call
from lt_runtime.plans.cache import LayerPlan, LayerProblem, Strategy, strategies_of
from lt_runtime.plans.layers import BackwardPlan, ForwardPlan
from lt_runtime.problem import ForwardProblem, MatmulProblem
from lt_runtime.products import methods
from lt_runtime.store.entries import ProductEntry, RejectedAlgorithm
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner import chain_operands, layer_search, operands, product_search, search
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.chain_operands import ChainOperands
from lt_runtime.tuner.layer_search import plan_name
from lt_runtime.tuner.operands import Memory
from lt_runtime.tuner.timing import Bench
from tests.support.fake_clock import FakeClock
from tests.support.host_memory import bits
from tests.support.plan_entries import H200

TUNED, BY_HEURISTIC = bytes(64), b"\x01" * 64
"""The algorithm that the tuner finds, and the algorithm that the heuristic offers."""


def _fused_first(problem: LayerProblem, device: int) -> list[Strategy]:
    return sorted(strategies_of(problem), key=lambda each: "aux" in getattr(each, "epilogue", Epilogue.NONE).value)


class LayerGpu:
    """Replaces everything that needs a GPU until the test ends.

    Attributes:
        us: microseconds of a plan, by its name; `default_us` for other plans.
        tuned_us: microseconds with tuned algorithms, where they differ from `us`.
        wrong: names of plans that write twos, which is wrong.
        too_large: problems for which there is not enough memory.
        refused: names of epilogues that the library refuses.
        asked: products for which plans were made.
        tuned: products that were tuned, with the seconds allowed for each.
        useless: names of epilogues for which no algorithm is right.
        wrong_first: names of epilogues for which the heuristic's algorithm is wrong.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, memory: Memory) -> None:
        self.us: dict[str, float] = {}
        self.default_us = 10.0
        self.tuned_us: dict[str, float] = {}
        self.too_large: list[Any] = []
        self.wrong: set[str] = set()
        self.refused: set[str] = set()
        self.useless: set[str] = set()
        self.wrong_first: set[str] = set()
        self.asked: list[MatmulProblem] = []
        self.tuned: list[tuple[MatmulProblem, float]] = []
        self.operands: list[ChainOperands] = []
        self.forgotten: list[Any] = []
        self.clock, self._memory = FakeClock(), memory
        self.store = PlanStore(directory / "plans.json", H200)
        self._patch(monkeypatch)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lt_runtime.plans.layers.ForwardPass", lambda *_, **__: None)
        monkeypatch.setattr(BackwardPlan, "_pass", lambda *_, **__: None)
        for kind in (ForwardPlan, BackwardPlan):
            monkeypatch.setattr(kind, "run", lambda plan, call: self._run(plan, call))
        monkeypatch.setattr(layer_search, "priors_of", _fused_first)
        monkeypatch.setattr(search, "plan_store", lambda _: self.store)
        for module in (product_search, search):
            monkeypatch.setattr(module, "find_algorithm", self._find_algorithm)
        monkeypatch.setattr(layer_search, "heuristic_algorithm", self._plan)
        monkeypatch.setattr(layer_search, "floor_us", lambda *_: 0.0)
        monkeypatch.setattr(methods, "configuration", lambda _: {"ID": 2})
        monkeypatch.setattr(methods, "known_algorithm", self._tuned_or_known)
        monkeypatch.setattr(methods, "plan_from_blob", self._tuned_plan)
        monkeypatch.setattr(operands, "buffer_sets", lambda *_: 2)
        monkeypatch.setattr(chain_operands, "ChainOperands", self._allocate)
        monkeypatch.setattr(search, "workbench", self._workbench)
        monkeypatch.setattr(search, "clear_bench", lambda _: None)
        monkeypatch.setattr(search, "forget", lambda problems, _: self.forgotten.extend(problems))
        monkeypatch.setattr(time, "monotonic", lambda: self.clock.now)

    @contextlib.contextmanager
    def _workbench(self, device: int) -> Iterator[Bench]:
        self.operands.clear()
        yield Bench(device, self.clock, self._memory)  # type: ignore[arg-type]

    def _allocate(self, memory: Memory, chain: LayerChain) -> ChainOperands:
        if not {*self.too_large}.isdisjoint(chain.problems):
            raise MemoryError("out of memory")
        self.operands.append(ChainOperands(memory, chain))
        return self.operands[-1]

    def _plan(self, problem: MatmulProblem, _: int, tuned: bool = False) -> Any:
        self.asked.append(problem)
        if problem.epilogue.value in self.refused:
            raise PlanError(f"cuBLASLt offers 0 sound algorithms for {problem.epilogue.value}")
        blob = TUNED if tuned else BY_HEURISTIC
        return SimpleNamespace(problem=problem, tuned=tuned, blob=blob)

    def _tuned_or_known(self, problem: MatmulProblem, device: int) -> Any:
        return self._plan(problem, device, tuned=self.store.product(problem_key(problem)) is not None)

    def _tuned_plan(self, problem: MatmulProblem, device: int, algorithm: bytes) -> Any:
        return self._plan(problem, device, tuned=algorithm == TUNED)

    def _find_algorithm(self, _: Bench, problem: MatmulProblem, budget_s: float = 2.0) -> ProductEntry:
        self.tuned.append((problem, budget_s))
        with self.clock.watch.running():
            self.clock.now += budget_s
        if problem.epilogue.value in self.useless | self.refused:
            raise PlanError("none of cuBLASLt's algorithms is of use")
        wrong = RejectedAlgorithm(BY_HEURISTIC, {"ID": 2}, "wrong: d[0, 0, 0] is 1 and not 2")
        rejected = (wrong,) if problem.epilogue.value in self.wrong_first else ()
        return ProductEntry(TUNED, {"ID": 1}, 5.0, 6.0, 0.1, 3, rejected)

    def _run(self, plan: LayerPlan, call: Call) -> None:
        problem, at = plan.problem, dict(zip(plan.problem.operands, call.addresses, strict=True))
        if isinstance(problem, ForwardProblem):
            present = {"bias": problem.bias, "kept": plan.kept_spec}
        else:
            through = problem.input_derivative
            present = {
                "saved": problem.output_derivative.saved_spec,
                "saved_below": through.saved_spec if through else None,
            }
        assert at["x"]
        assert at["w"]
        assert {name: at[name] != 0 for name in present} == {name: each is not None for name, each in present.items()}
        self._pay(plan)
        self._write(plan, {at.get(name, 0) for name in ("y", "dx", "dw", "db", "dz", "db_below")} - {0})

    def _pay(self, plan: LayerPlan) -> None:
        name = plan_name(plan.problem, plan.strategy)
        us = self.us.get(name, self.default_us)
        if all(each.tuned for each in plan.products.values()):  # type: ignore[attr-defined]
            us = self.tuned_us.get(name, us)
        self.clock._spent += us
        self.clock.launched.append((name, 0))

    def _write(self, plan: LayerPlan, addresses: set[int]) -> None:
        name = plan_name(plan.problem, plan.strategy)
        value = np.full(1, 2.0 if name in self.wrong else 1.0, plan.problem.dtype.numpy)
        for each in self.operands:
            for buffer in each.buffers.values():
                if buffer.address in addresses:
                    bits(buffer)[...] = value.view(bits(buffer).dtype)[0]
