"""Training steps of pretended processes on the pretended GPU: captured sums, plans of process 0, the order of closing.

All processes have the same batch, so that a step of two computes what a step without a group computes.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.fake_nccl import SUM_KERNEL, MirrorWire
from tests.support.placed import host_of

_ROWS, _STEPS = 8, 3
Grouped = Callable[..., Any]


@pytest.fixture
def grouped(gpu: FakeGpu) -> Iterator[Grouped]:
    """Makes groups of pretended processes, and closes them after the test."""
    module, groups = importlib.import_module("lt_runtime.distributed.group"), list[Any]()

    def make(size: int = 2, rank: int = 0, **replies: bytes) -> Any:
        wire = MirrorWire(size, rank)
        wire.replies |= {what: [what.encode() + b"\0" + reply] * size for what, reply in replies.items()}
        groups.append(module.Group(wire))
        return groups[-1]

    yield make
    for each in groups:
        each.close()


def _model(gpu: FakeGpu, kind: str) -> Any:
    lt, options = gpu.lt, {"dtype": "bfloat16", "device": 0, "seed": 3}
    if kind == "MLP":
        return lt.MLP([12, 16, 16, 8], "gelu", **options)
    if kind == "FP8":
        options |= {"precision": lt.FP8()}
        return lt.Chain(lt.Linear(12, 32, **options), lt.Linear(32, 32, **options), lt.Linear(32, 8, **options))
    shared = lt.Linear(16, 16, **options)
    norm = lt.LayerNorm(16, dtype="bfloat16", device=0)
    return lt.Chain(lt.Linear(12, 16, **options), norm, shared, lt.Residual(shared), lt.Linear(16, 8, **options))


def _step(gpu: FakeGpu, model: Any, max_norm: float | None = 1.0, **options: Any) -> Any:
    optimizer = gpu.lt.AdamW(model.parameters(), lr=1e-2, max_norm=max_norm, stochastic_rounding=True)
    return gpu.lt.TrainStep(model, optimizer, loss="mse", batch_size=_ROWS, **options)


def _train(gpu: FakeGpu, step: Any, steps: int = _STEPS) -> list[bytes]:
    """Calls `step` on `steps` batches; returns the bytes of each loss, and of each parameter at the end."""
    kept, model = list[bytes](), step.model
    for seed in range(steps):
        generator = np.random.default_rng(seed)
        batch = [generator.standard_normal((_ROWS, columns)).astype(model.dtype.numpy) for columns in (12, 8)]
        x, target = map(gpu.cp.asarray, batch)
        gpu.synchronize_all()
        loss = step(x, target, stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        kept.append(host_of(gpu, loss).tobytes())
    gpu.synchronize_all()
    return kept + [host_of(gpu, each.data).tobytes() for each in model.parameters()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    ("kind", "max_norm"), [("MLP", 1.0), ("blocks", 1.0), ("blocks", None), ("FP8", 1.0), ("FP8", None)]
)
def test_equal_batches_give_the_bits_of_one_process(
    gpu: FakeGpu,
    grouped: Grouped,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    max_norm: float | None,
    graph: bool,
    size: int,
) -> None:
    monkeypatch.setattr("lt_runtime.distributed.buckets._BYTES", 300)
    alone = _train(gpu, _step(gpu, _model(gpu, kind), max_norm, graph=graph))
    assert _train(gpu, _step(gpu, _model(gpu, kind), max_norm, graph=graph, group=grouped(size))) == alone


def _nodes(gpu: FakeGpu, step: Any) -> tuple[list[Any], list[int]]:
    """The nodes of a step's graph, and the indices of the nodes that sum over processes."""
    (buffers,) = step._gpu._buffers.values()
    nodes = gpu.driver._graphs[buffers.graph.executable].nodes
    return nodes, [index for index, node in enumerate(nodes) if node.arguments and node.arguments[0] == SUM_KERNEL]


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_the_graph_sums_buckets_beside_backward_and_before_the_update(
    gpu: FakeGpu, grouped: Grouped, monkeypatch: pytest.MonkeyPatch, max_norm: float | None
) -> None:
    monkeypatch.setattr("lt_runtime.distributed.buckets._BYTES", 300)
    step = _step(gpu, _model(gpu, "blocks"), max_norm, group=grouped())
    _train(gpu, step)
    nodes, sums = _nodes(gpu, step)
    # From the last layer on, gradients have 272, 544, 64 and 416 bytes; the second bucket has those of two layers.
    assert len(sums) == 3
    ordered = [nodes[later].before >> earlier & 1 for earlier, later in itertools.pairwise(sums)]
    assert all(ordered)  # NCCL runs the operations of a communicator in one order
    beside = [index for index in range(sums[0] + 1, len(nodes)) if not nodes[index].before >> sums[0] & 1]
    assert len(beside) >= 3  # The backward pass of the norm and of the first layer runs beside the first sum.
    assert all(nodes[-1].before >> each & 1 for each in sums)  # The last node, the update, comes after all sums.
    # Without a norm, parameters whose gradients are not in the last bucket are updated beside the last sum, after a
    # memset that lets the sum start first.
    early = [node for node in nodes[sums[-1] + 1 :] if not node.before >> sums[-1] & 1]
    kinds = [node.kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for node in early]
    assert kinds == ([] if max_norm else ["MEMSET", "KERNEL"])
    assert all(node.before >> sums[-2] & 1 for node in early)


