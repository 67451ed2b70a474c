"""The operators of linear layers: values and gradients against PyTorch's, tracing, dropout, refused operands."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import lt_runtime as lt
import lt_runtime.torch as ltt
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, KindError, LayoutError, ShapeError
from lt_runtime.ops import call, first_use
from lt_runtime.torch import linear, operators
from lt_runtime.torch.functional import linear_layers
from lt_runtime.torch.operators import SecondDerivativeError
from tests.support.threads import hide_other_threads

ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": lambda z: F.gelu(z, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
}
linear_fwd = torch.ops.lt_runtime.linear_fwd.default
STATISTICS = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerance of norms, which keep FP32 statistics of FP64 rows too."""


def leaves_of(*shapes: tuple[int, ...], dtype: Any = torch.float64) -> list[Any]:
    """Returns random tensors that require a gradient; their values are the same in each run."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [each.to(dtype).requires_grad_() for each in made]


def gradients(y: Any, leaves: list[Any]) -> list[Any]:
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.fixture(params=["cpu", "gpu", "gpu traced"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the type to compute in and the tolerance: float64 on the CPU, float32 on the pretended GPU.

    On a GPU the package takes no float64. With the parameter "gpu traced", calls go through PyTorch's dispatcher, as
    those of a compiled graph do.
    """
    if request.param == "cpu":
        return torch.float64, {"rtol": 1e-10, "atol": 1e-10}
    request.getfixturevalue("pretended_gpu")
    if request.param == "gpu traced":
        monkeypatch.setattr(operators, "is_eager", lambda _: False)
    return torch.float32, {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("has_add", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_is_that_of_pytorch(activation: Any, has_add: bool, place: Any) -> None:
    leaves = leaves_of((2, 5, 8), (6, 8), (6,), (2, 5, 6), dtype=place[0])[: 3 + has_add]
    x, w, b, *add = leaves
    y = ltt.functional.linear(x, w, b, activation=activation, negative_slope=0.2, add=add[0] if add else None)
    expected = ACTIVATIONS[activation](F.linear(x, w, b)) + (add[0] if add else 0.0)
    torch.testing.assert_close(gradients(y, leaves), gradients(expected, leaves), **place[1])


def test_layers_in_a_row_are_those_of_pytorch(place: Any) -> None:
    leaves = leaves_of((7, 8), (6, 8), (6,), (5, 6), (4, 5), (4,), (7, 4), dtype=place[0])
    x, w1, b1, w2, w3, b3, add = leaves
    options = ("gelu", "relu", "none"), (0.01,) * 3, (0.0,) * 3
    y = linear_layers(x, (w1, b1, w2, None, w3, b3), options, add)
    hidden = torch.relu(F.linear(ACTIVATIONS["gelu"](F.linear(x, w1, b1)), w2))
    torch.testing.assert_close(gradients(y, leaves), gradients(F.linear(hidden, w3, b3) + add, leaves), **place[1])


@pytest.mark.parametrize("has_all", [False, True])
def test_a_gated_block_is_that_of_pytorch(has_all: bool, place: Any) -> None:
    shapes = (2, 5, 8), (6, 8), (6, 8), (4, 6), (6,), (6,), (4,), (2, 5, 4)
    leaves = leaves_of(*shapes[: 8 if has_all else 4], dtype=place[0])
    x, gate, up, down, *biases = leaves
    add = biases.pop() if has_all else None
    gate_bias, up_bias, down_bias = biases or (None,) * 3
    y = ltt.functional.gated(x, gate, up, down, *biases, add=add)
    expected = F.linear(F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias), down, down_bias)
    expected = expected if add is None else expected + add
    torch.testing.assert_close(gradients(y, leaves), gradients(expected, leaves), **place[1])


@pytest.mark.parametrize("has_add", [False, True])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_norm_is_that_of_pytorch(kind: str, has_add: bool, place: Any) -> None:
    x, weight, bias, add = leaves_of((2, 5, 8), (8,), (8,), (2, 5, 8), dtype=place[0])
    leaves = [x, weight, bias] if kind == "layer_norm" else [x, weight]
    made = getattr(ltt.functional, kind)(*leaves, eps=1e-3, add=add if has_add else None)
    total, leaves = (x + add, [*leaves, add]) if has_add else (x, leaves)
    y = F.layer_norm(total, (8,), weight, bias, 1e-3) if kind == "layer_norm" else F.rms_norm(total, (8,), weight, 1e-3)
    ours, theirs = (made[0] * made[1].sin(), y * total.sin()) if has_add else (made, y)
    torch.testing.assert_close(gradients(ours, leaves), gradients(theirs, leaves), **STATISTICS)
    if has_add:
        only_sum = ltt.functional.rms_norm(x, weight, add=add)[1]
        torch.testing.assert_close(gradients(only_sum, [x, add]), gradients(total, [x, add]), **STATISTICS)


def test_a_gradient_stops_at_frozen_operands_of_a_norm(place: Any) -> None:
    x, weight, add = leaves_of((5, 8), (8,), (5, 8), dtype=place[0])
    x.requires_grad_(False)
    y, total = ltt.functional.rms_norm(x, weight.detach(), add=add)
    torch.testing.assert_close(
        gradients(y + total, [add]),
        gradients(F.rms_norm(x + add, (8,), weight.detach(), 1e-6) + x + add, [add]),
        **STATISTICS,
    )


def test_dropout_has_one_mask_forward_and_backward(place: Any) -> None:
    (x,) = leaves_of((64, 8), dtype=place[0])
    y = ltt.functional.dropout(x, 0.25)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x * dx)
    assert 0.65 < (dx != 0).double().mean() < 0.85
    assert ltt.functional.dropout(x, 0.25, training=False) is x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_no_farther_from_exact_than_pytorch(dtype: Any) -> None:
    exact = leaves_of((64, 48), (40, 48), (40,))
    rounded = [each.detach().to(dtype).requires_grad_() for each in exact]
    right = F.silu(F.linear(*[each.double() for each in rounded]))
    ours = ltt.functional.linear(*rounded, activation="silu")
    theirs = F.silu(F.linear(*rounded))
    assert ours.dtype is dtype
    error = lambda y: (y.double() - right).norm().item()  # noqa: E731
    assert error(ours) <= 1.2 * error(theirs)


