"""The tuner of products: its candidates, and whole searches with stand-ins for cuBLASLt, the clock and the operands."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm, MatmulTile, ReductionScheme
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.problem import DType, MatmulProblem
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.methods import NARROW_MATMUL, NarrowPlan, heuristic_algorithm, plan_from_blob
from lt_runtime.store.entries import ProductEntry
from lt_runtime.tuner import operands, product_search
from lt_runtime.tuner.operands import Memory
from lt_runtime.tuner.product_search import MOST, find_algorithm, heuristic_candidates
from lt_runtime.tuner.report import algorithm_in_words
from lt_runtime.tuner.timing import Bench, Launch
from lt_runtime.tuner.verification import ProductOperands
from tests.support.algorithm_library import BOTH, NONE, WORKSPACE, FakeLibrary, waves
from tests.support.fake_clock import FakeClock
from tests.support.host_memory import bits
from tests.support.product_problems import forward, input_gradient
from tests.support.right_products import right

Fault = Callable[[ProductOperands], None]


def a_problem(m: int = 16, n: int = 24, k: int = 40, **changes: Any) -> MatmulProblem:
    return input_gradient(m, n, k, dtype=DType.FLOAT32, **changes)


class FakeGpu(FakeLibrary):
    """A fake cuBLASLt that computes products with NumPy.

    Attributes:
        us: microseconds of an algorithm, by its id; 10 for other ids.
        faults: functions that spoil the right results of an algorithm, by its id.
        nodes: types of the nodes of an algorithm's launch, by its id; one kernel for other ids.
        trials: the operands that the last tuning used.
        floor_us: microseconds that no algorithm can beat.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
        super().__init__(monkeypatch)
        self.us: dict[int, float] = {}
        self.faults: dict[int, Fault] = {}
        self.nodes: dict[int, list[str]] = {}
        self.trials: list[ProductOperands] = []
        self.floor_us = 0.0
        self.clock, self.memory = FakeClock(), memory
        workspace = SimpleNamespace(workspace=0x1000, workspace_size=WORKSPACE)
        monkeypatch.setattr(product_search, "stream_memory", lambda device, stream: workspace)
        monkeypatch.setattr(operands, "buffer_sets", lambda size, device: 2)
        monkeypatch.setattr(product_search, "driver_call", lambda *_: None)
        monkeypatch.setattr(product_search, "launcher", self._launcher)
        monkeypatch.setattr(product_search, "floor_us", lambda *_: self.floor_us)
        monkeypatch.setattr(product_search, "ProductOperands", self._trial)
        monkeypatch.setattr(MatmulPlan, "launches_at_most_two_kernels_by", lambda *of: self._is_lean(*of))

    def _trial(self, memory: Memory, problem: MatmulProblem) -> ProductOperands:
        self.trials.append(ProductOperands(memory, problem))
        return self.trials[-1]

    def _is_lean(self, plan: MatmulPlan, algorithm: Any) -> bool:
        nodes = self.nodes.get(algorithm.get(AlgoConfigAttribute.ID), ["KERNEL"])
        return len(nodes) <= 2 and set(nodes) == {"KERNEL"}

    def _launcher(self, plan: MatmulPlan, calls: list[Any]) -> Launch:
        number = plan.algorithm.get(AlgoConfigAttribute.ID)
        pay = self.clock.contender(str(number), self.us.get(number, 10.0))

        def launch(index: int, stream: int) -> None:
            pay(index, stream)
            trial = self.trials[index]
            assert trial.buffers["d"].address in calls[index].addresses
            right(trial)
            self.faults.get(number, lambda _: None)(trial)

        return launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, host_memory: Memory) -> FakeGpu:
    made = FakeGpu(monkeypatch, host_memory)
    made.offered = {(WORKSPACE, BOTH): [1, 2, 3], (0, NONE): [4]}
    return made


def search(gpu: FakeGpu, problem: MatmulProblem | None = None) -> ProductEntry:
    gpu.trials.clear()
    bench = Bench(0, gpu.clock, gpu.memory)  # type: ignore[arg-type]
    return find_algorithm(bench, problem or a_problem())


def reasons(verdict: ProductEntry) -> dict[int, str]:
    return {each.config["ID"]: each.reason for each in verdict.rejected}


def test_the_fastest_is_chosen_if_it_gains_enough(gpu: FakeGpu) -> None:
    gpu.us = {3: 9.95}
    assert search(gpu).config["ID"] == 1
    gpu.us = {3: 8.0, 4: 7.0}
    verdict = search(gpu)
    assert verdict.config["ID"] == verdict.algorithm[0] == 4
    assert (verdict.us, verdict.first_us, verdict.spread) == (7.0, 10.0, 0.0)
    assert verdict.candidates == 4
    assert verdict.rejected == ()
    assert MatmulPlan(a_problem(), 0, algorithm=verdict.algorithm).algorithm.blob == verdict.algorithm


def corrupt(trial: ProductOperands) -> None:
    bits(trial.buffers["d"])[0, 3, 5] += 16


