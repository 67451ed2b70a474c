"""`AdamW` writes weights of layers in FP8 on a GPU: steps have the bits of those whose forward casts the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import lt_runtime as lt
import lt_runtime.torch as ltt
from lt_runtime.profiling.collector import Collector
from lt_runtime.torch import fp8_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fp8_products"),
    # PyTorch's own warning, if the first work of autograd's thread is a product
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]

Change = Callable[[Any], object]


def training(*, gated: bool = False, after: Change = lambda model: None, **options: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and a step of a batch; `after` changes the model at the end of each step."""
    torch.manual_seed(0)
    of_layers: dict[str, Any] = {"precision": lt.FP8(), "device": "cuda", "dtype": torch.bfloat16}
    if gated:
        model: Any = ltt.FeedForward(256, 512, "silu", gated=True, **of_layers)
    else:
        model = ltt.MLP([256, 512, 256], "gelu", **of_layers)
    optimizer = ltt.AdamW(model.parameters(), lr=1e-3, **options)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        after(model)
        return loss

    return model, optimizer, step


def batches(count: int) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(count)]


def train(*, captured: bool, change: Change = lambda model: None, **options: Any) -> list[Any]:
    """Losses and parameters after each of eight steps; `change` is called before the sixth step."""
    model, _, step = training(**options)
    run, found = ltt.capture(step, tune=False) if captured else step, []
    for number, x in enumerate(batches(8)):
        if number == 5:
            change(model)
        found += [run(x).detach(), *(each.detach().clone() for each in model.parameters())]
    return found


def assert_as_cast(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[Any]], reference: Callable[[], list[Any]] | None = None
) -> None:
    """Asserts that steps have the results of those (`reference`, else `run`) that cast the weights in forward."""
    found = run()
    with monkeypatch.context() as patched:
        patched.setattr(fp8_steps, "can_write", lambda *_: False)
        expected = (reference or run)()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@torch.no_grad()
def halve(model: Any) -> None:
    for each in model.parameters():
        each.mul_(0.5)


@torch.no_grad()
def normalise(model: Any) -> None:
    for each in model.parameters():
        if each.dim() == 2:
            each.div_(each.float().norm(dim=1, keepdim=True))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": True, "masters": True, "max_norm": 0.1},
        {"change": halve},
        {"change": lambda model: model.load_state_dict(training()[0].state_dict())},
        {"after": normalise},
        {"after": normalise, "masters": True, "change": halve},
    ],
    ids=["plain", "gated", "halved", "loaded", "normalised", "normalised, halved"],
)
def test_updates(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], captured: bool) -> None:
    run, eager = (lambda: train(captured=captured, **options)), (lambda: train(captured=False, **options))
    assert_as_cast(monkeypatch, run, eager)


@torch.no_grad()
def prune(model: Any) -> None:
    for each in model.parameters():
        each[..., 0].zero_()


@pytest.mark.parametrize("after", [lambda model: None, prune])
def test_graphs_of_pytorch_and_eager_steps_take_turns(monkeypatch: pytest.MonkeyPatch, after: Change) -> None:
    def run() -> list[Any]:
        model, _, step = training(after=after)
        given, found = batches(9), []
        static, stream = given[0].clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found += [step(x).detach() for x in given[:3]]
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step(static)
        for number, x in enumerate(given[3:]):
            if number == 4:
                halve(model)
            if number % 2:
                found.append(step(x).detach())
            else:
                static.copy_(x)
                graph.replay()
            found += [each.detach().clone() for each in model.parameters()]
        return found

    assert_as_cast(monkeypatch, run)


def test_a_captured_step_casts_no_weight() -> None:
    _, _, step = training()
    run, x = ltt.capture(step, tune=False), batches(1)[0]
    for _ in range(4):
        run(x)
    with Collector() as collector:  # PyTorch's profiler would stay attached, and no later test could profile
        run(x)
        torch.cuda.synchronize()
    names = [each.name for each in collector.activities]
    counts = [sum(each == name for each in names) for name in ("cast_fp8", "optimizer_fp8", "optimizer")]
    assert counts == [4, 1, 1]  # two layers cast x and dy; one kernel updates the weights, another one the biases


def test_backward_after_the_optimizers_step_is_refused() -> None:
    model, optimizer, step = training()
    for x in batches(4):
        step(x)
    loss = model(x.requires_grad_()).float().square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