def test_gradients_agree_with_differences() -> None:
    leaves = leaves_of((3, 4), (5, 4), (5,), (2, 5), (2,), (3, 2))

    def function(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, add: Any) -> Any:
        return linear_layers(x, (w1, b1, w2, b2), (("gelu", "silu"), (0.01,) * 2, (0.0,) * 2), add)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradcheck(ltt.functional.gated, leaves_of((3, 4), (5, 4), (5, 4), (2, 5)))
    x, weight, bias, add = leaves_of((3, 4), (4,), (4,), (3, 4))
    assert torch.autograd.gradcheck(
        lambda *given: ltt.functional.layer_norm(*given[:3], add=given[3]), (x, weight, bias, add)
    )
    assert torch.autograd.gradcheck(ltt.functional.rms_norm, (x, weight))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("activations", "dropouts"), [(["none"], [0.0]), (["relu"], [0.5]), (["gelu"], [0.0]), (["gelu", "relu"], [0.5, 0])]
)
def test_the_operator_keeps_the_dispatcher_s_rules(activations: Any, dropouts: Any, training: bool) -> None:
    x, *parameters = leaves_of((3, 4), (4, 4), (4,), (4, 4), (4,), dtype=torch.float32)
    key, layers = torch.ones(1, dtype=torch.int32), len(activations)
    if not training:
        x, parameters = x.detach(), [each.detach() for each in parameters]
    arguments = ([x, None, key, *parameters[: 2 * layers]], activations, [0.01] * layers, dropouts, training)
    torch.library.opcheck(linear_fwd, arguments)


def test_the_other_operators_keep_the_dispatcher_s_rules_too() -> None:
    ops = torch.ops.lt_runtime
    x, gate, up, down, weight, bias, add = leaves_of(*[(4, 4)] * 4, (4,), (4,), (4, 4), dtype=torch.float32)
    key = torch.ones(1, dtype=torch.int32)
    options = ["silu", "none", "none"], [0.01] * 3, [0.0, 0.5, 0.0]
    torch.library.opcheck(ops.gated_fwd.default, ([x, add, key, gate, None, up, bias, down, bias], *options, True))
    torch.library.opcheck(ops.layer_norm_add_fwd.default, ([x, add, weight, bias], 1e-5, True))
    torch.library.opcheck(ops.rms_norm_fwd.default, ([x, None, weight, None], 1e-5, True))
    torch.library.opcheck(ops.dropout_fwd.default, ([x, key], 0.5, True))


