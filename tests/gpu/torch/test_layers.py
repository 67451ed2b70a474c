"""Modules and functions for PyTorch on a GPU: results, captures, compilation, autocast, streams."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812

import lt_runtime.torch as ltt
from lt_runtime.torch import repeats

pytestmark = [  # warnings of PyTorch's own
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]
ACTIVATIONS = {"none": lambda z: z, "relu": torch.relu, "gelu": lambda z: F.gelu(z, approximate="tanh"), "silu": F.silu}


def leaves_of(*shapes: tuple[int, ...], dtype: Any) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(1)
    made = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    return [each.div(each.shape[-1] ** 0.5).to(dtype).requires_grad_() for each in made]


def gradients(y: Any, leaves: list[Any]) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(2)
    dy = torch.randn(y.shape, generator=generator, device="cuda").to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check_as_exact_as_pytorch(ours: list[Any], theirs: list[Any], exact: list[Any]) -> None:
    """Fails if a result's error against float64 exceeds 1.2 times PyTorch's in the same type, plus half a rounding.

    FP32 results may have errors of twice PyTorch's instead of 1.2 times: these come from the additions alone, and
    depend on their order, which differs from kernel to kernel.
    """
    for our, their, right in zip(ours, theirs, exact, strict=True):
        assert (our.dtype, our.shape) == (their.dtype, their.shape)
        error, allowed = (our.double() - right).norm(), (their.double() - right).norm()
        factor = 2.0 if our.dtype == torch.float32 else 1.2
        assert error <= factor * allowed + 0.5 * torch.finfo(our.dtype).eps * right.norm()


def feed_forward(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, add: Any, activation: Any) -> Any:
    return F.linear(ACTIVATIONS[activation](F.linear(x, w1, b1)), w2, b2) + add


SHAPES = (3, 43, 64), (200, 64), (200,), (56, 200), (56,), (3, 43, 56)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layers_are_as_exact_as_pytorch_s_and_stay_so_when_repeated(activation: Any, dtype: Any) -> None:
    leaves = leaves_of(*SHAPES, dtype=dtype)
    doubles = [each.detach().double().requires_grad_() for each in leaves]
    theirs = gradients(feed_forward(*leaves, activation), leaves)
    exact = gradients(feed_forward(*doubles, activation), doubles)
    x, w1, b1, w2, b2, add = leaves
    options = (activation, "none"), (0.01,) * 2, (0.0,) * 2
    for _ in range(5):  # the third call of equal addresses is captured
        y = ltt.functional.linear_layers(x, (w1, b1, w2, b2), options, add)
        check_as_exact_as_pytorch(gradients(y, leaves), theirs, exact)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_repeated_calls_read_their_own_operands(activation: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    repeats._recipes.clear()

    def block(x: Any, weight: Any, bias: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        options = (activation, "none"), (0.01,) * 2, (0.0,) * 2
        y, total = ltt.functional.layer_norm(x, weight, bias, add=x * 0.5)
        return ltt.functional.linear_layers(ltt.functional.linear(y, w1, b1), (w2, b2, w2.t(), None), options, total)

    run = torch.compile(block, fullgraph=True, dynamic=False) if compiled else block
    for call in range(6):
        for rows in (32, 48):
            shapes = (rows, 64), (64,), (64,), (64, 64), (64,), (96, 64), (96,)
            leaves = [each.detach() * (1 + call) ** 0.5 for each in leaves_of(*shapes, dtype=torch.bfloat16)]
            leaves = [each.requires_grad_() for each in leaves]
            x, weight, bias, w1, b1, w2, b2 = doubles = [each.detach().double().requires_grad_() for each in leaves]
            total = x + x * 0.5
            hidden = F.linear(F.layer_norm(total, (64,), weight, bias), w1, b1)
            exact = F.linear(ACTIVATIONS[activation](F.linear(hidden, w2, b2)), w2.t()) + total
            pairs = zip(gradients(run(*leaves), leaves), gradients(exact, doubles), strict=True)
            for found, right in pairs:
                assert (found.double() - right).norm() < 0.1 * right.norm()  # operands of another call give above 1
    known = {key[0] for key, recipe in repeats._recipes.items() if recipe is not None}
    assert len(known) >= 2  # operators whose calls were repeated


@pytest.mark.parametrize("dims", [[64, 256, 64], [64, 96, 96, 64]])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_repeated_calls_copy_operands_that_cannot_be_read_in_place(dims: list[int], activation: Any) -> None:
    model = ltt.MLP(dims, activation, device="cuda", dtype=torch.bfloat16)
    exact = copy.deepcopy(model).cpu().double()
    for _ in range(6):
        x = torch.randn(8, 64, 12, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        double = x.detach().cpu().double().requires_grad_()
        y, right = model(x), exact(double)
        found = [y, *torch.autograd.grad(y.sum(), [x, *model.parameters()])]  # the gradient of y has strides of 0
        wanted = [right, *torch.autograd.grad(right.sum(), [double, *exact.parameters()])]
        for our, true in zip(found, wanted, strict=True):
            assert (our.detach().cpu().double() - true).norm() < 0.1 * true.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_blocks_and_norms_are_as_exact_as_pytorch_s(dtype: Any) -> None:
    def theirs_of(x: Any, weight: Any, gate: Any, up: Any, down: Any) -> Any:
        y = F.rms_norm(x + x, (64,), weight, 1e-6)
        return F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down) + x + x

    def ours_of(x: Any, weight: Any, gate: Any, up: Any, down: Any) -> Any:
        y, total = ltt.functional.rms_norm(x, weight, add=x)
        return ltt.functional.gated(y, gate, up, down, add=total)

    leaves = leaves_of((3, 43, 64), (64,), (176, 64), (176, 64), (64, 176), dtype=dtype)
    doubles = [each.detach().double().requires_grad_() for each in leaves]
    exact = gradients(theirs_of(*doubles), doubles)
    check_as_exact_as_pytorch(gradients(ours_of(*leaves), leaves), gradients(theirs_of(*leaves), leaves), exact)


def step_of(model: Any, x: Any) -> Any:
    """Makes a function that computes a step's gradients and returns the loss."""

    def step() -> Any:
        for each in model.parameters():
            each.grad = None
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("loss", [ltt.cross_entropy, lambda z, t: F.cross_entropy(z.float(), t)])
def test_a_vocabulary_that_is_no_multiple_of_8_is_as_exact_as_pytorch_s(loss: Any, mode: Any) -> None:
    leaves = leaves_of((128, 96), (4099, 96), (4099,), dtype=torch.bfloat16)
    labels = torch.arange(128, device="cuda") * 32

    def trained(linear: Any, loss: Any, *operands: Any) -> list[Any]:
        made = loss(linear(*operands), labels)
        return [made.detach(), *torch.autograd.grad(made, operands)]

    run = (lambda f: f) if mode is None else partial(torch.compile, mode=mode)
    ours = lambda *operands: loss(ltt.functional.linear(*operands), labels)  # noqa: E731
    for _ in range(3):
        value = run(ours)(*leaves)
        found = [value.detach().clone(), *torch.autograd.grad(value, leaves)]
    exact = trained(F.linear, F.cross_entropy, *[each.detach().double().requires_grad_() for each in leaves])
    theirs = trained(F.linear, lambda z, t: F.cross_entropy(z.float(), t), *leaves)
    check_as_exact_as_pytorch([found[0].float(), *found[1:]], theirs, exact)


