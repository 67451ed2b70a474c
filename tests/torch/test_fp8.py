"""Modules in FP8 on the CPU: products of dequantised operands, when scales are updated, and checkpoints."""

from __future__ import annotations

import copy
import importlib
import itertools
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

import lt_runtime as lt
import lt_runtime.torch as ltt
from lt_runtime.errors import ArgumentError, KindError, OperandError
from lt_runtime.torch import fp8

replace_module = importlib.import_module("lt_runtime.torch.replace")  # `ltt.replace` is the function


def exact(tensor: Any, scale: float, dtype: Any) -> Any:
    """The values of a tensor that PyTorch casts to FP8, in float64."""
    return (tensor.detach().float() * scale).to(dtype).double() / scale


def trained(model: Any, steps: int, *, optimizer: Any = None, seed: int = 0) -> Any:
    """Trains a layer on batches of 32 rows and 64 columns; returns the optimizer."""
    optimizer = optimizer or ltt.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("recipe", [lt.FP8(), lt.FP8(recipe="current", gradients="e4m3")], ids=lambda each: each.recipe)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_dequantised_operands(recipe: lt.FP8, dtype: Any) -> None:
    torch.manual_seed(0)
    layer = ltt.Linear(64, 32, precision=recipe, dtype=dtype)
    x, add = (torch.randn(2, 16, n, dtype=dtype, requires_grad=True) for n in (64, 32))
    y, dy = layer(x, add), torch.randn(2, 16, 32, dtype=dtype)
    y.backward(dy)
    scales, gradients = layer.scales.scales, torch.float8_e5m2 if recipe.gradients == "e5m2" else torch.float8_e4m3fn
    x8, w8 = exact(x, scales["x"], torch.float8_e4m3fn), exact(layer.weight, scales["w"], torch.float8_e4m3fn)
    dy8 = exact(dy, scales["dy"], gradients).flatten(0, 1)
    expected = {
        "y": (y, x8 @ w8.T + layer.bias.double() + add.double()),
        "dx": (x.grad, (dy8 @ w8).reshape(x.shape)),
        "dw": (layer.weight.grad, dy8.T @ x8.flatten(0, 1)),
        "db": (layer.bias.grad, dy.double().sum((0, 1))),
        "add": (add.grad, dy.double()),
    }
    for name, (found, values) in expected.items():
        torch.testing.assert_close(found, values.to(dtype), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("precision", ["fp8", lt.FP8(recipe="rowwise")], ids=["fp8", "rowwise"])
def test_an_mlp_in_fp8_learns_as_in_its_own_type(precision: Any) -> None:
    losses = {}
    for each in (None, precision):
        torch.manual_seed(0)
        model = ltt.MLP([64, 48, 16], "gelu", dropout=0.1, precision=each)
        trained(model, 20)
        with torch.no_grad():
            losses[each] = model.eval()(torch.randn(64, 64, generator=torch.Generator().manual_seed(1))).square()
    assert losses[precision].mean() < 0.01
    assert losses[precision].mean() != losses[None].mean()
    torch.testing.assert_close(losses[precision].mean(), losses[None].mean(), rtol=0.2, atol=0)


@pytest.mark.parametrize(("sizes", "limit"), [([64, 48, 32, 16], 0.0), ([64, 48, 32, 24, 16], 0.05)])
def test_an_mlp_computes_what_the_packages_mlp_does(sizes: list[int], limit: float) -> None:
    """Hidden outputs are not rounded to BF16 before the cast to FP8.

    Layers of other sizes are in BF16, where rounding may differ; the cast to FP8 enlarges the difference.
    """
    model = lt.MLP(sizes, "gelu", dtype="bfloat16", device="cpu", precision=lt.FP8())
    twin = ltt.MLP(sizes, "gelu", precision=lt.FP8(), dtype=torch.bfloat16)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        ours.data = torch.from_numpy(theirs.data.astype(np.float32)).bfloat16()
    x, dy = (torch.randn(32, n).bfloat16() for n in (64, 16))
    y = twin(x)
    y.backward(dy)
    theirs, contexts = model.forward(x.float().numpy().astype(model.dtype.numpy))
    model.backward(dy.float().numpy().astype(model.dtype.numpy), contexts)
    found = [y, *(each.grad for each in twin.parameters())]
    for ours, array in zip(found, [theirs, *(each.grad for each in model.parameters())], strict=True):
        expected = torch.from_numpy(array.astype(np.float32))
        assert (ours.float() - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("columns", [24, 32])
def test_other_sizes_and_calls_without_gradients_stay_in_their_own_type(rows: int, columns: int) -> None:
    layer = ltt.Linear(64, columns, activation="gelu", precision="fp8")
    plain, x = ltt.Linear(64, columns, activation="gelu"), torch.randn(rows, 64)
    plain.load_state_dict(layer.state_dict())
    block, twin = (ltt.FeedForward(64, columns, gated=True, precision=each) for each in ("fp8", None))
    twin.load_state_dict(block.state_dict())
    for ours, theirs in ((layer, plain), (block, twin)):
        with torch.no_grad():
            assert torch.equal(ours(x), theirs(x))
        assert torch.equal(ours(x), theirs(x)) == (rows == 8 or columns == 24)


@pytest.mark.parametrize(
    "make", [lambda precision: ltt.Linear(64, 32, activation="relu", precision=precision),
             lambda precision: ltt.FeedForward(64, 32, precision=precision)]
)  # fmt: skip
def test_layers_that_would_be_slower_have_the_results_of_their_own_type(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setattr("lt_runtime.ops.fp8.choice.reasons", lambda layers, *_: ["it would be slower"] * len(layers))
    made, x = [make("fp8"), make(None)], torch.randn(32, 64)
    made[1].load_state_dict(made[0].state_dict())
    results = []
    for layer in made:
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().mean().backward()
        results.append([y, given.grad, *(each.grad for each in layer.parameters())])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_float64_stays_in_its_own_type() -> None:
    x, results = torch.randn(32, 64, dtype=torch.float64), []
    for precision in ("fp8", None):
        torch.manual_seed(0)
        layer = ltt.Linear(64, 32, precision=precision, dtype=torch.float64)
        y = layer(x)
        y.sum().backward()
        results.append((y, layer.weight.grad))
        assert precision is None or layer.scales.fallback == "float64 is not cast to FP8"
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_scales_are_updated_once_a_step_by_all_its_batches() -> None:
    layer = ltt.Linear(64, 32, precision=lt.FP8(history=4))
    optimizer = trained(layer, 1)
    before, amax = layer.scales.state_dict(), []
    for factor in (3.0, 2.0, 1.0):
        x = factor * torch.randn(32, 64)
        amax.append(float(x.abs().max()))
        layer(x).square().mean().backward()
    assert np.array_equal(layer.scales.state_dict()["history"], before["history"])
    optimizer.step()
    history = layer.scales.state_dict()["history"]
    assert history[0, 0] == np.float32(max(amax))
    assert np.array_equal(history[:, 1:], before["history"][:, :-1])


@pytest.mark.parametrize(
    ("trains", "holds", "follows"),
    [("weight bias", "weight", True), ("weight bias", "bias", False), ("bias", "bias", True), ("", "", True)],
)
def test_scales_follow_the_optimizer_that_trains_the_layer(trains: str, holds: str, follows: bool) -> None:
    layer, other = ltt.Linear(64, 32, precision="fp8"), torch.nn.Parameter(torch.ones(2))
    for name, each in layer.named_parameters():
        each.requires_grad_(name in trains.split())
    layer(torch.randn(32, 64, requires_grad=True)).square().mean().backward()
    before, other.grad = layer.scales.state_dict()["history"], torch.ones(2)
    torch.optim.SGD([other, *[getattr(layer, name) for name in holds.split()]], lr=0.1).step()
    assert np.array_equal(layer.scales.state_dict()["history"], before) != follows


@pytest.mark.parametrize("kind", [ltt.AdamW, torch.optim.SGD])
def test_scales_follow_a_weight_that_each_call_computes(kind: Any) -> None:
    """Only calls of the layer compute the weight, because each computation changes some parametrizations."""
    made = list[float]()

    class Halved(nn.Module):
        def forward(self, weight: Any) -> Any:
            made.append(weight.detach().abs().max().item() / 2)
            return weight / 2

    layer = ltt.Linear(64, 32, precision=lt.FP8(history=4))
    nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
    made.clear()
    trained(layer, 3, optimizer=kind(layer.parameters(), lr=0.1))
    assert [*layer.scales.state_dict()["history"][1]] == [*reversed(made), made[0]]


def test_a_step_that_a_grad_scaler_skips_leaves_the_scales() -> None:
    layer = ltt.Linear(64, 32, precision="fp8")
    optimizer = trained(layer, 1)
    before = layer.scales.state_dict()["history"]
    optimizer.found_inf = torch.tensor(1.0)
    trained(layer, 1, optimizer=optimizer)
    assert np.array_equal(layer.scales.state_dict()["history"], before)
    optimizer.found_inf = torch.tensor(0.0)
    trained(layer, 1, optimizer=optimizer)
    assert not np.array_equal(layer.scales.state_dict()["history"], before)


def test_a_resumed_run_equals_the_unbroken_one() -> None:
    model = ltt.MLP([64, 32, 16], "gelu", precision="fp8")
    optimizer, resumed = trained(model, 3), ltt.MLP([64, 32, 16], "gelu", precision="fp8")
    resumed.load_state_dict(model.state_dict())
    second = ltt.AdamW(resumed.parameters(), lr=1e-2)
    second.load_state_dict(optimizer.state_dict())
    for each, own in ((model, optimizer), (resumed, second)):
        trained(each, 3, optimizer=own, seed=1)
    found, expected = resumed.state_dict(), model.state_dict()
    assert "0.fp8_history" in expected
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_checkpoints_load_with_and_without_fp8() -> None:
    scaled, plain = ltt.MLP([64, 32, 16], precision="fp8"), ltt.MLP([64, 32, 16])
    keys = [*plain.state_dict()]
    trained(scaled, 1)
    plain.load_state_dict(scaled.state_dict())
    assert torch.equal(plain[1].weight, scaled[1].weight)
    assert [*plain.state_dict()] == keys
    before = scaled[0].scales.scales
    scaled.load_state_dict(plain.state_dict())
    assert scaled[0].scales.scales == before
    with pytest.raises(RuntimeError, match=r"0\.scales: state\['history'\] has shape \(3, 16\)"):
        ltt.MLP([64, 32, 16], precision=lt.FP8(history=4)).load_state_dict(scaled.state_dict())


@pytest.mark.filterwarnings("ignore")  # PyTorch's checkpoint functions warn of a process group that is missing
def test_scales_pass_through_distributed_checkpoints() -> None:
    model, loaded = (ltt.MLP([64, 32, 16], precision="fp8") for _ in range(2))
    trained(model, 1)
    set_model_state_dict(loaded, get_model_state_dict(model))
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_copies_have_scales_of_their_own() -> None:
    layer = ltt.Linear(64, 32, precision="fp8")
    trained(layer, 1)
    made = copy.deepcopy(layer)
    trained(layer, 2)
    before, kept = layer.state_dict(), made.state_dict()
    assert not torch.equal(before["fp8_history"], kept["fp8_history"])
    trained(made, 2)
    assert torch.equal(layer.state_dict()["fp8_history"], before["fp8_history"])
    made.load_state_dict(before)
    assert torch.equal(made.state_dict()["fp8_history"], before["fp8_history"])


def test_recomputation_has_the_scales_of_the_first_computation() -> None:
    gradients = []
    for run in (lambda layer, x: layer(x), lambda layer, x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(0)
        layer = ltt.Linear(64, 32, activation="gelu", dropout=0.5, precision="fp8")
        trained(layer, 2)
        layer.zero_grad()
        run(layer, torch.randn(32, 64)).square().mean().backward()
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


def test_autocast_casts_the_operands() -> None:
    layer, x = ltt.Linear(64, 32, precision="fp8"), torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().square().mean().backward()
    assert (y.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert set(layer.scales.scales.values()) != {1.0}


def dequantised(layer: Any, x: Any) -> tuple[Any, Any]:
    """x and the weight of a layer as its products in FP8 see them, with derivatives as if they were not rounded."""
    scales = layer.scales.scales
    pairs = (x, scales["x"]), (layer.weight.double(), scales["w"])
    return tuple(each + (exact(each, scale, torch.float8_e4m3fn) - each.detach()) for each, scale in pairs)


def test_a_gated_block_is_that_of_dequantised_operands() -> None:
    torch.manual_seed(0)
    block = ltt.FeedForward(32, 48, "silu", gated=True, precision=lt.FP8(recipe="current"))
    x, add, dy = (torch.randn(2, 16, 32, requires_grad=True) for _ in range(3))
    y = block(x, add)
    found = torch.autograd.grad(y, [x, add, *block.parameters()], dy)
    x64, add64 = (each.detach().double().requires_grad_() for each in (x, add))
    gate, up = (
        torch.nn.functional.linear(*dequantised(each, x64), each.bias.double()) for each in (block.gate, block.up)
    )
    hidden = torch.nn.functional.silu(gate) * up
    expected = torch.nn.functional.linear(*dequantised(block.down, hidden), block.down.bias.double()) + add64
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)
    gradients = torch.autograd.grad(expected, [x64, add64, *block.parameters()], dy.detach().double())
    for got, each in zip(found, gradients, strict=True):  # dy is rounded to two bits of mantissa
        assert (got - each).norm() < 0.1 * each.norm()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_gated_block_in_bfloat16_casts_hidden_values_and_their_gradients_at_once(
    monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    """The hidden values are not rounded to BF16 before their cast; their gradients are, as those of separate layers."""
    found = {}
    for way in ("at once", "no gradients", "neither"):
        if way == "no gradients":
            monkeypatch.setattr("lt_runtime.torch.fp8.casts_gate", lambda *_: False)
        if way == "neither":
            monkeypatch.setattr("lt_runtime.torch.fp8.applies_prologue", lambda *_: False)
        torch.manual_seed(0)
        precision = lt.FP8(recipe=recipe)
        options: Any = {"gated": True, "bias": False, "dropout": 0.25, "dtype": torch.bfloat16, "precision": precision}
        block = ltt.FeedForward(32, 48, "silu", **options)
        optimizer, made = ltt.AdamW(block.parameters(), lr=1e-3), []
        for _ in range(3):
            x = torch.randn(2, 16, 32).bfloat16().requires_grad_()
            y = block(x)
            y.backward(torch.randn(2, 16, 32).bfloat16())
            made += [y.detach(), x.grad, *(each.grad for each in block.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        found[way] = made, [each.scales.scales for each in (block.gate, block.up, block.down)]
    assert all(map(torch.equal, found["at once"][0], found["no gradients"][0]))
    assert found["at once"][1] == found["no gradients"][1] == found["neither"][1]
    differ = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(made, found["at once"][0], strict=True)]
    assert 0 < max(differ) < 0.1


def test_a_gated_block_frees_x_in_fp8_before_its_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    casts, alive, forward = list[Any](), list[list[bool]](), fp8.forward_of_several

    def watched(*arguments: Any) -> Any:
        alive.append([each() is not None for each in casts])
        made = forward(*arguments)
        casts.extend([] if made[1].x8 is None else [weakref.ref(made[1].x8)])
        return made

    monkeypatch.setattr(fp8, "forward_of_several", watched)
    ltt.FeedForward(64, 32, gated=True, precision="fp8")(torch.randn(32, 64))
    assert alive == [[], [True], [False, False]]  # both layers have the same x in FP8


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("trained", ["x", "up.weight", "up.bias", "down.weight"])
def test_a_gradient_of_a_block_alone_equals_that_among_all(trained: str, gated: bool) -> None:
    """With frozen parameters, forward keeps fewer FP8 operands for backward."""
    found = []
    for wanted in ("", trained):
        torch.manual_seed(0)
        block = ltt.FeedForward(32, 48, "silu", gated=gated, precision="fp8")
        tensors = {"x": torch.randn(16, 32), **dict(block.named_parameters())}
        for name, each in tensors.items():
            each.requires_grad_(name.startswith(wanted))
        block(tensors["x"]).square().sum().backward()
        found.append(tensors[trained].grad)
    assert torch.equal(*found)


def test_a_replaced_model_computes_in_fp8_until_it_is_restored() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(
        linear(64, 48), torch.nn.GELU("tanh"), linear(48, 32), torch.nn.Softplus(), linear(32, 16)
    )
    twin = ltt.MLP([64, 48, 32], "gelu", precision="fp8")
    for layer, of in zip(twin, (model[0], model[2]), strict=True):
        layer.load_state_dict(of.state_dict())
    keys, x = [*model.state_dict()], torch.randn(32, 64)
    plain = model(x)
    ltt.replace(model, precision="fp8")
    last = ltt.Linear(32, 16, precision="fp8")
    last.load_state_dict(model[4].state_dict())
    assert torch.equal(model(x), last(model[3](twin(x))))
    trained(model, 2, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6))
    assert {"0.fp8_history", "2.fp8_history", "4.fp8_history"} < model.state_dict().keys()
    made = copy.deepcopy(model)
    assert torch.equal(made(x), model(x))
    ltt.restore(model)
    assert [*model.state_dict()] == keys
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_slower_in_fp8_trains_by_its_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(1.0)

    def microseconds(function: Any, arguments: Any, leaves: Any) -> float:
        with pytest.MonkeyPatch.context() as real:
            real.delattr(torch.Tensor, "is_cuda")  # within the call, tensors must be on the CPU
            torch.autograd.grad(function(*arguments).sum(), leaves)
        return next(times)

    monkeypatch.setattr(replace_module, "_microseconds", microseconds)
    monkeypatch.setattr(replace_module, "check_fp8", lambda _: None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: torch.enable_grad())
    model = nn.Sequential(nn.Linear(64, 32))
    with pytest.MonkeyPatch.context() as pretended:
        pretended.setattr(torch.Tensor, "is_cuda", True)
        (entry,) = ltt.replace(model, torch.ones(32, 64), precision="fp8")
    assert (entry.replaced, entry.reason) == (False, "slower")
    trained(model, 2, optimizer=torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_replaced_transformer_trains_in_fp8(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_layer=1, n_embd=32, n_head=2))
        layer = model.transformer.h[0].mlp.c_fc
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, intermediate_size=64))
        layer = model.model.layers[0].mlp.up_proj
    ids = torch.arange(32).reshape(2, 16)
    gradients = [torch.autograd.grad(model.eval()(ids, labels=ids).loss, layer.weight)[0]]
    ltt.replace(model, precision="fp8")
    gradients += torch.autograd.grad(model(ids, labels=ids).loss, layer.weight)
    assert layer.scales.calibrated == {0, 1, 2}
    assert gradients[1].stride() == layer.weight.stride()
    assert 0 < (gradients[1] - gradients[0]).norm() < 0.25 * gradients[0].norm()


# When Dynamo resumes after a graph break, it reads .grad of tensors that are no leaves, of which PyTorch warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_models_call_layers_in_fp8() -> None:
    layer = ltt.Linear(64, 32, precision="fp8")
    x, compiled = torch.randn(32, 64), torch.compile(lambda x: 2 * layer(2 * x), backend="eager")
    compiled(x)  # the first call computes the scales
    assert torch.equal(compiled(x), 2 * layer(2 * x))
    assert layer.scales.calibrated == {0, 1}


@pytest.mark.filterwarnings("ignore")  # PyTorch's own warnings about the compilation of an optimizer
def test_a_compiled_step_of_an_optimizer_sets_the_scales() -> None:
    histories = []
    for compiles in (False, True):
        torch.manual_seed(0)
        layer = ltt.Linear(64, 32, precision="fp8")
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        step = torch.compile(lambda each=optimizer: each.step(), backend="eager") if compiles else optimizer.step
        for x in torch.randn(3, 32, 64):
            layer(x).sum().backward()
            step()
        histories.append(layer.scales.state_dict()["history"])
    assert np.array_equal(*histories)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_code_compiled_before_a_model_was_in_fp8_does_not_run_it() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(32, 64)
    ltt.replace(model)
    compiled, own = torch.compile(lambda x: model(x), backend="eager"), model(x)
    assert torch.equal(compiled(x), own)
    ltt.restore(model)
    ltt.replace(model, precision="fp8")
    in_fp8 = model(x)
    assert not torch.equal(in_fp8, own)
    assert torch.equal(compiled(x), in_fp8)


@pytest.mark.parametrize("missing", ["gate", "up", "down"])
def test_a_compiled_gated_block_without_scales_of_a_layer_is_one_graph(missing: str) -> None:
    """A block of which a layer has no FP8 scales computes in its own type, which torch.compile can trace."""
    block, x = ltt.FeedForward(32, 48, "silu", gated=True, precision="fp8"), torch.randn(32, 32)
    plain = ltt.FeedForward(32, 48, "silu", gated=True)
    plain.load_state_dict(block.state_dict())
    getattr(block, missing).scales = None
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    for call in (compiled, block):
        assert torch.equal(call(x), plain(x))


@pytest.mark.parametrize(("precision", "error"), [("fp4", ArgumentError), (8, KindError)])
@pytest.mark.parametrize(
    "make", [lambda **given: ltt.Linear(16, 16, **given), lambda **given: ltt.MLP([16, 16], **given)]
)
def test_other_precisions_are_refused(make: Any, precision: Any, error: Any) -> None:
    with pytest.raises(error, match="precision is "):
        make(precision=precision)


def test_errors_name_the_operands() -> None:
    layer = ltt.Linear(64, 32, precision="fp8")
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight, layer.bias
    with pytest.raises(OperandError, match=r"runs in torch\.nn\.DataParallel, .*; use torch\.nn\.parallel"):
        replica(torch.randn(32, 64))
    with pytest.raises(OperandError, match=r"weight has shape \(32, 64\)"):
        layer(torch.randn(32, 48))
    with pytest.raises(OperandError, match=r"weight is torch.float32 but x is torch.bfloat16"):
        layer(torch.randn(32, 64, dtype=torch.bfloat16))
    with pytest.raises(OperandError, match=r"x is torch\.sparse_coo"):
        layer(torch.randn(32, 64).to_sparse())