def test_being_far_behind_a_wrong_one_is_no_reason(gpu: FakeGpu) -> None:
    gpu.us, gpu.faults = {2: 1.0, 3: 8.0, 4: 50.0}, {2: corrupt}
    verdict = search(gpu)
    assert (verdict.config["ID"], verdict.us, verdict.first_us) == (3, 8.0, 10.0)
    assert set(reasons(verdict)) == {2, 4}
    assert reasons(verdict)[2].startswith("wrong: d[0, 3, 5] is ")
    assert reasons(verdict)[4] == "far behind: 50.0 µs"
    assert len(gpu.trials) == 2
    assert {number for _, number in gpu.clock.launched} == {0, 1}, "every set of operands is used"


def test_a_wrong_first_is_rejected_too(gpu: FakeGpu) -> None:
    gpu.us, gpu.faults = {2: 30.0, 3: 20.0}, {1: corrupt}
    verdict = search(gpu)
    assert (verdict.config["ID"], verdict.us, verdict.first_us) == (4, 10.0, 10.0)
    assert list(reasons(verdict)) == [1]


def test_one_that_is_not_twice_the_same_is_rejected(gpu: FakeGpu) -> None:
    steps = iter(range(10**6))

    def wander(trial: ProductOperands) -> None:
        bits(trial.buffers["vector"])[0, 0, 5] ^= next(steps) % 2

    gpu.us, gpu.faults = {2: 5.0}, {2: wander}
    problem = a_problem(epilogue=Epilogue.BGRADB)
    assert reasons(search(gpu, problem))[2].startswith("two runs differ, with ")


def test_one_that_cannot_be_launched_is_rejected(gpu: FakeGpu) -> None:
    gpu.us = {2: 1.0, 3: 1.0}
    gpu.nodes = {2: ["MEMSET", "KERNEL"], 3: ["KERNEL"] * 3}
    gpu.refuses = lambda algorithm: algorithm.get(AlgoConfigAttribute.ID) == 4
    verdict = search(gpu)
    assert verdict.config["ID"] == 1
    assert set(reasons(verdict)) == {2, 3, 4}
    assert "cuBLASLt refuses the algorithm" in reasons(verdict)[4]
    assert {name for name, _ in gpu.clock.launched} == {"1"}


