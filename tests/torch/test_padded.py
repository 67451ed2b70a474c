"""Layers whose number of outputs is no multiple of 8, against float64; only some losses keep the padded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812

import lt_runtime.torch as ltt
from lt_runtime.torch import padded
from tests.torch.test_losses import labels_for, leaves, widened

CLASSES, ROWS = 13, 8


@pytest.fixture(autouse=True)
def _small_layers_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(padded, "_LEAST", 1)


def picked(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits[..., 1:-2].float(), labels.clamp(0, CLASSES - 4))


def scaled(logits: Any, labels: Any) -> Any:
    return ltt.cross_entropy(logits.mul_(0.5).flatten(0, -2), labels)


def in_sequences(logits: Any, labels: Any) -> Any:
    return ltt.cross_entropy(logits.unflatten(0, (2, -1)).movedim(-1, 1), labels.view(2, -1))


LOSSES = {
    "ours": ltt.cross_entropy,
    "PyTorch's": F.cross_entropy,
    "slice": picked,
    "in place": scaled,
    "axes": in_sequences,
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: f,
    "compiled": torch.compile(backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_float64(loss: str, way: str, has_bias: bool, dtype: Any) -> None:
    ours = leaves((ROWS, 6), (CLASSES, 6), (CLASSES,), dtype=dtype)[: 2 + has_bias]
    labels, theirs = labels_for((ROWS,), CLASSES), widened(ours)
    made = WAYS[way](lambda *operands: LOSSES[loss](ltt.functional.linear(*operands), labels).float())(*ours)
    made.backward()
    LOSSES[loss](F.linear(*theirs), labels).backward()
    eps = torch.finfo(dtype).eps
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.grad.double() - exact.grad).norm() <= max(8 * eps, 1e-6) * exact.grad.norm()


def test_logits_and_their_gradient_lie_in_padded_rows() -> None:
    x, weight = leaves((ROWS, 6), (CLASSES, 6), dtype=torch.bfloat16)
    logits = ltt.functional.linear(x, weight)
    gradients: list[Any] = []
    logits.register_hook(gradients.append)
    ltt.cross_entropy(logits, labels_for((ROWS,), CLASSES)).backward()
    assert logits.stride() == gradients[0].stride() == (16, 1)
    assert not gradients[0].as_strided((ROWS, 16), (16, 1))[:, CLASSES:].any()


def test_few_rows_do_not_pay_for_a_copy_of_the_weight() -> None:
    x, weight = leaves((5, 6), (CLASSES, 6), dtype=torch.bfloat16)
    assert ltt.functional.linear(x, weight).is_contiguous()


def test_columns_of_a_larger_gradient_are_not_taken_for_zeros() -> None:
    x, weight = leaves((ROWS, 6), (CLASSES, 6), dtype=torch.float32)
    dy = padded.padded(x, (ROWS, CLASSES + 2)).fill_(1.0)[:, :CLASSES]
    found = torch.autograd.grad(ltt.functional.linear(x, weight), (x, weight), dy)
    wanted = torch.autograd.grad(F.linear(x, weight), (x, weight), dy)
    torch.testing.assert_close(found, wanted)


def test_the_operator_keeps_pytorchs_contract() -> None:
    x, weight, bias = leaves((2, 4, 6), (CLASSES, 6), (CLASSES,), dtype=torch.float32)
    arguments = [x, None, None, weight, bias], ["none"], [0.01], [0.0], True
    torch.library.opcheck(torch.ops.lt_runtime.padded_linear_fwd.default, arguments)
