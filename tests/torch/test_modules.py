"""The modules of `ltt` have the parameters, initial values and state of PyTorch's; autocast, copies, devices."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812
from torch.nn.utils import parametrizations, prune

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
    block = ltt.FeedForward(8, 16, "silu", gated=True, dtype=torch.float64)
    hidden = F.silu(F.linear(x, block.gate.weight, block.gate.bias)) * F.linear(x, block.up.weight, block.up.bias)
    torch.testing.assert_close(block(x, add=x), F.linear(hidden, block.down.weight, block.down.bias) + x)


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


def test_an_mlp_is_its_layers_one_after_the_other() -> None:
    model, x = ltt.MLP([8, 16, 12, 4], "gelu_erf", dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    theirs = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 12), torch.nn.GELU(), torch.nn.Linear(12, 4)
    ).double()
    theirs.load_state_dict({f"{2 * int(name[0])}{name[1:]}": each for name, each in model.state_dict().items()})
    torch.testing.assert_close(model(x), theirs(x))
    for each in (model, theirs):
        each(x).square().sum().backward()
    pairs = zip(model.parameters(), theirs.parameters(), strict=True)
    torch.testing.assert_close(*map(list, zip(*[(ours.grad, other.grad) for ours, other in pairs], strict=True)))


@pytest.mark.parametrize("gated", [False, True])
def test_a_feed_forward_block_is_its_layers(gated: bool) -> None:
    block = ltt.FeedForward(8, 16, "silu", gated, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    hidden = F.silu(F.linear(x, *block.gate.parameters())) if gated else 1.0
    up = F.linear(x, *block.up.parameters())
    expected = F.linear(hidden * (up if gated else F.silu(up)), *block.down.parameters()) + x
    torch.testing.assert_close(block(x, add=x), expected)
    assert {name.split(".")[0] for name in block.state_dict()} == {"up", "down"} | ({"gate"} if gated else set())


def with_hooks(layer: Any) -> Any:
    layer.register_forward_pre_hook(lambda _, given: (2 * given[0],))
    layer.register_forward_hook(lambda _, given, y: y + 1)
    layer.register_full_backward_hook(lambda _, of_x, of_y: (3 * of_x[0],))
    return layer


def pruned_after_use(layer: Any) -> Any:
    prune.l1_unstructured(layer, "weight", 0.5)
    with torch.no_grad():
        layer.weight_orig.mul_(2)
    return layer


def with_forward(layer: Any) -> Any:
    layer.forward = lambda x, forward=layer.forward: -forward(x)
    return layer


CHANGES: dict[str, Any] = {
    "hooks": with_hooks,
    "pruned": pruned_after_use,
    "spectral_norm": parametrizations.spectral_norm,
    "forward": with_forward,
    "exchanged": lambda layer: torch.nn.Linear(layer.in_features, layer.out_features).double(),
    "wrapped": lambda layer: torch.nn.Sequential(layer, torch.nn.Tanh()),
}
BLOCKS: dict[str, Any] = {
    "mlp": (lambda: ltt.MLP([8, 8, 8]), lambda m, x: m[1](m[0](x))),
    "block": (lambda: ltt.FeedForward(8, 8), lambda m, x: m.down(m.up(x))),
    "gated": (lambda: ltt.FeedForward(8, 8, "silu", True), lambda m, x: m.down(m.gate(x) * m.up(x))),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_of_a_block_is_called(change: str, name: str) -> None:
    make, by_layers = BLOCKS[name]
    for layer, _ in list(make().named_children()):
        model, x = make().double().eval(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
        model.set_submodule(layer, CHANGES[change](model.get_submodule(layer)))
        both = model(x, add=x), by_layers(model, x) + x
        torch.testing.assert_close(*both)
        torch.testing.assert_close(*[torch.autograd.grad(y.square().sum(), [x, *model.parameters()]) for y in both])


def test_a_hook_does_not_change_the_type_under_autocast() -> None:
    model, x = ltt.MLP([8, 8]), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x, add=x)
        model[0].register_forward_hook(lambda *_: None)
        assert model(x, add=x).dtype is expected.dtype is torch.bfloat16


def test_an_mlp_is_indexed_and_extended_as_a_sequential() -> None:
    model, x = ltt.MLP([8, 16, 12, 4]), torch.randn(5, 8)
    part = model[:2]
    assert type(part) is ltt.MLP
    assert [*part] == [model[0], model[1]]
    torch.testing.assert_close(model[2:](part(x)), model(x))
    assert model[:0](x) is x
    model.append(torch.nn.Softmax(-1))
    torch.testing.assert_close(model(x).sum(-1), torch.ones(5))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_are_those_of_pytorch(kind: str) -> None:
    ours, theirs = (getattr(home, kind)(8, dtype=torch.float64) for home in (ltt, torch.nn))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x, add=x), (theirs(2 * x), 2 * x))
    with pytest.raises(ArgumentError, match=r"elementwise_affine False; accepted is a single axis, with a weight"):
        getattr(ltt, kind)(8, elementwise_affine=False)


def test_a_model_of_all_modules_compiles_without_a_break() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.block, self.mlp = ltt.RMSNorm(8), ltt.FeedForward(8, 16, "silu", True), ltt.MLP([8, 16, 4])

        def forward(self, x: Any) -> Any:
            y, total = self.norm(x, add=x)
            return self.mlp(self.block(y, add=total))

    model, x = Block(), torch.randn(2, 5, 8, requires_grad=True)
    ours, theirs = torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x)
    leaves = [x, *model.parameters()]
    for gradients in (torch.autograd.grad(each.square().sum(), leaves) for each in (ours, theirs)):
        torch.testing.assert_close(gradients, torch.autograd.grad(model(x).square().sum(), leaves))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("option", "value"), [("activation", "swish"), ("activation", 3), ("dropout", -0.1)])
def test_wrong_options_are_refused_when_a_module_is_made(option: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{option} is {value!r}"):
        ltt.Linear(8, 6, **{option: value})


def test_types_that_differ_are_refused() -> None:
    with pytest.raises(DTypeError, match=r"weight is torch\.float32 but x is torch\.bfloat16"):
        ltt.Linear(8, 6)(torch.ones(5, 8, dtype=torch.bfloat16))
