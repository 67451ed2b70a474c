"""Training steps whose optimizer writes weights in FP8: bit for bit as steps that cast the weights in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.fp8_layers import BF16

ROWS, INPUTS = 32, 256
WEIGHT, AMAX = 1, 2  # indices in `FP8State.slots`: the row of w, and the column of the largest magnitude

Change = Callable[[FakeGpu, Any, Any], object]
"""Something that a script does between two steps, given the model and its optimizer."""


def made(gpu: FakeGpu, *, masters: bool = True, **options: Any) -> tuple[Any, Any]:
    """A model with two layers in FP8, and an optimizer of all its parameters."""
    kind = {"dtype": "bfloat16", "seed": 4, "device": "cuda", "precision": gpu.lt.FP8(), "master_weights": masters}
    model = gpu.lt.MLP([INPUTS, 512, 48, 10], "gelu", **kind)
    if "rules" not in options:
        return model, gpu.lt.AdamW(model.parameters(), lr=1e-2, stochastic_rounding=not masters, **options)
    weights, biases = ([each for each in model.parameters() if each.data.ndim == axes] for axes in (2, 1))
    return model, gpu.lt.Optimizer([(weights, options["rules"][0]), (biases, options["rules"][1])])


def train(
    gpu: FakeGpu,
    given: tuple[Any, Any],
    *,
    graph: bool,
    change: Change | None = None,
    rows: tuple[int, ...] = (ROWS,),
    bad: int = -1,
) -> list[bytes]:
    """Losses, parameters, scales and histories after each of six steps.

    Args:
        change: called before the fourth step.
        rows: batch sizes, which take turns.
        bad: number of a step whose inputs have an infinite element.
    """
    model, optimizer = given
    step = gpu.lt.TrainStep(model, optimizer, loss="cross_entropy", graph=graph, tune=False)
    generator, found = np.random.default_rng(1), []
    for number in range(6):
        x = generator.standard_normal((rows[number % len(rows)], INPUTS)).astype(BF16)
        x[0, 0] = np.inf if number == bad else 0
        labels = generator.integers(0, 10, len(x)).astype(np.int32)
        if number == 3 and change is not None:
            change(gpu, model, optimizer)
        loss = step(gpu.cp.asarray(x), gpu.cp.asarray(labels))
        gpu.synchronize_all()
        arrays = [gpu.host_of(each) for each in (loss, *(each.data for each in model.parameters()))]
        for layer in model.layers[:2]:
            slots = gpu.host_of(layer.scales.slots).copy()
            slots[WEIGHT, AMAX] = 0  # differs: an update finds w's largest magnitude one step earlier than forward
            arrays += [slots, gpu.host_of(layer.scales.history)]
        found.append(b"".join(each.tobytes() for each in arrays))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"masters": False, "moments": "bfloat16"},
        {"amsgrad": True, "max_norm": 0.5},
        {"skip_nonfinite": True, "bad": 2},
        {"rows": (ROWS, 2 * ROWS)},
        {"rows": (ROWS, ROWS - 1)},  # the second number of rows is no multiple of 16, so that its steps run in BF16
    ],
    ids=str,
)
def test_updates(gpu: FakeGpu, options: dict[str, Any]) -> None:
    of_steps = {name: value for name, value in options.items() if name in ("bad", "rows")}
    of_optimizer = {name: value for name, value in options.items() if name not in of_steps}
    eager, graph = (train(gpu, made(gpu, **of_optimizer), graph=graph, **of_steps) for graph in (False, True))
    assert graph == eager


def test_rules_of_groups(gpu: FakeGpu) -> None:
    rules = gpu.lt.rules.Lion(1e-3), gpu.lt.rules.SGD(1e-2, momentum=0.9)
    eager, graph = (train(gpu, made(gpu, rules=rules), graph=graph) for graph in (False, True))
    assert graph == eager


def _assign(gpu: FakeGpu, model: Any, optimizer: Any) -> None:
    model.layers[0].weight.assign(np.full((512, INPUTS), 0.01))


def _write(gpu: FakeGpu, model: Any, optimizer: Any) -> None:
    """Writes values into the arrays of a parameter themselves."""
    weight = model.layers[0].weight
    for array in (weight.data, weight.master):
        gpu.host_of(array)[...] *= -1
    weight.renew_copies()


def _load(gpu: FakeGpu, model: Any, optimizer: Any) -> None:
    model.load_state_dict(made(gpu)[0].state_dict())


def _copy_averages(gpu: FakeGpu, model: Any, optimizer: Any) -> None:
    other, _ = made(gpu)
    gpu.lt.EMA(other).copy_to(model)


def _scale(gpu: FakeGpu, model: Any, optimizer: Any) -> None:
    """Halves the scale of a weight."""
    state = model.layers[1].scales.state_dict()
    state["slots"][WEIGHT, :2] *= 2, 0.5
    model.layers[1].scales.load_state_dict(state)


def _update_scales(gpu: FakeGpu, model: Any, optimizer: Any) -> None:
    """Updates a layer's scales as in a step that is skipped."""
    model.layers[1].scales.update(skipped=gpu.cp.asarray(np.ones(1, np.uint32)))


def _step(gpu: FakeGpu, model: Any, optimizer: Any) -> None:
    optimizer.step()


def _train_small_batches(gpu: FakeGpu, model: Any, optimizer: Any) -> None:
    """Trains by another step, whose number of rows is no multiple of 16 and so does not allow FP8."""
    step = gpu.lt.TrainStep(model, optimizer, loss="cross_entropy", tune=False)
    x, labels = np.ones((ROWS - 1, INPUTS), BF16), np.zeros(ROWS - 1, np.int32)
    for _ in range(3):
        step(gpu.cp.asarray(x), gpu.cp.asarray(labels))


@pytest.mark.parametrize(
    "change", [_assign, _write, _load, _copy_averages, _scale, _update_scales, _step, _train_small_batches]
)
def test_changes_between_steps_are_seen(gpu: FakeGpu, change: Change) -> None:
    eager, graph = (train(gpu, made(gpu), graph=graph, change=change) for graph in (False, True))
    assert graph == eager


def test_a_step_casts_no_weight(gpu: FakeGpu) -> None:
    model, optimizer = made(gpu)
    step = gpu.lt.TrainStep(model, optimizer, loss="cross_entropy", tune=False)
    x, labels = gpu.cp.asarray(np.ones((ROWS, INPUTS), BF16)), gpu.cp.asarray(np.zeros(ROWS, np.int32))
    step(x, labels)
    names = gpu.kernels.launched
    captured = names[len(names) - names[::-1].index("copy_rows") : len(names) - names[::-1].index("optimizer")]
    # Two layers cast x and dy, and one kernel sets the scales of both; one kernel updates the weights with FP8 copies,
    # another one all other parameters.
    kernels = "cast_fp8", "fp8_scales", "optimizer_fp8", "optimizer"
    assert [captured.count(name) for name in kernels] == [4, 1, 1, 1]
    assert captured.index("fp8_scales") < captured.index("optimizer_fp8") < captured.index("optimizer")
    names.clear()
    step(x, labels)
    assert names == []  # nothing is launched beside the graph
