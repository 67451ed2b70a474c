"""`AdamW` writes weights of layers in FP8: bit for bit as steps whose forward casts the weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import lt_runtime as lt
import lt_runtime.torch as ltt
from lt_runtime.ops.fp8 import linear as fp8_linear
from lt_runtime.torch import fp8_steps

WEIGHT, AMAX = 1, 2  # indices in `FP8State.slots`: the row of w, and the column of the largest magnitude

Change = Callable[[Any, Any], object]
"""Type: a change that a script makes between two steps, given the model and its optimizer."""


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row in `FP8State.slots` of each tensor that forward and backward have cast."""
    made, cast = list[int](), fp8_linear.cast_tensor
    monkeypatch.setattr(fp8_linear, "cast_tensor", lambda x, row, *more: made.append(row) or cast(x, row, *more))
    return made


def made(dtype: Any = torch.bfloat16, kind: str = "", **options: Any) -> tuple[Any, Any]:
    """A model with layers in FP8, of which some have weights that its optimizer can write in FP8; and the optimizer."""
    torch.manual_seed(0)
    if kind == "gated":
        model: Any = ltt.FeedForward(256, 32, "silu", gated=True, precision=lt.FP8(), dtype=dtype)
    else:
        model = ltt.MLP([256, 256 if kind else 16, 32], "gelu", precision=lt.FP8(), dtype=dtype)
    if kind == "columns":
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    if kind == "tied":
        model[1] = ltt.Linear(256, 256, precision=lt.FP8(gradients="e4m3"), dtype=dtype)
        model[1].weight = model[0].weight
    return model, ltt.AdamW(groups(model), lr=1e-2, **options)


def groups(model: Any) -> list[Any]:
    """The weights and the biases of a model, as groups of parameters."""
    return [{"params": [each for each in model.parameters() if each.dim() == axes]} for axes in (2, 1)]


def train(
    given: tuple[Any, Any], change: Change = lambda model, optimizer: None, *, batches: int = 1, infinite: int = -1
) -> list[Any]:
    """Losses, parameters, scales and histories after each of five steps.

    Args:
        change: called before the fourth step.
        batches: number of batches whose gradients are added up in a step.
        infinite: number of a step whose gradients GradScaler finds infinite.
    """
    (model, optimizer), found = given, []
    generator = torch.Generator().manual_seed(1)
    for number in range(5):
        optimizer.zero_grad(set_to_none=number < 3)
        if number == 3:
            change(model, optimizer)
        optimizer.found_inf = torch.tensor(float(number == infinite))
        for _ in range(batches):
            x = torch.randn(16, 256, generator=generator).to(next(model.parameters()).dtype)
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        found += [loss.detach(), *(each.detach().clone() for each in model.parameters())]
        for layer in {id(each): each for each in model.modules() if isinstance(each, ltt.Linear)}.values():
            slots = torch.from_numpy(layer.scales.state_dict()["slots"])
            slots[WEIGHT, AMAX] = 0  # differs: an update finds w's largest magnitude one step earlier than forward
            found += [slots, torch.from_numpy(layer.scales.state_dict()["history"])]
    return found


def assert_as_cast(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], tuple[Any, Any]], *given: Any, **more: Any
) -> None:
    """Asserts that steps have the results of those that cast the weights in forward."""
    found = train(make(), *given, **more)
    with monkeypatch.context() as patched:
        patched.setattr(fp8_steps, "can_write", lambda *_: False)
        expected = train(make(), *given, **more)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("options", "of_steps"),
    [
        ({"masters": True}, {}),
        ({"max_norm": 0.1, "ema_decay": 0.5}, {"batches": 3}),
        ({"dtype": torch.float32, "maximize": True}, {"infinite": 3}),
        ({"kind": "gated"}, {}),
        ({"kind": "columns"}, {}),
        ({"kind": "tied"}, {}),
    ],
    ids=str,
)
def test_updates(path: str, monkeypatch: pytest.MonkeyPatch, options: Any, of_steps: Any, casts: list[int]) -> None:
    model, optimizer = made(**options)
    train((model, optimizer))
    assert any(each.scales.is_written for each in model.modules() if isinstance(each, ltt.Linear))
    casts.clear()
    model(torch.ones(16, 256, dtype=options.get("dtype", torch.bfloat16))).sum().backward()
    assert casts.count(WEIGHT) == (0 if options.get("kind") == "columns" else 1)
    assert_as_cast(monkeypatch, lambda: made(**options), **of_steps)