def test_when_time_is_up(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.us = {1: 2.1e6}
    monkeypatch.setattr("time.monotonic", lambda: gpu.clock.now)
    verdict = search(gpu)
    assert set(reasons(verdict)) == {2, 3, 4}
    assert reasons(verdict)[4] == "not measured: time was up"
    assert verdict.config["ID"] == 1


def test_where_none_is_right(gpu: FakeGpu) -> None:
    gpu.faults = dict.fromkeys(range(1, 5), corrupt)
    with pytest.raises(PlanError, match=r"no algorithm is of use for .*: wrong: d"):
        search(gpu)


class FakeNarrowPass:
    scratch_bytes = tickets = 0

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        pass


NARROW_PROBLEM = forward(32, 10, 40, dtype=DType.FLOAT32)


@pytest.fixture
def narrow(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> int:
    """The id by which the fake library names our kernel."""
    monkeypatch.setattr("lt_runtime.products.methods.NarrowPass", FakeNarrowPass)
    monkeypatch.setattr("lt_runtime.products.methods.workspace_size", lambda _: WORKSPACE)
    return NARROW_MATMUL.get(AlgoConfigAttribute.ID)


def test_our_kernel_is_one_more_candidate(gpu: FakeGpu, narrow: int) -> None:
    gpu.us = {3: 8.0, narrow: 6.0}
    verdict = search(gpu, NARROW_PROBLEM)
    assert (verdict.algorithm, verdict.us, verdict.candidates) == (NARROW_MATMUL.blob, 6.0, 5)
    assert algorithm_in_words(verdict.config) == "our kernel for narrow products"
    assert isinstance(plan_from_blob(NARROW_PROBLEM, 0, verdict.algorithm), NarrowPlan)
    gpu.us = {3: 8.0, narrow: 9.0}
    assert search(gpu, NARROW_PROBLEM).algorithm[0] == 3


def test_our_kernel_is_for_narrow_products_alone(gpu: FakeGpu) -> None:
    assert NARROW_MATMUL.blob not in {each.algorithm for each in search(gpu).rejected}
    with pytest.raises(PlanError, match="does not take"):
        plan_from_blob(a_problem(), 0, NARROW_MATMUL.blob)


def test_our_kernel_serves_where_the_library_offers_nothing(gpu: FakeGpu, narrow: int) -> None:
    gpu.offered = {}
    verdict = search(gpu, NARROW_PROBLEM)
    assert (verdict.algorithm, verdict.candidates, verdict.rejected) == (NARROW_MATMUL.blob, 1, ())
    assert verdict.us == verdict.first_us
    assert isinstance(heuristic_algorithm(NARROW_PROBLEM, 0), NarrowPlan)
    with pytest.raises(PlanError, match="offers 0 sound algorithms"):
        heuristic_algorithm(a_problem(), 0)


def test_partial_sums_that_have_no_room(narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNarrowPass, "scratch_bytes", WORKSPACE + 1)
    with pytest.raises(PlanError, match="no room"):
        plan_from_blob(NARROW_PROBLEM, 0, NARROW_MATMUL.blob)


ID, TILE, SPLITK, SCHEME = (
    AlgoConfigAttribute.ID,
    AlgoConfigAttribute.TILE_ID,
    AlgoConfigAttribute.SPLITK_NUM,
    AlgoConfigAttribute.REDUCTION_SCHEME,
)


def an_odd_problem(**changes: Any) -> MatmulProblem:
    return input_gradient(512, 1024, 769, **changes)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return FakeLibrary(monkeypatch)


def ids(algorithms: list[Algorithm]) -> list[int]:
    return [algorithm.get(ID) for algorithm in algorithms]


@pytest.mark.parametrize(("masks", "changes"), [((BOTH, NONE), {}), ((NONE,), {"no_split_k": True})])
def test_queries_differ_in_workspace_and_reductions(
    library: FakeLibrary, masks: tuple[int, ...], changes: dict[str, Any]
) -> None:
    library.offered = {(WORKSPACE, masks[0]): [1, 2]}
    heuristic_candidates(MatmulPlan(an_odd_problem(**changes), 0), WORKSPACE)
    first, *others = library.asked
    assert first == (WORKSPACE, masks[0])
    assert others == [(limit, mask) for limit in (WORKSPACE, 4 << 20, 0) for mask in masks]


def test_the_plans_own_is_first_and_no_algorithm_comes_twice(library: FakeLibrary) -> None:
    library.offered = {(WORKSPACE, BOTH): [3, 1, 2], (0, NONE): [2, 5], (4 << 20, BOTH): [1, 4]}
    plan = MatmulPlan(an_odd_problem(), 0, rank=1)
    assert ids(heuristic_candidates(plan, WORKSPACE)) == [1, 3, 2, 4, 5]


def test_no_more_than_the_most(library: FakeLibrary) -> None:
    library.offered = {(WORKSPACE, BOTH): [*range(8)], (4 << 20, BOTH): [*range(20, 28)], (0, NONE): [*range(40, 48)]}
    found = heuristic_candidates(MatmulPlan(an_odd_problem(), 0), WORKSPACE)
    assert ids(found) == [*range(8), *range(20, 28)]
    assert len(found) == MOST
    assert (0, NONE) not in library.asked


def known_bad(number: int) -> Algorithm:
    """A faulty split of K drops the tail: 12 parts of 64 leave out the last of 769 = 12·64 + 1 terms."""
    bad = Algorithm(number.to_bytes(8, "little") + bytes(56)).set(SPLITK, 12)
    return bad.set(AlgoConfigAttribute.STAGES_ID, 35)


def test_a_plan_of_a_given_algorithm_asks_no_heuristic(library: FakeLibrary) -> None:
    library.workspace = lambda _: 4096
    given = Algorithm((21).to_bytes(8, "little") + bytes(56)).set(TILE, MatmulTile.TILE_128x64)
    plan = MatmulPlan(an_odd_problem(), 0, algorithm=given.blob)
    assert (plan.algorithm.blob, plan.algorithm.workspace_size) == (given.blob, 4096)
    assert plan.algorithm.waves_count == pytest.approx(waves(given))
    assert library.asked == []
    assert MatmulPlan(a_problem(5, 6, 0), 0, algorithm=given.blob).algorithm is None


def test_what_speaks_against_a_given_algorithm(library: FakeLibrary) -> None:
    plain = Algorithm((21).to_bytes(8, "little") + bytes(56))
    with pytest.raises(PlanError, match=r"known to be wrong.*drops the tail of K"):
        MatmulPlan(an_odd_problem(), 0, algorithm=known_bad(66).blob)
    split = plain.set(SPLITK, 2).set(SCHEME, ReductionScheme.COMPUTE_TYPE)
    assert MatmulPlan(an_odd_problem(), 0, algorithm=split.blob).algorithm.blob == split.blob
    with pytest.raises(PlanError, match=r"sums the parts of a split K as .*COMPUTE_TYPE"):
        MatmulPlan(an_odd_problem(no_split_k=True), 0, algorithm=split.blob)
    narrow = plain.set(SPLITK, 2).set(SCHEME, ReductionScheme.OUTPUT_TYPE)
    with pytest.raises(PlanError, match=r"sums the parts of a split K as .*OUTPUT_TYPE"):
        MatmulPlan(an_odd_problem(), 0, algorithm=narrow.blob)
    library.workspace = lambda _: WORKSPACE + 1
    with pytest.raises(PlanError, match=f"needs {WORKSPACE + 1} bytes of workspace; there are {WORKSPACE}"):
        MatmulPlan(an_odd_problem(), 0, algorithm=plain.blob)
    library.refuses = lambda _: True
    with pytest.raises(PlanError, match="cuBLASLt refuses the algorithm"):
        MatmulPlan(an_odd_problem(), 0, algorithm=plain.blob)
