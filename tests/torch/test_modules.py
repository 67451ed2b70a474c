"""The modules: parameters, initial values and state of PyTorch's, autocast, copies, devices."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812

import lt_runtime.torch as ltt
from lt_runtime.errors import ArgumentError, DTypeError


def test_a_layer_has_the_parameters_of_pytorch_s() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Linear(8, 6)
    torch.manual_seed(0)
    ours = ltt.Linear(8, 6, activation="gelu")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    assert list(ltt.Linear(8, 6, bias=False).state_dict()) == ["weight"]


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (0, 8)])
def test_a_layer_takes_what_pytorch_s_takes(shape: tuple[int, ...]) -> None:
    layer, x = ltt.Linear(8, 6, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer(x, add=layer(x)), 2 * F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_compute_the_same_with_parameters_of_their_own(copied: Any) -> None:
    layer, x = ltt.Linear(8, 6, activation="silu", dropout=0.5).eval(), torch.randn(5, 8)
    other = copied(layer)
    assert torch.equal(other(x), layer(x))
    with torch.no_grad():
        layer.weight.zero_()
    assert not torch.equal(other(x), layer(x))


def test_a_layer_drops_in_training_only() -> None:
    layer, x = ltt.Linear(8, 64, dropout=0.5), torch.randn(5, 8)
    assert 0.3 < (layer(x) == 0).float().mean() < 0.7
    torch.testing.assert_close(layer.eval()(x), F.linear(x, layer.weight, layer.bias))


def test_a_layer_moves_and_changes_its_type_as_pytorch_s() -> None:
    layer = ltt.Linear(8, 6, activation="relu", device="meta")
    y = layer(torch.ones(2, 3, 8, device="meta", requires_grad=True))
    assert (y.shape, y.device.type) == ((2, 3, 6), "meta")
    layer = layer.to_empty(device="cpu").to(torch.bfloat16)
    assert layer(torch.ones(5, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_autocast_casts_as_for_pytorch_s() -> None:
    layer, x = ltt.Linear(8, 6), torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = layer(x), F.linear(x, layer.weight, layer.bias)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert ours.dtype is compiled.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs)
    ours.sum().backward()
    assert (layer.weight.grad.dtype, x.grad.dtype) == (torch.float32, torch.float32)


def test_two_layers_that_share_a_weight_add_to_one_gradient() -> None:
    first, second = (ltt.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))
    second.weight = first.weight
    x = torch.randn(3, 4, dtype=torch.float64)
    ours = torch.autograd.grad(second(first(x)).sum(), first.weight)
    theirs = torch.autograd.grad(F.linear(F.linear(x, first.weight), first.weight).sum(), first.weight)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("option", "value"), [("activation", "swish"), ("activation", 3), ("dropout", -0.1)])
def test_wrong_options_are_refused_when_a_module_is_made(option: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{option} is {value!r}"):
        ltt.Linear(8, 6, **{option: value})


def test_types_that_differ_are_refused() -> None:
    with pytest.raises(DTypeError, match=r"weight is torch\.float32 but x is torch\.bfloat16"):
        ltt.Linear(8, 6)(torch.ones(5, 8, dtype=torch.bfloat16))
