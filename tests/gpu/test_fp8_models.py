"""Training of models with FP8 products on the GPU: eager and as a graph, tuned, against BF16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from tests.support.fp8_layers import BF16

pytestmark = pytest.mark.usefixtures("fp8_products")

DIMS, ROWS = [256, 512, 256, 64], 512


def train(
    gpu: Any,
    steps: int,
    *,
    precision: Any,
    graph: bool = True,
    tune: bool = False,
    weights: tuple[Any, ...] = (),
    gated: bool = False,
) -> tuple[list[float], bytes]:
    """Trains a model to imitate a random one; returns the losses, and the final bytes of parameters and scales."""
    teacher = lt.MLP(DIMS, "gelu", dtype="float32", seed=9, device="cpu")
    options: dict[str, Any] = {"dtype": "bfloat16", "seed": 4, "device": "cuda", "precision": precision}
    model: Any = lt.MLP(DIMS, "gelu", **options)
    if gated:
        block = lt.Residual(lt.SwiGLU(DIMS[0], DIMS[1], dropout=0.1, **options))
        model = lt.Chain(lt.Linear(DIMS[0], DIMS[0], **options), block, lt.Linear(DIMS[0], DIMS[-1], **options))
    layers = [each for each in model.blocks() if isinstance(each, lt.Linear)]
    step = lt.TrainStep(
        model, lt.AdamW(model.parameters(), lr=2e-3), loss="mse", batch_size=ROWS, graph=graph, tune=tune
    )
    generator, losses = np.random.default_rng(0), []
    for _ in range(steps):
        x = generator.standard_normal((ROWS, DIMS[0]), np.float32)
        batch = (gpu.cp.asarray(each.astype(BF16)) for each in (x, 30.0 * teacher(x)))
        losses.append(float(step(*batch, *weights)))
    gpu.cp.cuda.Device().synchronize()
    arrays = [gpu.host_of(each.data) for each in model.parameters()]
    for layer in layers:
        if layer.scales is not None:
            slots = layer.scales.state_dict()["slots"]
            slots[1, 2] = 0  # the largest magnitude of w, which a graph's update finds one step earlier than forward
            arrays.append(slots)
    return losses, b"".join(each.tobytes() for each in arrays)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_graph_trains_bit_for_bit_as_eager_steps(gpu: Any, recipe: Any, gated: bool) -> None:
    options: Any = {"precision": lt.FP8(recipe=recipe), "gated": gated}
    assert train(gpu, 10, **options) == train(gpu, 10, **options, graph=False)


def test_the_loss_casts_as_the_last_layer_does(gpu: Any) -> None:
    """A loss casts its gradient to FP8 for the last layer; with row weights the layer casts the gradient itself."""
    losses, arrays = train(gpu, 10, precision=lt.FP8())
    others, expected = train(gpu, 10, precision=lt.FP8(), weights=(gpu.cp.ones(ROWS, np.float32),))
    assert arrays == expected
    assert losses == pytest.approx(others, rel=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("precision", [lt.FP8(), lt.FP8(recipe="current"), lt.FP8(gradients="e4m3")])
def test_training_reaches_the_loss_of_bfloat16(gpu: Any, precision: Any, gated: bool) -> None:
    """Compares mean losses of the last 40 of 400 steps; FP8's noise in the forward pass may raise its loss by 15 %."""
    in_fp8, _ = train(gpu, 400, precision=precision, tune=True, gated=gated)
    in_bf16, _ = train(gpu, 400, precision=None, gated=gated)
    assert np.mean(in_fp8[-40:]) < 1.15 * np.mean(in_bf16[-40:]) < 0.5 * in_bf16[0]


REPLAYS = 10_000


def test_ten_thousand_replays_keep_scales_sane_and_repeat_bit_for_bit(gpu: Any) -> None:
    """The batches come again and again, so that the model learns them; the scales follow magnitudes that shrink."""

    def run() -> tuple[float, float, bytes, list[lt.FP8State]]:
        model = lt.MLP(DIMS, "gelu", dtype="bfloat16", seed=4, device="cuda", precision=lt.FP8())
        step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-3), loss="mse", batch_size=ROWS, tune=False)
        generator = np.random.default_rng(0)
        sizes = (ROWS, DIMS[0]), (ROWS, DIMS[-1])
        drawn = ([generator.standard_normal(size, np.float32).astype(BF16) for size in sizes] for _ in range(4))
        batches = [tuple(map(gpu.cp.asarray, each)) for each in drawn]
        first = float(step(*batches[0]))
        for number in range(REPLAYS):
            loss = step(*batches[number % 4])
        last = float(loss)
        gpu.cp.cuda.Device().synchronize()
        states = [layer.scales for layer in model.layers]
        values = [
            *(gpu.host_of(each.data) for each in model.parameters()),
            *(each.state_dict()["slots"] for each in states),
        ]
        return first, last, b"".join(each.tobytes() for each in values), states

    first, last, found, states = run()
    assert last < 0.5 * first
    assert run()[:3] == (first, last, found)
    for state in states:
        history = state.state_dict()["history"]
        for (name, scale), past, dtype in zip(state.scales.items(), history, state.recipe.dtypes, strict=True):
            largest = {"float8_e4m3fn": 448, "float8_e5m2": 57344}[dtype.value]
            # A scale is a power of two and leaves room for twice the largest magnitude of the history.
            assert largest / 4 < scale * past.max() <= largest / 2, name
            assert state.overflows[name] < REPLAYS / 100


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("dims", [[1024, 2048, 64], [512, 1024, 1024, 1024, 512]])
def test_both_precisions_of_a_model_are_measured_and_right(gpu: Any, recipe: Any, dims: list[int]) -> None:
    """Either precision may win."""
    rows, precision = 8192, lt.FP8(recipe, fallback=True)
    model = lt.MLP(dims, "gelu", dtype="bfloat16", device="cuda", precision=precision)
    optimizer = lt.AdamW(model.parameters())
    step = lt.TrainStep(model, optimizer, loss="mse", batch_size=rows, tune=True)
    step(*(gpu.cp.ones((rows, cols), BF16) for cols in (dims[0], dims[-1])))
    found, *_ = lt.explain(model, rows)
    assert len(found.alternatives) == 1
    assert found.rejected == ()
    assert {layer.scales.fallback is None for layer in model.layers} == {found.strategy == "products in FP8"}