def test_a_compiled_graph_has_no_break_and_takes_other_batch_sizes() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    w, b = leaves_of((6, 8), (6,), dtype=torch.float32)
    function = torch.compile(
        lambda x: ltt.functional.linear(x, w, b, activation="gelu").sin(), fullgraph=True, backend=counter, dynamic=True
    )
    for rows in (5, 7, 11):
        (x,) = leaves_of((rows, 8), dtype=torch.float32)
        expected = ACTIVATIONS["gelu"](F.linear(x, w, b)).sin()
        torch.testing.assert_close(gradients(function(x), [x, w, b]), gradients(expected, [x, w, b]))
    assert ["linear_fwd" in graph.code for graph in counter.graphs if graph.code.count("=")] == [True]


def dropped(x: Any, w: Any) -> Any:
    return ltt.functional.linear(x, w, activation="relu", dropout=0.5)


@pytest.mark.parametrize(
    "function",
    [dropped, torch.compile(dropped, fullgraph=True), lambda *a: checkpoint(dropped, *a, use_reentrant=False)],
    ids=["eager", "compiled", "checkpointed"],
)
def test_masks_follow_pytorch_s_generator_and_backward_has_them_too(function: Any) -> None:
    x, w = leaves_of((16, 4), (32, 4), dtype=torch.float32)
    torch.manual_seed(3)
    first = function(x, w)
    (dw,) = torch.autograd.grad(first.sum(), w)
    torch.testing.assert_close(dw, 2.0 * (first.detach() != 0).float().T @ x)
    second = function(x, w)
    torch.manual_seed(3)
    assert torch.equal(function(x, w), first)
    assert not torch.equal(second, first)
    positive = F.linear(x, w) > 0
    assert 0.35 < (first[positive] != 0).float().mean() < 0.65


def test_dropout_in_a_row_on_a_gpu(pretended_gpu: Any) -> None:
    x, w1, w2 = leaves_of((16, 4), (32, 4), (8, 32), dtype=torch.float32)
    torch.manual_seed(3)
    y = linear_layers(x, (w1, None, w2, None), (("relu", "none"), (0.01,) * 2, (0.5, 0.0)))
    torch.manual_seed(3)
    hidden = dropped(x, w1)
    torch.testing.assert_close(gradients(y, [x, w1, w2]), gradients(F.linear(hidden, w2), [x, w1, w2]))


@pytest.mark.parametrize(
    ("frozen", "calls"),
    [
        ("x w1 b1", [(False, True, True)]),
        ("w2 b2 b1", [(True, False, False), (True, True, False)]),
        ("x w2 b2", [(True, False, False), (False, True, False)]),
    ],
)
def test_frozen_operands_cost_no_product(frozen: str, calls: Any, pretended_gpu: list[Any]) -> None:
    x, w1, b1, w2, b2 = leaves_of((7, 8), (6, 8), (6,), (4, 6), (4,), dtype=torch.float32)
    for name in frozen.split():
        locals()[name].requires_grad_(False)
    options = ("gelu", "none"), (0.01,) * 2, (0.0,) * 2
    linear_layers(x, (w1, b1, w2, b2), options).sum().backward()
    assert pretended_gpu == calls


def test_a_frozen_weight_keeps_no_input(place: Any) -> None:
    x, w = leaves_of((7, 8), (6, 8), dtype=place[0])
    w.requires_grad_(False)
    y = ltt.functional.linear(x * 1, w)
    assert not any(each is not None and each.shape == x.shape for each in y.grad_fn.saved_tensors)
    torch.testing.assert_close(gradients(y, [x]), gradients(F.linear(x, w), [x]), **place[1])