def test_a_captured_step_has_new_masks_in_each_replay() -> None:
    model = ltt.MLP([64, 256, 32], "relu", dropout=0.5, device="cuda", dtype=torch.bfloat16)
    step, stream, graph = (
        step_of(model, torch.randn(96, 64, device="cuda", dtype=torch.bfloat16)),
        torch.cuda.Stream(),
        torch.cuda.CUDAGraph(),
    )
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            loss = step()
        losses = [(graph.replay(), loss.item())[1] for _ in range(4)]
    assert len(set(losses)) == 4
    assert all(torch.isfinite(each.grad).all() for each in model.parameters())


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_model_computes_what_it_computes_eager(mode: Any) -> None:
    model = torch.nn.Sequential(ltt.FeedForward(64, 256, device="cuda"), ltt.LayerNorm(64, device="cuda"))
    x = torch.randn(96, 64, device="cuda")
    expected = [step_of(model, x)(), *[each.grad.clone() for each in model.parameters()]]
    compiled = step_of(torch.compile(model, fullgraph=True, mode=mode), x)
    for _ in range(4):
        loss = compiled().clone()
    torch.testing.assert_close([loss, *[each.grad for each in model.parameters()]], expected, rtol=1e-4, atol=1e-5)


class Residual(torch.nn.Module):
    """h = x + layer(x), y = h + feed_forward(norm(h))."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = ltt.Linear(16, 16, device="cuda"), ltt.LayerNorm(16, device="cuda")
        self.feed_forward = ltt.FeedForward(16, 32, device="cuda")

    def forward(self, x: Any) -> Any:
        y, h = self.norm(self.layer(x), add=x)
        return self.feed_forward(y, add=h)


def test_the_loss_of_a_deep_residual_model_compiles() -> None:
    """Inductor must not describe the loss's input by all that led to it: the text would double in each layer."""
    model, x = torch.nn.Sequential(*[Residual() for _ in range(24)]), torch.randn(32, 16, device="cuda")
    labels = torch.arange(32, device="cuda") % 16

    def cost() -> Any:
        return ltt.cross_entropy(model(x), labels)

    torch.testing.assert_close(torch.compile(cost, fullgraph=True)(), cost(), rtol=1e-4, atol=1e-5)


