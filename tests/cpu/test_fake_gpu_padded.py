"""Products on padded copies on the pretended GPU, within layers, bound calls and captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.over_fake_gpu import own

DIMS, ROWS = (19, 33, 27, 7), 21


@pytest.fixture
def copies(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes products use padded copies where they can, and dw run beside dx; returns the memories of the copies."""
    choose, priors, plan = own("products.methods"), own("plans.cache"), own("products.padded").PaddedPlan
    padded_problem, backward_priors = own("products.padded").padded_problem, own("plans.priors").backward_priors
    methods, fastest_first = own("products.methods"), choose.fastest_first
    monkeypatch.setattr(
        choose,
        "fastest_first",
        lambda problem: [*([methods.PADDED] if padded_problem(problem) else []), *fastest_first(problem)],
    )

    def beside_first(problem: Any, device: int) -> Any:
        return sorted(backward_priors(problem, device), key=lambda each: not each.dw_concurrent)

    monkeypatch.setattr(priors, "backward_priors", beside_first)
    memories: list[Any] = []
    put = plan.put
    monkeypatch.setattr(plan, "put", lambda self, call, memory: (memories.append(memory), put(self, call, memory))[1])
    return memories


def trained(gpu: FakeGpu, *, graph: bool) -> tuple[list[float], dict[str, Any]]:
    lt, cp, random = gpu.lt, gpu.cp, np.random.default_rng(0)
    model = lt.MLP(DIMS, activation="relu", dtype="float32", compute="tf32", seed=3, device=0)
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=0.01), loss="mse", graph=graph)
    losses = []
    for _ in range(3):
        x, target = (cp.asarray(random.standard_normal((ROWS, n)).astype(model.dtype.numpy)) for n in (19, 7))
        losses.append(float(gpu.host_of(step(x, target))))
    gpu.synchronize_all()
    return losses, {each.name: gpu.host_of(each.data).copy() for each in model.parameters()}


def test_a_captured_step_has_room_for_the_copies_of_its_branches(gpu: FakeGpu, copies: list[Any]) -> None:
    eager, values = trained(gpu, graph=False)
    assert copies
    copies.clear()
    captured, others = trained(gpu, graph=True)
    assert len({memory.stream for memory in copies}) == 2
    assert captured == eager
    for name, value in values.items():
        assert np.array_equal(others[name], value), name


@pytest.mark.parametrize("backward", [False, True])
def test_a_bound_layer_has_room_for_its_copies(gpu: FakeGpu, copies: list[Any], backward: bool) -> None:
    lt, cp, random = gpu.lt, gpu.cp, np.random.default_rng(0)
    x, w, dy = (random.standard_normal(shape).astype(np.float32) for shape in ((21, 19), (33, 19), (21, 33)))
    y, dx, dw = (cp.zeros(shape, np.float32) for shape in ((21, 33), (21, 19), (33, 19)))
    _, ctx = lt.linear_fwd(cp.asarray(x), cp.asarray(w), compute="tf32")
    gpu.synchronize_all()
    if backward:
        bound = lt.bind(lt.linear_bwd, cp.asarray(dy), ctx, out_dx=dx, out_dw=dw, stream=gpu.stream)
    else:
        bound = lt.bind(lt.linear, cp.asarray(x), cp.asarray(w), compute="tf32", out=y, stream=gpu.stream)
    assert copies
    bound()
    gpu.synchronize_all()
    for made, wanted in ((dx, dy @ w), (dw, dy.T @ x)) if backward else ((y, x @ w.T),):
        np.testing.assert_allclose(gpu.host_of(made), wanted, rtol=4e-3, atol=0.05)


def test_backward_copies_its_gradient_once(gpu: FakeGpu, copies: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lt, cp = gpu.lt, gpu.cp
    x, w, dy = (cp.asarray(np.ones(shape, np.float32)) for shape in ((21, 19), (33, 19), (21, 33)))
    _, ctx = lt.linear_fwd(x, w, compute="tf32")
    passes, copied = own("kernels.resize").ResizePass, list[list[int]]()
    launch = passes.launch

    def recorded(self: Any, addresses: Any, stream: int) -> None:
        pairs = [*addresses]
        copied.append([source for source, _ in pairs])
        launch(self, pairs, stream)

    monkeypatch.setattr(passes, "launch", recorded)
    lt.linear_bwd(dy, ctx)
    gpu.synchronize_all()
    assert sum(sources.count(dy.data.ptr) for sources in copied) == 1
    assert len(copied) == 5, "dy once; w and dx, x and dw"


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "order"),
    [(21, 133, 135, ["dx", "dw", "sums"]), (200, 133, 135, ["dw", "sums", "dx"]), (200, 136, 64, ["sums", "dw", "dx"])],
)
def test_a_bias_gradient_alone_and_the_product_of_fewer_blocks_begin_in_time(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, rows: int, inputs: int, outputs: int, order: list[str]
) -> None:
    """A layer's bias gradient runs on a stream of its own; products with longer sums or ragged rows start first."""
    lt, begun = gpu.lt, list[tuple[str, int]]()
    products = {(rows, inputs, outputs): "dx", (outputs, inputs, rows): "dw"}

    def noted(owner: Any, method: str, launch: Callable[..., tuple[str, int]]) -> None:
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *given: (begun.append(launch(*given)), original(*given))[1])

    def product(plan: Any, call: Any, memory: Any) -> tuple[str, int]:
        return products.get((plan.problem.m, plan.problem.n, plan.problem.k), ""), memory.stream

    noted(own("products.padded").PaddedPlan, "put", product)
    noted(own("products.matmul").MatmulPlan, "put", product)
    noted(own("kernels.epilogue").BackwardPass, "launch", lambda *given: ("sums", given[-1].stream))
    wanted = {"db": "kernel", "derivative": "nobody", "db_below": "nobody", "dw_concurrent": True}
    monkeypatch.setattr(own("plans.priors"), "leaf_of", lambda *_: wanted)
    model = lt.MLP((19, inputs, outputs), activation="none", dtype="float32", compute="tf32", device=0)
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse", tune=False)
    step(*(gpu.cp.asarray(np.ones((rows, n), np.float32)) for n in (19, outputs)))
    gpu.synchronize_all()
    main = next(stream for name, stream in reversed(begun) if name == "dx")
    concurrent = [name for name, stream in begun if name in ("dx", "dw") or (name == "sums" and stream != main)]
    assert concurrent[-3:] == order