@pytest.mark.parametrize("lay", [lambda y: y.sum(), lambda y: y.t().contiguous().t(), lambda y: y[::2, ::2]])
def test_gradients_may_lie_in_any_way(lay: Any, place: Any) -> None:
    leaves = leaves_of((6, 8), (6, 8), dtype=place[0])
    ours, theirs = (lay(each(*leaves)).sum() for each in (ltt.functional.linear, F.linear))
    torch.testing.assert_close(gradients(ours, leaves), gradients(theirs, leaves), **place[1])


def test_operands_may_lie_in_any_way(place: Any) -> None:
    leaves = leaves_of((3, 5, 8), (8, 6), dtype=place[0])
    x, w = leaves
    ours = ltt.functional.linear(x.transpose(0, 1), w.t())
    torch.testing.assert_close(
        gradients(ours, leaves), gradients(F.linear(x.transpose(0, 1), w.t()), leaves), **place[1]
    )
    assert (
        torch.autograd.grad(ours_of_view := ltt.functional.linear(x, v := w.t()), v, ours_of_view)[0]
        .t()
        .is_contiguous()
    )


def test_lazily_negated_views_are_read_with_their_sign(place: Any) -> None:
    leaves = leaves_of((5, 1), (1, 1), dtype=place[0])
    z = torch.complex(*leaves_of((5, 1), (5, 1), dtype=place[0]))
    results = []
    for function in (ltt.functional.linear, F.linear):
        negated = z.conj().imag
        assert negated.is_neg()
        y = function(leaves[0] + negated, leaves[1])
        results.append([function(negated, leaves[1]), *torch.autograd.grad(y, leaves, negated)])
    torch.testing.assert_close(*results, **place[1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named(place: Any) -> None:
    nested, w = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)], dtype=place[0]), torch.ones(8)
    for function, weight in ((ltt.functional.linear, w.expand(8, 8)), (ltt.functional.rms_norm, w)):
        with pytest.raises(LayoutError, match=r"x is nested; .*: x\.to_padded_tensor\(0\.0\)"):
            function(nested, weight)