def _edit(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(-0.01, 0.01)


def _edit_data(model: Any, optimizer: Any) -> None:
    """Writes values through `.data`, where PyTorch does not count writes, and then counts the write."""
    model[0].weight.data.clamp_(-0.01, 0.01)
    torch.autograd.graph.increment_version(model[0].weight)


def _swap(model: Any, optimizer: Any) -> None:
    """Trains on other values for a step, and puts back the former ones."""
    weight = model[0].weight
    former, weight.data = weight.data, torch.full_like(weight.data, 0.01)
    model(torch.ones(16, 256, dtype=weight.dtype)).sum().backward()
    weight.data = former


def _load(model: Any, optimizer: Any) -> None:
    model.load_state_dict(made()[0].state_dict())


def _load_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _descend(model: Any, optimizer: Any) -> None:
    """Trains one step with another optimizer."""
    model(torch.ones(16, 256, dtype=torch.bfloat16)).float().square().mean().backward()
    torch.optim.SGD([model[0].weight, model[1].bias], lr=0.1).step()
    optimizer.zero_grad()


def _scale(model: Any, optimizer: Any) -> None:
    """Halves the scale of a weight."""
    state = model[0].scales.state_dict()
    state["slots"][WEIGHT, :2] *= 2, 0.5
    model[0].scales.load_state_dict(state)


def _update_scales(model: Any, optimizer: Any) -> None:
    """Updates a layer's scales as in a step that is skipped."""
    model[0].scales.update(skipped=torch.ones(1, dtype=torch.int32).numpy().view("uint32"))


def _infer(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(torch.ones(16, 256, dtype=torch.bfloat16))


def _freeze(model: Any, optimizer: Any) -> None:
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None


def _parametrize(model: Any, optimizer: Any) -> None:
    """Lets each call compute the weight as twice the parameter."""

    class Doubled(torch.nn.Module):
        def forward(self, weight: Any) -> Any:
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())


def _misplace_gradient(model: Any, optimizer: Any) -> None:
    """Lets autograd add up a gradient in memory that the update's kernel for FP8 does not take."""
    weight = model[0].weight
    weight.grad = torch.zeros(weight.numel() + 1, dtype=weight.dtype)[1:].view_as(weight)


@pytest.mark.parametrize(
    "change",
    [
        _edit, _edit_data, _swap, _load, _load_optimizer, _descend, _scale, _update_scales, _infer, _freeze,
        _parametrize, _misplace_gradient,
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["GPU"], indirect=True)
def test_changes_between_steps_are_seen(path: str, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    assert_as_cast(monkeypatch, made, change)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_duplicate_of_a_model_trains_alone(duplicate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    train((model, optimizer))
    twin, state = duplicate(model), copy.deepcopy(optimizer.state_dict())
    train((model, optimizer))

    def make() -> tuple[Any, Any]:
        again = duplicate(twin)
        other = ltt.AdamW(groups(again))
        other.load_state_dict(state)
        return again, other

    assert_as_cast(monkeypatch, make)


def test_after_a_graph_of_others_holds_a_step_forward_sees_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    train((model, optimizer))
    with monkeypatch.context() as capturing:
        for module in (fp8_steps, ltt.optimizer.updates):
            capturing.setattr(module, "is_capturing", lambda _: True)
        train((model, optimizer))
    x, y = torch.ones(16, 256, dtype=torch.bfloat16), []
    for _ in range(2):
        y.append(model(x))
        model[0].weight.data.zero_()  # stands for a launch of the graph, which PyTorch does not notice
    assert not torch.equal(*y)


def test_values_that_a_captured_step_writes_at_its_end_reach_masters_and_copies() -> None:
    model, optimizer = made(masters=True)
    train((model, optimizer))
    weight = model[0].weight
    with fp8_steps.followed([optimizer]), torch.no_grad():
        weight.zero_()
    assert not optimizer.state[weight]["master"].any()
    weight.data.fill_(1)  # PyTorch does not notice this write: the copy in FP8 is that of zeros
    x = torch.ones(16, 256, dtype=weight.dtype)
    y = model(x)
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(y, model(x))