def test_the_plans_of_process_0_win(gpu: FakeGpu, grouped: Grouped) -> None:
    cache, document, entries, keys, stores = (
        importlib.import_module(f"lt_runtime.{name}")
        for name in ("plans.cache", "store.document", "store.entries", "store.keys", "store.plan_store")
    )
    cache.forget([each for each, _ in cache._plans], 0)
    _train(gpu, _step(gpu, _model(gpu, "blocks")))
    store = stores.plan_store(0)
    problem, own = next(
        (problem, plan)
        for (problem, _), plan in cache._plans.items()
        if hasattr(plan, "strategy") and _splits(cache, problem)
    )
    other = next(each for each in reversed(_splits(cache, problem)) if each != own.strategy)
    theirs = document.Document(store.fingerprint)
    theirs.add(keys.problem_key(problem), entries.LayerEntry(keys.to_json(other), 1.0))
    replies = {
        "the plan cache of process 0": theirs.render(),
        "the order of the gradients": b"[7, 6, 5, 4, 3, 2, 1, 0]",
    }
    _train(gpu, _step(gpu, _model(gpu, "blocks"), group=grouped(rank=1, **replies)))
    assert cache._plans[problem, 0].strategy == other
    cache.forget([each for each, _ in cache._plans], 0)


def _splits(cache: Any, problem: Any) -> list[Any]:
    """The strategies of a layer's forward problem; empty for other problems."""
    return [*cache.strategies_of(problem)] if type(problem).__name__ == "ForwardProblem" else []


def test_graphs_are_freed_before_the_communicator(
    gpu: FakeGpu, grouped: Grouped, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = grouped()
    step = _step(gpu, _model(gpu, "MLP"), group=group)
    _train(gpu, step)
    (buffers,), left = step._gpu._buffers.values(), list[Any]()
    monkeypatch.setattr(gpu.nccl.communicators[-1], "destroy", lambda: left.append(buffers.graph))
    group.close()
    assert left == [None]


@pytest.mark.parametrize("graph", [True, False])
def test_the_watchdog_hears_of_each_step(gpu: FakeGpu, grouped: Grouped, graph: bool) -> None:
    group = grouped()
    _train(gpu, _step(gpu, _model(gpu, "MLP"), group=group, graph=graph))
    assert group.engine(0)._watchdog._steps == _STEPS


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("kind", ["blocks", "FP8"])
def test_each_process_updates_and_keeps_its_part_of_the_state(
    gpu: FakeGpu, grouped: Grouped, kind: str, graph: bool
) -> None:
    """The test makes one step: pretended processes send no parameters, and a second step would need them."""
    whole = _step(gpu, _model(gpu, kind), graph=graph)
    expected = _train(gpu, whole, steps=1)
    moments = whole.optimizer.state_dict()
    order = json.dumps([*range(len(expected) - 1)]).encode()
    plans = importlib.import_module("lt_runtime.store.plan_store").plan_store(0).content()
    owned, replies = set[str](), {"the plan cache of process 0": plans, "the order of the gradients": order}
    for rank in (0, 1):
        group = grouped(rank=rank, **(replies if rank else {}))
        step = _step(gpu, _model(gpu, kind), graph=graph, group=group, shard_state=True)
        found = _train(gpu, step, steps=1)
        before = [host_of(gpu, each.data).tobytes() for each in _model(gpu, kind).parameters()]
        state = step.optimizer.state_dict()
        for i, parameter in enumerate(step.optimizer.parameters):
            is_own = bool(step.optimizer.moments[i])
            assert is_own == (parameter.master is not None)
            assert found[1 + i] == (expected[1 + i] if is_own else before[i])
            if is_own:
                owned.add(parameter.name)
                np.testing.assert_array_equal(state[f"{parameter.name}.m"], moments[f"{parameter.name}.m"])
        sent = [operation for _, call in gpu.nccl.calls for operation in call if operation.name == "broadcast"]
        assert {operation.options[0] for operation in sent} == {0, 1}
    assert owned == {each.name for each in whole.optimizer.parameters}