@pytest.mark.parametrize("operand", ["x", "weight", "bias", "add", "dy"])
@pytest.mark.parametrize("lay", [lambda t: t[:1].expand(t.shape), lambda t: t.repeat_interleave(2, -1)[..., ::2]])
def test_operands_and_gradients_may_be_expanded_or_strided(lay: Any, operand: str, place: Any) -> None:
    shapes = {"x": (5, 4), "weight": (6, 4), "bias": (6,), "add": (5, 6), "dy": (5, 6)}
    leaves = dict(zip(shapes, leaves_of(*shapes.values(), dtype=place[0]), strict=True))
    dy, *inputs = [(leaves | {operand: lay(leaves[operand])})[name] for name in ("dy", "x", "weight", "bias", "add")]
    x, weight, bias, add = inputs
    both = ltt.functional.linear(x, weight, bias, activation="relu", add=add), F.linear(x, weight, bias).relu() + add
    torch.testing.assert_close(*both, **place[1])
    torch.testing.assert_close(*[torch.autograd.grad(y, inputs, dy) for y in both], **place[1])
    with torch.no_grad():
        torch.testing.assert_close(ltt.functional.linear(x, weight, bias, activation="relu", add=add), both[0])


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_profiles_have_names(place: Any) -> None:
    x, w = leaves_of((3, 4), (5, 4), dtype=place[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ltt.functional.linear(x, w).sum().backward()
    assert {"lt_runtime::linear", "lt_runtime::linearBackward"} <= {each.key for each in profile.key_averages()}


LAYERS: dict[str, Callable[[], Any]] = {
    "cpu": lambda: ltt.Linear(16, 16),
    "gpu": lambda: ltt.Linear(16, 16),
    "fp8": lambda: ltt.Linear(16, 16, precision="fp8"),
    "gated in fp8": lambda: ltt.FeedForward(16, 16, gated=True, precision="fp8"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_thread_of_autograd_measures_what_was_within_tuning_in_forward(
    name: str, request: pytest.FixtureRequest
) -> None:
    if name == "gpu":
        request.getfixturevalue("pretended_gpu")
    layer, x = LAYERS[name](), torch.ones(16, 16, requires_grad=True)
    found: list[bool] = []
    x.register_hook(lambda _: found.append(first_use.is_tuning()))
    with lt.tuning():
        losses = [layer(x).sum()]
        with first_use.not_tuning():
            losses.append(layer(x).sum())
    losses.append(layer(x).sum())
    threads = [threading.Thread(target=loss.backward, name="Dummy-1") for loss in losses]
    for each in threads:
        each.start()
        each.join()
    assert found == [True, False, False]
    assert not first_use.is_tuning()


def test_calls_beside_a_loader_with_workers_may_become_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_other_threads(monkeypatch)
    loader = torch.utils.data.DataLoader([*range(4)], num_workers=1)
    assert [call._is_alone() for _ in loader] == [True] * 4


@pytest.mark.parametrize(
    ("backend", "others", "expected"),
    [
        (None, [], True),
        ("aot_eager", [], True),
        ("aot_eager", ["InductorSubproc", "subproc_worker_timer", "tqdm_monitor", "Thread-4 (_pin_memory_loop)"], True),
        ("aot_eager", ["a reader of data"], False),
    ],
    ids=["eager", "compiled", "beside threads that never synchronise", "beside another thread"],
)
def test_calls_in_backward_may_become_graphs(
    backend: str | None, others: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may unless a thread lives that is not autograd's, torch.compile's, tqdm's, a loader's or the package's."""
    hide_other_threads(monkeypatch)
    layer, x, ends, found = ltt.Linear(16, 16), torch.ones(16, 16, requires_grad=True), threading.Event(), list[bool]()
    x.register_hook(lambda _: found.append(call._is_alone()))
    loss = (torch.compile(layer, backend=backend) if backend else layer)(x).sum()
    threads = [threading.Thread(target=ends.wait, name=name) for name in others]
    autograds = threading.Thread(target=loss.backward, name="Dummy-1")
    for each in (*threads, autograds):
        each.start()
    autograds.join()
    ends.set()
    for each in threads:
        each.join()
    assert found == [expected]


def test_memory_that_backward_needs_is_watched(place: Any) -> None:
    x, w = leaves_of((3, 4), (5, 4), dtype=place[0])
    y = ltt.functional.linear(x, w)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = ltt.functional.linear(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        assert ltt.functional.linear(x, w, activation="gelu").is_inference()


def test_inference_frees_hidden_outputs(pretended_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, alive, perform = list[Any](), list[int](), linear.perform

    def watched(*arguments: Any) -> Any:
        alive.append(sum(each() is not None for each in made))
        y = perform(*arguments)
        made.append(weakref.ref(y))
        return y

    monkeypatch.setattr(linear, "perform", watched)
    with torch.no_grad():
        ltt.MLP([8] * 5)(torch.ones(2, 8))
    assert alive == [0, 1, 1, 1]


def test_a_second_backward_finds_what_the_first_has_read(place: Any) -> None:
    """A last backward pass may overwrite saved tensors; a pass that retains the graph must not."""
    operands = leaves_of((3, 4), (6, 4), (6, 4), (4, 6), dtype=place[0])
    y = ltt.functional.gated(*operands)
    first, second = (torch.autograd.grad(y.sum(), operands, retain_graph=retains) for retains in (True, False))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_second_derivatives_and_transforms_are_refused() -> None:
    x, w = leaves_of((3, 4), (5, 4))
    y = ltt.functional.linear(x, w)
    with pytest.raises(SecondDerivativeError, match=r"create_graph=True.*linear"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError, match=r"torch\.func"):
        torch.func.grad(lambda x: ltt.functional.linear(x, w).sum())(x)
    with pytest.raises(SecondDerivativeError, match=r"torch\.func"):
        torch.vmap(lambda x: ltt.functional.linear(x[None], w))(x)
    with pytest.raises(SecondDerivativeError, match=r"is_grads_batched=True .* linear"):
        torch.autograd.grad(y, x, torch.ones(2, 3, 5), is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_traces_of_the_old_kind_are_refused_and_not_empty() -> None:
    with torch.no_grad(), pytest.raises(SecondDerivativeError, match=r"torch\.jit\.trace .* use torch\.export"):
        torch.jit.trace(ltt.Linear(8, 6), torch.ones(5, 8))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward_mode_derivatives_are_refused_and_not_lost(requires_grad: bool) -> None:
    x, w = torch.ones(3, 4), torch.ones(5, 4, requires_grad=requires_grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(SecondDerivativeError, match="forward-mode derivative"):
            ltt.functional.linear(dual, w)
        assert ltt.functional.linear(x, w).shape == (3, 5)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"x": torch.ones(3, 5)}, ShapeError, r"weight has shape \(6, 8\); it must be \(N, 5\)"),
        ({"x": torch.ones(())}, ShapeError, r"x has shape \(\)"),
        ({"weight": torch.ones(8)}, ShapeError, r"weight has shape \(8,\)"),
        ({"bias": torch.ones(8)}, ShapeError, r"bias has shape \(8,\); it must be \(6,\)"),
        ({"add": torch.ones(6)}, ShapeError, r"add has shape \(6,\); it must be \(3, 6\)"),
        (
            {"weight": torch.ones(6, 8, dtype=torch.float16)},
            DTypeError,
            "weight is torch.float16 but x is torch.float32",
        ),
        ({"bias": torch.ones(6, device="meta")}, DeviceError, "bias is on meta but x on cpu"),
        ({"weight": torch.ones(6, 8).to_sparse()}, LayoutError, r"weight is torch.sparse_coo.*weight\.to_dense\(\)"),
        ({"x": torch.nested.nested_tensor([torch.ones(3, 8)], layout=torch.jagged)}, LayoutError, "x is nested"),
        ({"activation": "swish"}, ArgumentError, "activation is 'swish'"),
        ({"dropout": 1.0}, ArgumentError, "dropout is 1.0"),
        ({"negative_slope": float("nan")}, ArgumentError, "negative_slope is nan"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Any], error: type, words: str) -> None:
    given = {"x": torch.ones(3, 8), "weight": torch.ones(6, 8), "bias": torch.ones(6)} | changed
    with pytest.raises(error, match=words):
        ltt.functional.linear(**given)


W, V = torch.ones(8, 8), torch.ones(8)
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "linear": ("x", lambda wrong: ltt.functional.linear(wrong, W, dropout=0.5)),
    "weight": ("weight", lambda wrong: ltt.functional.linear(W, wrong)),
    "gated": ("x", lambda wrong: ltt.functional.gated(wrong, W, W, W)),
    "up": ("up", lambda wrong: ltt.functional.gated(W, W, wrong, W, dropout=0.5)),
    "dropout": ("x", ltt.functional.dropout),
    "norm": ("x", lambda wrong: ltt.functional.layer_norm(wrong, V)),
    "norm's weight": ("weight", lambda wrong: ltt.functional.layer_norm(W, wrong)),
    "module": ("x", ltt.RMSNorm(8)),
    "fp8": ("x", ltt.Linear(16, 16, precision="fp8")),
    "input": ("input", lambda wrong: ltt.cross_entropy(wrong, V.long())),
    "labels": ("labels", lambda wrong: ltt.linear_cross_entropy(W, W, wrong)),
}


@pytest.mark.parametrize(("name", "call"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("wrong", [None, [1.0], np.ones(8), np.ones((8, 8))], ids=lambda each: type(each).__name__)
def test_operands_that_are_no_tensors_are_named(name: str, call: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(KindError, match=rf"^{name} is .*; it must be a torch\.Tensor"):
        call(wrong)


def test_a_type_that_the_package_does_not_have_is_named() -> None:
    x, w = torch.ones(3, 8, dtype=torch.complex64), torch.ones(6, 8, dtype=torch.complex64)
    with pytest.raises(DTypeError, match=r"x is torch\.complex64; accepted are float32"):
        ltt.functional.linear(x, w)


def test_operands_on_a_gpu_are_named_as_the_caller_knows_them(pretended_gpu: Any) -> None:
    with pytest.raises(ShapeError, match=r"weight has shape \(6, 8\); it must be \(N, 5\)"):
        ltt.functional.linear(torch.ones(3, 5), torch.ones(6, 8))


def test_arguments_of_an_operator_have_different_names() -> None:
    """torch.compile's Inductor turns an operator's schema into a Python signature, in which no name may occur twice."""
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("lt_runtime::")]
    assert len(schemas) >= 18
    for schema in schemas:
        names = [each.name for each in schema.arguments]
        assert len(names) == len({*names}), schema
