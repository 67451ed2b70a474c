"""The optimizer and the losses of `lt_runtime.torch` on a GPU: values, and steps in a CUDA graph of PyTorch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812

from lt_runtime.errors import CaptureError
from lt_runtime.torch import AdamW, cross_entropy, linear_cross_entropy, losses

pytestmark = pytest.mark.gpu


def model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(1)
    layers = torch.nn.Linear(40, 72), torch.nn.GELU(), torch.nn.Linear(72, 130)
    return torch.nn.Sequential(*layers).cuda().to(dtype)


def batch(seed: int, dtype: Any = torch.float32) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(256, 40, generator=generator), torch.randint(130, (256,), generator=generator)
    return x.cuda().to(dtype), labels.cuda()


def backward(of: Any, seed: int, scaler: Any = None, loss: Any = F.cross_entropy) -> None:
    x, labels = batch(seed, next(of.parameters()).dtype)
    for each in of.parameters():
        each.grad = None
    value = loss(of(x), labels)
    (value if scaler is None else scaler.scale(value)).backward()


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"lr": torch.tensor(3e-3)}, {"maximize": True}])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_steps_are_those_of_pytorch(options: dict[str, Any], clip: float | None) -> None:
    options = {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    ours, theirs = model(), model()
    made = AdamW(
        [{"params": ours[0].parameters(), "weight_decay": 0.3}, {"params": ours[2].parameters()}],
        max_norm=clip,
        **options,
    )
    twin = torch.optim.AdamW(
        [{"params": theirs[0].parameters(), "weight_decay": 0.3}, {"params": theirs[2].parameters()}],
        fused=True,
        **options,
    )
    for step in range(20):
        backward(ours, step)
        backward(theirs, step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        made.step()
        twin.step()
    assert_close(ours, theirs)
    swapped = torch.optim.AdamW([{"params": m.parameters()} for m in (ours[0], ours[2])], fused=True)
    swapped.load_state_dict(made.state_dict())
    backward(ours, 20)
    backward(theirs, 20)
    if clip is None:
        swapped.step()
        twin.step()
        assert_close(ours, theirs)


def test_the_loss_scale_is_pytorchs() -> None:
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        trained, scaler = model(), torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=3)
        made = kind(trained.parameters(), fused=True)
        for step in range(8):
            backward(trained, step, scaler)
            if step == 4:
                trained[0].weight.grad[3, 5] = float("inf")
            scaler.step(made)
            scaler.update()
        found.append((trained, scaler.get_scale()))
    assert found[0][1] == found[1][1]
    assert_close(found[0][0], found[1][0])


@pytest.mark.parametrize("way", ["float", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_does_what_eager_steps_do(way: str, dtype: Any) -> None:
    def rate(value: float) -> Any:
        return torch.tensor(value, device="cuda") if way == "tensor" else value

    def train(captured: bool) -> Any:
        trained = model(dtype)
        made = AdamW(trained.parameters(), rate(1e-2), masters=True, max_norm=0.5, ema_decay=0.9)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        x, labels = batch(0, dtype)

        def step() -> Any:
            made.zero_grad(set_to_none=True)
            loss = cross_entropy(trained(x), labels)
            loss.backward()
            made.step()
            return loss

        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        run = step
        if captured:
            made.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph, stream=stream):
                step()
            run = graph.replay
        with torch.cuda.stream(stream):
            kept = []
            for _ in range(20):  # gradients at ever new addresses push those of the graph out of the caches
                step()
                kept.append([each.grad for each in trained.parameters()])
            for i in range(5):
                for into, value in zip((x, labels), batch(i, dtype), strict=True):
                    into.copy_(value)
                group = made.param_groups[0]
                if way == "tensor":
                    group["lr"].fill_(1e-2 / (1 + i))
                else:
                    group["lr"] = 1e-2 / (1 + i)
                    made.apply_settings()
                run()
        torch.cuda.synchronize()
        step_number = next(iter(made.state_dict()["state"].values()))["step"]
        assert float(step_number) == 28
        return trained, made

    eager, captured = train(False), train(True)
    assert_close(captured[0], eager[0], 1e-5 if dtype is torch.float32 else 2**-7)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_first_step_in_a_capture_is_refused_and_the_optimizer_goes_on() -> None:
    trained = model()
    made, stream = AdamW(trained.parameters()), torch.cuda.Stream()
    backward(trained, 0)
    with pytest.raises(CaptureError, match="first gradient"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        made.step()
    made.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("classes", "chunk"), [(1024, None), (1003, 128), (50257, 64), (7003, "classes"), (50257, "classes")]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_cross_entropy_is_a_layer_and_its_loss(
    dtype: Any, classes: int, chunk: Any, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk == "classes":  # as for operands that are too large for a test
        chunk = monkeypatch.setattr(losses, "_CHUNK_BYTES", 0)
    torch.manual_seed(2)
    x, weight, bias = torch.randn(3, 100, 64), torch.randn(classes, 64) / 8, torch.randn(classes)
    ours = [each.to(dtype).cuda().requires_grad_() for each in (x, weight, bias)][: 2 + has_bias]
    exact = [each.detach().double().cpu().requires_grad_() for each in ours]
    labels = torch.randint(classes, (3, 100))
    labels[:, ::7] = -100
    found = linear_cross_entropy(*ours[:2], labels.cuda(), *ours[2:], shift=True, chunk=chunk)
    logits = F.linear(*exact)[:, :-1].flatten(0, 1)
    wanted = F.cross_entropy(logits, labels[:, 1:].flatten())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=max(4 * eps, 1e-5), atol=0)
    scale = 2.0**16 if dtype is torch.float16 else 1.0
    pairs = zip(torch.autograd.grad(found * scale, ours), torch.autograd.grad(wanted * scale, exact), strict=True)
    for mine, truth in pairs:
        assert (mine.double().cpu() - truth).norm() < max(4 * eps, 1e-5) * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1}])
@pytest.mark.parametrize("shape", [(300, 130), (3, 130, 50)])
def test_cross_entropy_is_pytorchs(dtype: Any, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    x = torch.randn(shape).to(dtype).cuda().requires_grad_()
    exact, labels = x.detach().double().cpu().requires_grad_(), torch.randint(130, shape[:1] + shape[2:])
    weight = torch.rand(130)
    found = cross_entropy(x, labels.cuda(), weight.cuda(), **options)
    wanted = F.cross_entropy(exact, labels, weight.double(), **options)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-5, atol=0)
    (mine,), (truth,) = torch.autograd.grad(found * 2.0**10, x), torch.autograd.grad(wanted * 2.0**10, exact)
    assert (mine.double().cpu() - truth).norm() < max(torch.finfo(dtype).eps, 1e-5) * truth.norm()


def test_a_factor_of_the_loss_is_not_rounded_to_16_bits() -> None:
    torch.manual_seed(4)
    x, weight = (torch.randn(256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    loss = linear_cross_entropy(x, weight, torch.randint(256, (256,), device="cuda"))
    (whole,) = torch.autograd.grad(loss, x, retain_graph=True)
    (third,) = torch.autograd.grad(loss / 3, x)
    assert abs(float(third.float().norm() / whole.float().norm()) * 3 - 1) < 2e-4


def test_a_copy_of_an_optimizer_continues() -> None:
    trained = model()
    made = AdamW(trained.parameters())
    backward(trained, 0)
    made.step()
    twin, copied = copy.deepcopy((trained, made))
    for each, of in ((trained, made), (twin, copied)):
        backward(each, 1)
        of.step()
    assert_close(trained, twin, 0, 0)
