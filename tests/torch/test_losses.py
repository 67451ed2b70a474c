"""`ltt` losses against PyTorch's, on the CPU: by the reference, and by the calls made on a GPU, on NumPy arrays."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812
from torch._dynamo.testing import CompileCounterWithBackend

from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, LayoutError, ShapeError
from lt_runtime.torch import cross_entropy, linear_cross_entropy, losses
from lt_runtime.torch.operators import SecondDerivativeError
from lt_runtime.torch.tensors import as_numpy

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["CPU", "GPU"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way of a call: the reference, or the package's operations, which get NumPy views of the tensors."""

    def over_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
        inward = lambda each: as_numpy(each) if isinstance(each, torch.Tensor) else each  # noqa: E731
        return lambda *arrays, **more: function(
            *map(inward, arrays), **{name: inward(each) for name, each in more.items()}
        )

    if request.param == "GPU":
        for name in ("linear", "loss_of", "matmul", "add_chunk", "chunk_gradient"):
            monkeypatch.setattr(losses, name, over_numpy(getattr(losses, name)))
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        # The current GPU is -1, the number that `Tensor.get_device` returns for tensors on the CPU.
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    return str(request.param)


def leaves(*shapes: tuple[int, ...], dtype: Any = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [each.to(dtype).requires_grad_() for each in made]


def labels_for(shape: tuple[int, ...], classes: int, ignored: int = -100, dtype: Any = torch.int64) -> Any:
    made = torch.randint(classes, shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    made.view(-1)[1::3] = ignored
    return made


def widened(given: list[Any]) -> list[Any]:
    return [each.detach().double().requires_grad_() for each in given]


@pytest.fixture
def of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small operands are computed as large ones are: in chunks of classes."""
    for name, value in {"_CHUNK_BYTES": 0, "_CHUNK_CLASSES": 8}.items():
        monkeypatch.setattr(losses, name, value)


def check(found: Any, wanted: Any, ours: list[Any], theirs: list[Any], scale: float = 1.0) -> None:
    """Compares losses, and gradients of a loss that is multiplied by `scale` first, with those in float64."""
    found_grads = torch.autograd.grad(found * scale, ours)
    wanted_grads = torch.autograd.grad(wanted * scale, theirs)
    assert found.dtype is (torch.float64 if ours[0].dtype is torch.float64 else torch.float32)
    eps = torch.finfo(ours[0].dtype).eps
    torch.testing.assert_close(found.detach().double(), wanted.detach(), rtol=max(8 * eps, 1e-6), atol=0)
    for mine, exact in zip(found_grads, wanted_grads, strict=True):
        assert mine.dtype is ours[0].dtype
        error = float((mine.double() - exact).norm() / exact.norm())
        assert error < max(4 * eps, 1e-12 if eps < 1e-10 else 1e-6)


OPTIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (9, 5)),
    "everything": ({"label_smoothing": 0.1, "ignore_index": 2, "reduction": "sum"}, (9, 5)),
    "images": ({"label_smoothing": 0.2}, (3, 5, 2, 4)),
    "sequences": ({"reduction": "sum"}, (3, 5, 7)),
    "one": ({"ignore_index": 1000}, (5,)),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("options", "shape"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_pytorchs(
    path: str, options: dict[str, Any], shape: tuple[int, ...], weighted: bool, dtype: Any
) -> None:
    if path == "GPU" and dtype is torch.float64:
        pytest.skip("the package has no float64 on a GPU")
    (x,) = ours = leaves(shape, dtype=dtype)
    (exact,) = theirs = widened(ours)
    target = labels_for(shape[:1] + shape[2:] if len(shape) > 1 else (), 5, options.get("ignore_index", -100))
    weight = torch.rand(5, generator=torch.Generator().manual_seed(4)).to(dtype) if weighted else None
    wide = None if weight is None else weight.double()
    # The scale of mixed precision exceeds FP16's largest number, and gradients without it would vanish in FP16.
    check(
        cross_entropy(x, target, weight, **options),
        F.cross_entropy(exact, target, wide, **options),
        ours,
        theirs,
        2**10,
    )


def test_a_sum_over_labels_that_weigh_nothing_is_zero_and_so_is_its_gradient(path: str) -> None:
    ours, target, weight = leaves((9, 5), dtype=torch.float32), torch.zeros(9, dtype=torch.int64), torch.ones(5)
    weight[0] = 0
    loss = cross_entropy(ours[0], target, weight, reduction="sum")
    expected = F.cross_entropy(ours[0], target, weight, reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, ours), torch.autograd.grad(expected, ours))


@pytest.mark.parametrize("path", ["GPU"], indirect=True)
def test_the_gradient_is_written_in_backward_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, original = [], losses.loss_of

    def loss_of(*arrays: Any, **more: Any) -> Any:
        written.append(more["need_gradient"])
        return original(*arrays, **more)

    monkeypatch.setattr(losses, "loss_of", loss_of)
    (logits,) = leaves((9, 5), dtype=torch.float32)
    cross_entropy(logits, labels_for((9,), 5)).backward()
    assert written == [False, True]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("chunk", [None, 4, 1, "classes"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "ignore_index": 2, "reduction": "sum"}])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_cross_entropy_is_a_layer_and_its_loss(
    path: str, options: dict[str, Any], has_bias: bool, chunk: Any, dtype: Any, request: pytest.FixtureRequest
) -> None:
    if chunk == "classes":
        chunk = request.getfixturevalue("of_classes")
    if path == "GPU" and dtype is torch.float64:
        pytest.skip("the package has no float64 on a GPU")
    x, weight, *bias = ours = leaves((3, 4, 6), (11, 6), *[(11,)] * has_bias, dtype=dtype)
    labels = labels_for((3, 4), 11, options.get("ignore_index", -100), torch.int32)
    found = linear_cross_entropy(x, weight, labels, *bias, chunk=chunk, **options)
    wide, wide_weight, *wide_bias = theirs = widened(ours)
    logits = F.linear(wide, wide_weight, *wide_bias).flatten(0, 1)
    check(found, F.cross_entropy(logits, labels.flatten().long(), **options), ours, theirs, 2**10)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.usefixtures("of_classes")
def test_frozen_operands_get_no_gradients(path: str, frozen: tuple[int, ...], chunk: int | None) -> None:
    ours = leaves((8, 6), (11, 6), (11,), dtype=torch.float32)
    for i in frozen:
        ours[i].requires_grad_(False)
    theirs = [each.detach().clone().requires_grad_(each.requires_grad) for each in ours]
    labels = labels_for((8,), 11)
    found = linear_cross_entropy(*ours[:2], labels, ours[2], chunk=chunk)
    wanted = F.cross_entropy(F.linear(*theirs), labels)
    torch.testing.assert_close(found, wanted)
    assert found.requires_grad is wanted.requires_grad
    if found.requires_grad:
        found.backward()
        wanted.backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_causal_model_with_tied_weights_is_pytorchs(path: str) -> None:
    (embedding,) = ours = leaves((11, 6), dtype=torch.float32)
    (exact,) = theirs = widened(ours)
    tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(5))
    found = linear_cross_entropy(F.embedding(tokens, embedding), embedding, tokens, shift=True, chunk=4)
    logits = F.linear(F.embedding(tokens, exact), exact)[:, :-1]
    check(found, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), ours, theirs)


@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.usefixtures("of_classes")
def test_a_weight_that_is_stored_transposed_keeps_its_layout(path: str, chunk: int | None) -> None:
    x, stored = ours = leaves((8, 6), (6, 11), dtype=torch.float32)
    wide, exact = theirs = widened(ours)
    labels = labels_for((8,), 11)
    found = linear_cross_entropy(x, stored.t(), labels, chunk=chunk)
    check(found, F.cross_entropy(wide @ exact, labels), ours, theirs)


@pytest.mark.parametrize("chunk", [8, 64, None])
@pytest.mark.usefixtures("of_classes")
def test_16_bit_gradients_are_no_farther_from_float64_than_pytorchs(chunk: int | None) -> None:
    ours = leaves((64, 32), (200, 32), dtype=torch.bfloat16)
    exact, labels = widened(ours), labels_for((64,), 200)
    wanted = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels) / 3, exact)
    pytorchs = torch.autograd.grad(F.cross_entropy(F.linear(*ours), labels) / 3, ours)
    found = torch.autograd.grad(linear_cross_entropy(*ours, labels, chunk=chunk) / 3, ours)
    for mine, theirs, truth in zip(found, pytorchs, wanted, strict=True):
        assert (mine.double() - truth).norm() <= 1.2 * (theirs.double() - truth).norm()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_but_ignored_labels_is_as_in_pytorch(path: str, reduction: str) -> None:
    x, weight = leaves((4, 6), (5, 6), dtype=torch.float32)
    labels = torch.full((4,), -100)
    for loss in (
        cross_entropy(weight[:4, :5], labels, reduction=reduction),
        linear_cross_entropy(x, weight, labels, reduction=reduction),
    ):
        value = float(loss.detach())
        assert math.isnan(value) if reduction == "mean" else value == 0
        assert not torch.autograd.grad(loss, weight)[0].any()


@pytest.mark.usefixtures("of_classes")
def test_chunks_of_classes_without_a_finite_logit_count_as_nothing(path: str) -> None:
    x, weight = ours = leaves((8, 6), (20, 6), dtype=torch.float32)
    bias, labels = torch.zeros(20), torch.arange(8) % 8
    bias[8:16] = -math.inf
    theirs = widened(ours)
    wanted = F.cross_entropy(F.linear(*theirs, bias.double()), labels)
    check(linear_cross_entropy(x, weight, labels, bias), wanted, ours, theirs)


@pytest.mark.usefixtures("of_classes")
def test_a_large_weight_takes_memory_for_a_chunk_of_classes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, original = list[int](), losses.linear

    def linear(*operands: Any, **more: Any) -> Any:
        largest.append(more["out"].shape[1])
        return original(*operands, **more)

    monkeypatch.setattr(losses, "linear", linear)
    x, weight = leaves((8, 6), (11, 6), dtype=torch.float32)
    loss = linear_cross_entropy(x, weight, labels_for((8,), 11))
    assert largest == [8] * 4  # 11 classes and 5 of zeros, for the losses and once more for the gradients
    assert [each.dtype for each in torch.autograd.grad(loss, (x, weight))] == [torch.float32] * 2


def both(x: Any, weight: Any, bias: Any, labels: Any) -> Any:
    logits = F.linear(x, weight).view(2, x.shape[0] // 2, -1).movedim(-1, 1)
    of_logits = cross_entropy(logits, labels.view(2, -1), bias.exp())
    return linear_cross_entropy(x, weight, labels, bias) + of_logits


def test_gradients_are_those_of_finite_differences() -> None:
    operands = leaves((8, 6), (5, 6), (5,))
    labels = labels_for((8,), 5)
    assert torch.autograd.gradcheck(lambda x, w: both(x, w, operands[2].detach(), labels), operands[:2])
    assert torch.autograd.gradcheck(
        lambda b: linear_cross_entropy(*operands[:2], labels, b, reduction="sum", chunk=3), operands[2:]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_operators_keep_pytorchs_contract(dtype: Any) -> None:
    x, weight, bias = leaves((8, 6), (5, 6), (5,), dtype=dtype)
    labels, options = labels_for((8,), 5), (-100, 0.1)
    operator = torch.ops.lt_runtime
    of_layer = 3, dtype is torch.float16, [True, True, True], True
    torch.library.opcheck(
        operator.cross_entropy_fwd.default, ([leaves((8, 5), dtype=dtype)[0], labels, None], *options, True)
    )
    torch.library.opcheck(operator.linear_cross_entropy_fwd.default, ([x, weight, bias, labels], *options, *of_layer))


def test_compiled_once_for_any_batch() -> None:
    counter, first = CompileCounterWithBackend("aot_eager"), 0
    compiled = torch.compile(both, fullgraph=True, backend=counter, dynamic=True)
    for rows in (8, 16, 24):
        operands, labels = leaves((rows, 6), (5, 6), (5,)), labels_for((rows,), 5)
        found, wanted = (run(*operands[:2], operands[2].detach(), labels) for run in (compiled, both))
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(loss, operands[:2]) for loss in (found, wanted)]
        torch.testing.assert_close(*gradients)
        first = first or counter.frame_count
    assert counter.frame_count == first


def test_autocast_casts_as_for_pytorchs_layer() -> None:
    x, weight = leaves((8, 6), (5, 6), dtype=torch.float32)
    labels = labels_for((8,), 5)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(x, weight, labels)
    halves = [each.detach().bfloat16().requires_grad_() for each in (x, weight)]
    wanted = linear_cross_entropy(*halves, labels)
    assert found.dtype is torch.float32
    assert float(found.detach()) == float(wanted.detach())
    torch.testing.assert_close(torch.autograd.grad(found, x)[0], torch.autograd.grad(wanted, halves[0])[0].float())


@pytest.mark.parametrize("loss", [lambda x, w, t: cross_entropy(x @ w.t(), t), linear_cross_entropy])
def test_a_second_derivative_is_refused_and_a_second_backward_is_not(loss: Callable[..., Any]) -> None:
    x, weight = leaves((8, 6), (5, 6))
    made = loss(x, weight, labels_for((8,), 5))
    first = torch.autograd.grad(made, x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(made, x, retain_graph=True)[0], first, rtol=0, atol=0)
    with pytest.raises(SecondDerivativeError, match="create_graph=True"):
        torch.autograd.grad(made, x, create_graph=True)


def test_the_last_backward_pass_scales_the_gradients_in_place(path: str) -> None:
    x, weight = leaves((8, 6), (5, 6), dtype=torch.float32)
    loss = linear_cross_entropy(x, weight, labels_for((8,), 5))
    kept = [each.data_ptr() for each in loss.grad_fn.saved_tensors[:2]]
    first, last = (torch.autograd.grad(3 * loss, (x, weight), retain_graph=retains) for retains in (True, False))
    torch.testing.assert_close(first, last, rtol=0, atol=0)
    assert [each.data_ptr() for each in last] == kept
    assert not {each.data_ptr() for each in first} & {*kept}


def test_compiled_code_scales_the_gradients_in_place_too() -> None:
    x, weight = leaves((64, 16), (40, 16), dtype=torch.bfloat16)
    losses = [
        run(x, weight, labels_for((64,), 40)) for run in (torch.compile(linear_cross_entropy), linear_cross_entropy)
    ]
    kept = {each.shape: each.data_ptr() for each in losses[0].grad_fn.saved_tensors}
    made, wanted = (torch.autograd.grad(0.3 * loss, (x, weight)) for loss in losses)
    torch.testing.assert_close(made, wanted, rtol=0, atol=0)
    assert [each.data_ptr() for each in made] == [kept[each.shape] for each in made]


def test_logits_are_freed_before_gradients_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, alive, where = (
        128,
        list[bool](),
        torch.where,
    )  # the last call of `where` comes after the gradients are rounded
    x, weight = leaves((2 * rows, 16), (40, 16), dtype=torch.bfloat16)

    def watched(*arguments: Any) -> Any:
        sizes = [each.untyped_storage().nbytes() for each in gc.get_objects() if type(each) is torch.Tensor]
        alive.append(rows * len(weight) * x.itemsize in sizes)
        return where(*arguments)

    monkeypatch.setattr(torch, "where", watched)
    linear_cross_entropy(x, weight, labels_for((2 * rows,), 40), chunk=rows)
    assert not alive[-1]


X, W, T = torch.ones(8, 6), torch.ones(5, 6), torch.zeros(8, dtype=torch.int64)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "reduction": (lambda: cross_entropy(X, T, reduction="none"), ArgumentError, "reduction is 'none'"),
    "smoothing": (lambda: cross_entropy(X, T, label_smoothing=1.5), ArgumentError, r"label_smoothing is 1\.5"),
    "ignored": (lambda: cross_entropy(X, T, ignore_index=None), ArgumentError, "ignore_index is None"),
    "probabilities": (lambda: cross_entropy(X, X), DTypeError, r"target is torch\.float32"),
    "target's shape": (lambda: cross_entropy(X, T[:7]), ShapeError, r"target has shape \(7,\)"),
    "target's axes": (lambda: cross_entropy(torch.ones(4, 6, 2), T), ShapeError, r"target has shape \(8,\)"),
    "class weights": (lambda: cross_entropy(X, T, torch.ones(5)), ShapeError, r"weight has shape \(5,\)"),
    "class": (lambda: cross_entropy(X, T + 6), ArgumentError, "target holds 6; accepted are 0 to 5"),
    "negative weight": (lambda: cross_entropy(X, T, -torch.ones(6)), ArgumentError, "weight holds -1.0"),
    "trained weight": (lambda: cross_entropy(X, T, torch.ones(6).requires_grad_()), ArgumentError, "weight requires a"),
    "number": (lambda: cross_entropy(torch.ones(()), T), ShapeError, "input has shape"),
    "complex": (lambda: cross_entropy(X.to(torch.complex64), T), DTypeError, r"input is torch\.complex64"),
    "sparse target": (lambda: cross_entropy(X, T.to_sparse()), LayoutError, r"target is torch\.sparse_coo"),
    "sparse labels": (lambda: linear_cross_entropy(X, W, T.to_sparse()), LayoutError, r"labels is torch\.sparse_coo"),
    "complex weight": (
        lambda: cross_entropy(X, T, torch.ones(6, dtype=torch.complex64)), DTypeError, r"weight is torch\.complex64"
    ),
    "weight of a sum": (
        lambda: cross_entropy(X, T, torch.ones(6, device="meta"), reduction="sum"), DeviceError, "weight is on meta"
    ),
    "other device": (lambda: cross_entropy(X, T.to("meta")), DeviceError, "target is on meta"),
    "weight": (lambda: linear_cross_entropy(X, W.t(), T), ShapeError, r"weight has shape \(6, 5\)"),
    "types": (lambda: linear_cross_entropy(X, W.half(), T), DTypeError, r"weight is torch\.float16"),
    "bias": (lambda: linear_cross_entropy(X, W, T, torch.ones(6)), ShapeError, r"bias has shape \(6,\)"),
    "labels": (lambda: linear_cross_entropy(X, W, T[:7]), ShapeError, r"labels has shape \(7,\)"),
    "axes": (lambda: linear_cross_entropy(X[0], W, T[0], shift=True), ShapeError, r"x has shape \(6,\)"),
    "chunk": (lambda: linear_cross_entropy(X, W, T, chunk=0), ArgumentError, "chunk is 0"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(run: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run()


@pytest.mark.usefixtures("of_classes")
def test_a_label_that_is_no_class_is_refused_or_makes_the_loss_nan(path: str) -> None:
    x, weight = leaves((8, 6), (11, 6), dtype=torch.float32)
    labels = torch.arange(8) + 4
    if path == "CPU":
        with pytest.raises(ArgumentError, match="labels holds 11; accepted are 0 to 10"):
            linear_cross_entropy(x, weight, labels)
    else:
        assert math.isnan(float(linear_cross_entropy(x, weight, labels).detach()))


def test_no_rows_are_no_loss(path: str) -> None:
    x, weight = leaves((0, 6), (5, 6), dtype=torch.float32)
    loss = linear_cross_entropy(x, weight, torch.zeros(0, dtype=torch.int64))
    assert math.isnan(float(loss.detach()))
    assert not torch.autograd.grad(loss, weight)[0].any()
