"""Our side of a training step: a model and its batch, and its graph as planned before tuning and after."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cupy as cp

import lt_runtime as lt
from benchmarks.block_lt import DEVICE
from benchmarks.buffers import labels, normal
from benchmarks.layer_row import as_json
from benchmarks.step_cases import LEARNING_RATE, WEIGHT_DECAY, StepCase
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.graphs import Graph, captured_nodes, no_collection
from lt_runtime.gpu.streams import private_stream
from lt_runtime.plans.cache import forget
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.store.recording import RECORD_VARIABLE, read_recorded
from lt_runtime.training import captured
from lt_runtime.tuning.tuning import tune_problems


class Contender(NamedTuple):
    """A training step, ready to be repeated.

    Attributes:
        replays: puts so many steps on the stream, by the graph alone: its inputs lie in its buffers.
        calls: the same as a script has it, which copies a batch into those buffers for each step.
        first_loss: that of the initial parameters.
        nodes: of the graph, by kind.
    """

    replays: Callable[[int], object]
    calls: Callable[[int], object]
    first_loss: float
    nodes: dict[str, int]


class Setup:
    """What the contenders of a case have in common: initial parameters, a batch, and the stream; and our model.

    Attributes:
        x, target: the batch, on the GPU.
        stream: a CuPy stream that can be captured.
    """

    def __init__(self, case: StepCase, stream: Any) -> None:
        self.case, self.stream = case, stream
        self.model = lt.MLP(
            case.dims,
            case.activation,
            dtype=case.dtype.value,
            compute=case.compute.value,
            device=f"cuda:{DEVICE}",
            master_weights=case.master,
        )
        parameters = self.model.parameters()
        kept = {} if case.master else {"moments": "bfloat16", "stochastic_rounding": True}
        self.optimizer = lt.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **kept)
        arrays = [array for each in parameters for array in (each.data, each.master) if array is not None]
        self._kept = [(array, array.copy()) for array in arrays]
        self.x, self.target = batch(case)
        cp.cuda.Device().synchronize()

    @property
    def values(self) -> list[Any]:
        """The parameters as they are drawn, in FP32 if we have them so, layer by layer weight and bias."""
        initial = {id(array): values for array, values in self._kept}
        arrays = [each.data if each.master is None else each.master for each in self.model.parameters()]
        return [initial[id(array)] for array in arrays]

    def restore(self) -> None:
        """Gives our parameters their initial values; the optimizer keeps its moments."""
        for array, initial in self._kept:
            array.data.copy_from_device(initial.data, initial.nbytes)
        cp.cuda.Device().synchronize()

    def step(self) -> lt.TrainStep:
        """A step that is captured at its first call, by what is known of its problems by then."""
        return lt.TrainStep(self.model, self.optimizer, loss=self.case.loss, batch_size=self.case.rows)


def batch(case: StepCase) -> tuple[Any, Any]:
    """Random inputs with labels or targets."""
    x, outputs = normal((case.rows, case.dims[0]), case.dtype), (case.rows, case.dims[-1])
    return x, labels(*outputs) if case.loss == "cross_entropy" else normal(outputs, case.dtype)


def contender(setup: Setup) -> Contender:
    """A step, captured."""
    setup.restore()
    step, stream = setup.step(), setup.stream
    with stream:
        first_loss = float(step(setup.x, setup.target))
    graph = _graph(step)

    def replays(count: int) -> None:
        for _ in range(count):
            graph.launch(stream.ptr)

    def calls(count: int) -> None:
        with stream:
            for _ in range(count):
                step(setup.x, setup.target)

    return Contender(replays, calls, first_loss, nodes(step))


def forget_plans(case: StepCase) -> None:
    """Lets go of what another case, or another plan cache, has left of this one's plans."""
    forget(case.stack.problems(), DEVICE)


def tune(case: StepCase) -> dict[str, Any]:
    """Measures a step's problems, unless the plan cache has them; what that took, for the record."""
    start = time.perf_counter()
    groups = tune_problems(case.stack.problems(), DEVICE)
    seconds = time.perf_counter() - start
    return {"tuning_s": round(seconds, 3), "tuned": [as_json(each) for each in groups]}


def tuned_contender(setup: Setup, directory: Path) -> tuple[Contender, int]:
    """A step by what the tuner has found, and how many of the problems that it meets have not been measured.

    Args:
        directory: for the record of the problems.
    """
    forget_plans(setup.case)
    with _recording(directory / "met"):
        made = contender(setup)
    store = plan_store(DEVICE)
    keys = map(problem_key, read_recorded(directory / "met"))
    return made, sum(store.layer(key) is None and store.product(key) is None for key in keys)


@contextlib.contextmanager
def _recording(file: Path) -> Iterator[None]:
    """Has the problems that are planned written to a file."""
    before = os.environ.get(RECORD_VARIABLE)
    os.environ[RECORD_VARIABLE] = str(file)
    try:
        yield
    finally:
        del os.environ[RECORD_VARIABLE]
        if before is not None:
            os.environ[RECORD_VARIABLE] = before


def nodes(step: lt.TrainStep) -> dict[str, int]:
    """The nodes of a captured step by kind, such as "kernel", from capturing it once more."""
    gpu = step._gpu
    (batches,) = gpu._batches.values()
    with activated(DEVICE), captured._memory_from(gpu._pool), no_collection():
        names = captured_nodes(
            lambda stream: gpu._body.run(batches.parts, gpu.tally, stream), private_stream(DEVICE, "training")
        )
    return dict(Counter(name.lower() for name in names))


def _graph(step: lt.TrainStep) -> Graph:
    (batches,) = step._gpu._batches.values()
    assert batches.graph is not None
    return batches.graph
