"""Models made of blocks, trained on the pretended GPU: as one graph, operation by operation, and on the host."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.block_trees import Tree, trees
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of
from tests.support.strategies import COMPILING
from tests.support.tree_checks import SMOOTH, check_steps

ROWS, WIDTH = 8, 16


def _stack(lt: Any, **options: Any) -> Any:
    def layer(i: int) -> Any:
        gated = lt.SwiGLU(WIDTH, 24, dropout=0.25, seed=i, **options)
        return lt.Residual(lt.Chain(lt.RMSNorm(WIDTH, **options), gated))

    return lt.Chain(layer(1), layer(2), lt.LayerNorm(WIDTH, **options), lt.Linear(WIDTH, 5, seed=3, **options))


def _tied(lt: Any, **options: Any) -> Any:
    class Tied(lt.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            self.enc = lt.Linear(WIDTH, 8, activation="gelu", seed=1, **options)
            self.dec = lt.Linear(8, WIDTH, weight=self.enc.weight.T, seed=2, activation="sigmoid")
            self.out = lt.Linear(WIDTH, 5, seed=3, **options)

        def forward(self, x: Any, run: Any) -> Any:
            return self.out.forward(self.dec.forward(self.enc.forward(x, run), run), run)

        def backward(self, dy: Any, run: Any) -> Any:
            return self.enc.backward(self.dec.backward(self.out.backward(dy, run), run), run)

    return Tied()


def _host(gpu: FakeGpu, array: Any) -> Any:
    gpu.synchronize_all()
    return np.array(array if isinstance(array, np.ndarray) else host_of(gpu, array))


@settings(COMPILING, max_examples=12)
@given(tree=trees(widths=(16, 16, 16, 5), **SMOOTH))
def test_random_trees(gpu: FakeGpu, tree: Tree, examples: Counter[str]) -> None:
    check_steps(gpu, tree, "float32", 1e-5, gpu.memory_used)
    examples["trees of blocks on the pretended GPU"] += 1


def test_micro_batches_and_labels(gpu: FakeGpu) -> None:
    lt, model = gpu.lt, _stack(gpu.lt, device="cuda")
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2), accumulate=2, ema=lt.EMA(model))
    x = gpu.cp.asarray(np.random.default_rng(1).standard_normal((4, 3, WIDTH)).astype(np.float32))
    labels = gpu.cp.asarray(np.arange(12, dtype=np.int32).reshape(4, 3) % 5)
    losses = [float(_host(gpu, step(x, labels))) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert step.metrics().steps == 8
    gpu.synchronize_all()


@pytest.mark.parametrize("graph", [False, True])
def test_a_block_with_cupy_runs_on_the_step_s_stream(gpu: FakeGpu, graph: bool) -> None:
    program = run_path(str(Path(__file__).parents[2] / "examples/mixture.py"))

    def losses(lt: Any, device: str, place: Any) -> list[float]:
        layers = (lt.Linear(16, width, seed=width, device=device) for width in (2, 4, 4))
        model = program["Mixture"](*layers)
        step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2), loss="mse", graph=graph)
        return [float(step(place(x), place(target))) for x, target in itertools.islice(program["batches"](), 3)]

    on_gpu = losses(gpu.lt, "cuda", gpu.cp.asarray)
    np.testing.assert_allclose(on_gpu, losses(gpu.lt, "cpu", np.asarray), rtol=1e-5)


def _tied_chain(lt: Any) -> Any:
    first = lt.Linear(WIDTH, 24, activation="gelu", seed=1, device="cuda")
    return lt.Chain(first, lt.Linear(24, WIDTH, weight=first.weight.T, seed=2), lt.Linear(WIDTH, 5, seed=3))


def _in_place(lt: Any) -> Any:
    class Added(lt.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            self.linear = lt.Linear(WIDTH, WIDTH, seed=2, device="cuda")

        def forward(self, x: Any, run: Any) -> Any:
            return lt.add(x, self.linear.forward(x, run), stream=run.stream)

        def backward(self, dy: Any, run: Any) -> Any:
            return lt.add(dy, self.linear.backward(dy, run), out=dy, stream=run.stream)

    return lt.Chain(lt.Linear(WIDTH, WIDTH, seed=1), Added(), lt.Linear(WIDTH, 5, seed=3))


def _derivatives(lt: Any) -> Any:
    layers = (lt.Linear(WIDTH, WIDTH, activation="gelu", dropout=0.25, seed=i, device="cuda") for i in range(3))
    # Backward of consecutive layers takes the same scratch memory, because nothing between them needs any.
    return lt.Chain(*map(lt.Residual, layers), lt.Linear(WIDTH, 5, seed=3))


def _recomputing(lt: Any) -> Any:
    blocks = (lt.SwiGLU(WIDTH, 24, recompute=True, bias=True, seed=i, device="cuda") for i in range(2))
    return lt.Chain(lt.Linear(WIDTH, WIDTH, seed=2), *map(lt.Residual, blocks), lt.Linear(WIDTH, 5, seed=3))


def test_a_block_that_recomputes_has_its_weight_gradients_on_a_branch(gpu: FakeGpu) -> None:
    model = gpu.lt.Chain(gpu.lt.Linear(32, 32, device="cuda"), gpu.lt.SwiGLU(32, 64, recompute=True, device="cuda"))
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", tune=False)
    step(*(gpu.cp.asarray(np.ones((64, 32), np.float32)) for _ in range(2)))
    gpu.synchronize_all()
    streams = {each.d: each.stream for each in gpu.library.calls}  # the capture's products, which came last
    first, up, down = (streams[each.grad.data.ptr] for each in model.parameters() if each.name.endswith("weight"))
    assert up == down != first  # the first layer's gradient has no other product beside it


@pytest.mark.parametrize("make", [_tied_chain, _in_place, _derivatives, _recomputing, _stack])
def test_weight_gradients_that_end_later_read_what_they_shall(gpu: FakeGpu, make: Callable[[Any], Any]) -> None:
    """The checker of races watches a graph that computes weight gradients beside later work, which reuses memory."""
    kept = list[list[bytes]]()
    for graph in False, True:
        model = make(gpu.lt)
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=1e-2), loss="mse", graph=graph)
        for seed in range(3):
            x, target = (np.random.default_rng(seed).standard_normal((ROWS, n)).astype(np.float32) for n in (WIDTH, 5))
            step(gpu.cp.asarray(x), gpu.cp.asarray(target))
        kept.append([_host(gpu, each.data).tobytes() for each in model.parameters()])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_of_a_tied_model_is_the_unbroken_one(gpu: FakeGpu, dtype: str, tmp_path: Path) -> None:
    lt, batches = gpu.lt, [np.random.default_rng(i).standard_normal((ROWS, WIDTH + 5)) for i in range(6)]

    def made(device: str = "cuda") -> dict[str, Any]:
        model = _tied(lt, device=device, dtype=dtype)
        parameters, scaler = model.parameters(), lt.GradScaler(256.0, growth_interval=2)
        groups = [(parameters[:1], lt.rules.Lion(1e-3)), (parameters[1:], lt.rules.AdamW(1e-2))]
        optimizer = lt.Optimizer(groups, scaler=scaler, max_norm=1.0)
        ema = lt.EMA(model, 0.5)
        step = lt.TrainStep(model, optimizer, loss="mse", ema=ema)
        return {"model": model, "opt": optimizer, "ema": ema, "step": step}

    def train(run: dict[str, Any], steps: range) -> None:
        for i in steps:
            x, target = (
                gpu.cp.asarray(each.astype(run["model"].dtype.numpy)) for each in np.split(batches[i], [WIDTH], 1)
            )
            run["step"](x, target)

    def state(run: dict[str, Any]) -> list[bytes]:
        gpu.synchronize_all()
        arrays = [
            array for each in run["model"].parameters() for array in (each.data, each.master) if array is not None
        ]
        arrays += [*run["ema"].averages.values(), *run["opt"].state_dict().values()]
        return [_host(gpu, each).tobytes() for each in arrays]

    unbroken, first, second, on_host = made(), made(), made(), made("cpu")
    train(unbroken, range(6))
    train(first, range(3))
    lt.save(tmp_path / "run", **first, epoch=3)
    train(second, range(4, 6))  # the second run's graph is captured before the file is loaded
    assert lt.load(tmp_path / "run", **second) == {"epoch": 3}
    lt.load(tmp_path / "run", **on_host)
    assert state(second) == state(on_host) == state(first)
    train(second, range(3, 6))
    assert state(second) == state(unbroken)