def test_autocast_and_a_grad_scaler_train_fp32_parameters_in_fp16() -> None:
    model, x = ltt.MLP([64, 128, 8], "gelu", device="cuda"), torch.randn(96, 64, device="cuda")
    optimizer, scaler, losses = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(), []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            y = model(x)
            loss = (y.float() - 1).square().mean()
        assert y.dtype is torch.float16
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_work_is_ordered_with_the_current_stream() -> None:
    layer, x = ltt.Linear(1024, 1024, device="cuda"), torch.zeros(1024, 1024, device="cuda")
    expected = F.linear(torch.ones_like(x), layer.weight, layer.bias)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        y = layer(x.fill_(1.0))
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


def test_a_tensor_on_the_cpu_beside_one_on_a_gpu_is_named() -> None:
    with pytest.raises(ValueError, match="weight is on cuda:0 but x on cpu"):
        ltt.Linear(8, 8, device="cuda")(torch.ones(2, 8))


REPEATED = """
import time
import torch
import lt_runtime.torch as ltt
from lt_runtime.gpu.memory import BoundPlan

launched, call = [], BoundPlan.__call__
BoundPlan.__call__ = lambda self: (launched.append(self), call(self))
layer = ltt.Linear(48, 40, activation="gelu", device="cuda", dtype=torch.bfloat16)
x = torch.randn(24, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
end = time.monotonic() + 30
while len({*launched}) < 2 and time.monotonic() < end:  # captures take only a small share of the time
    x.grad = layer.weight.grad = layer.bias.grad = None
    layer(x).sum().backward()
print(len({*launched}))
"""


def test_repeated_eager_calls_become_graphs_although_autograd_runs_backward_in_a_thread_of_its_own() -> None:
    """This test runs in a fresh process, because the package captures only if no foreign thread is alive."""
    done = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) >= 2, done.stderr  # at least two graphs: forward's and backward's
