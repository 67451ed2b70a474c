"""`lt.Optimizer` on NumPy arrays: update rules, schedules by tables, learning rates, states, and refused arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import rules, schedules
from lt_runtime.errors import ArgumentError, FixedError, KindError, LtError, OperandError, OverlapError
from tests.support.numpy_cases import Array, numbers

SHAPE, STEPS, RATE, DECAY = (3, 5), 5, 0.02, 0.3
ALL = {
    "SGD": rules.SGD(RATE, weight_decay=DECAY),
    "momentum": rules.SGD(RATE, 0.9, weight_decay=DECAY),
    "Nesterov": rules.SGD(RATE, 0.9, nesterov=True, weight_decay=DECAY),
    "Lion": rules.Lion(RATE, (0.8, 0.95), DECAY),
    "AdamW": rules.AdamW(RATE, (0.8, 0.95), 1e-6, DECAY),
    "AMSGrad": rules.AMSGrad(RATE, (0.8, 0.95), 1e-6, DECAY),
}


def scalar(name: str, x: float, gradients: list[float], lrs: list[float], decay: float = DECAY) -> float:
    """Computes the updates of one number by one rule, in double precision.

    Sources: torch.optim.SGD (dampening 0) and torch.optim.AdamW as PyTorch 2 documents them, the decay of SGD taken
    from AdamW; Lion from algorithm 2 of Chen et al., "Symbolic discovery of optimization algorithms" (2023).
    """
    m = v = v_max = 0.0
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), 1):
        x -= lr * decay * x
        if name in ("SGD", "momentum", "Nesterov"):
            buffer = m = 0.9 * m + g
            x -= lr * {"SGD": g, "momentum": buffer, "Nesterov": g + 0.9 * buffer}[name]
        elif name == "Lion":
            x -= lr * math.copysign(1.0, 0.8 * m + 0.2 * g)
            m = 0.95 * m + 0.05 * g
        else:
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
            v_max = max(v_max, v) if name == "AMSGrad" else v
            x -= lr * m / (1 - 0.8**t) / (math.sqrt(v_max / (1 - 0.95**t)) + 1e-6)
    return x


def parameter(seed: int, name: str = "p", **more: Any) -> lt.Parameter:
    return lt.Parameter(numbers(seed, SHAPE, "float32"), np.zeros(SHAPE, np.float32), name=name, **more)


def gradients_of(seed: int, steps: int = STEPS) -> list[Array]:
    """Draws gradients that shrink from step to step, so that AMSGrad's largest v comes from an early step."""
    return [numbers(seed + step, SHAPE, "float32") / 2**step for step in range(steps)]


def train(optimizer: lt.Optimizer, gradients: list[Array]) -> None:
    for gradient in gradients:
        for each in optimizer.parameters:
            each.grad[...] = gradient
        optimizer.step()


@pytest.mark.parametrize("name", ALL)
def test_each_rule_is_its_formula(name: str) -> None:
    given, gradients = parameter(1, lr_scale=0.5), gradients_of(10)
    start, factors = given.data.copy(), [0.5, 1.0, 0.25, 0.25, 0.25]
    optimizer = lt.Optimizer([([given], ALL[name])], schedules.table(factors[:3]))
    train(optimizer, gradients)
    lrs = [RATE * 0.5 * factor for factor in factors]
    for index in np.ndindex(SHAPE):
        expected = scalar(name, float(start[index]), [float(g[index]) for g in gradients], lrs)
        assert float(given.data[index]) == pytest.approx(expected, rel=3e-6, abs=1e-6)
    assert len(optimizer.moments[0]) == len(ALL[name].moments)


def test_adamw_is_an_optimizer_of_one_group() -> None:
    """A single group gives the same bits as `lt.AdamW`, and so does each of several groups without a common norm."""
    gradients = gradients_of(20)
    alone = [lt.AdamW([parameter(2)], RATE, (0.8, 0.95), 1e-6, DECAY, amsgrad=amsgrad) for amsgrad in (False, True)]
    together = lt.Optimizer(
        [([parameter(2, "a")], ALL["AdamW"]), ([parameter(2, "b")], ALL["AMSGrad"]), ([parameter(3)], ALL["Lion"])]
    )
    for each in (*alone, together):
        train(each, gradients)
    for one, other, moments in zip(alone, together.parameters, together.moments, strict=False):
        assert one.parameters[0].data.tobytes() == other.data.tobytes()
        assert [x.tobytes() for x in one.moments[0]] == [x.tobytes() for x in moments]
    assert isinstance(alone[0], lt.Optimizer)
    assert together.steps.tolist() == [STEPS]
    assert repr(alone[0]).startswith("AdamW(1 parameters, lr=0.02")
    assert repr(together).startswith("Optimizer(1 parameters: AdamW(lr=0.02, betas=(0.8, 0.95), eps=1e-06")


def test_groups_share_a_norm_a_scale_and_a_skip() -> None:
    scaler = lt.GradScaler(4.0, growth_interval=1)
    first, second = parameter(4, "first"), parameter(5, "second")
    optimizer = lt.Optimizer([([first], rules.SGD(1.0)), ([second], rules.SGD(1.0))], max_norm=1.0, scaler=scaler)
    starts = [first.data.copy(), second.data.copy()]
    first.grad[...], second.grad[...] = 8.0, 4.0  # after division by the loss scale, 4, the gradients are 2 and 1
    optimizer.step()
    norm = math.sqrt(15 * 4 + 15)
    assert float(optimizer.grad_norm) == pytest.approx(norm)
    for start, each, gradient in zip(starts, (first, second), (2.0, 1.0), strict=True):
        np.testing.assert_allclose(each.data, start - gradient / norm, rtol=1e-5, atol=1e-6)
    assert float(scaler.scale) == 8.0
    before = [first.data.copy(), second.data.copy()]
    second.grad[1, 1] = math.inf
    optimizer.step()
    assert (first.data == before[0]).all()
    assert (second.data == before[1]).all()
    assert (optimizer.steps.item(), optimizer.skipped_steps.item(), float(scaler.scale)) == (1, 1, 4.0)


def test_rules_may_change_in_rate_and_decay_alone() -> None:
    given = parameter(6)
    optimizer = lt.Optimizer([([given], rules.SGD(1.0, weight_decay=0.5))])
    start = given.data.copy()
    optimizer.step()
    optimizer.rules = [replace(optimizer.rules[0], lr=0.25, weight_decay=2.0)]
    optimizer.step()
    assert (given.data == start * 0.5 * 0.5).all()
    for wrong in ([rules.SGD(momentum=0.5)], [rules.Lion()], [], [optimizer.rules[0]] * 2, rules.SGD()):
        with pytest.raises(ArgumentError, match=r"^rules(\[0\])? is .*; (only lr and|it must be a list)"):
            optimizer.rules = wrong  # type: ignore[assignment]
    with pytest.raises(FixedError, match=r"Optimizer.lr cannot be set to 3; what can be set are rules, schedule"):
        optimizer.lr = 3  # type: ignore[attr-defined]


def test_rates_are_those_of_the_last_update() -> None:
    groups = [([parameter(7)], rules.SGD(0.5)), ([parameter(8)], rules.Lion(0.25))]
    optimizer = lt.Optimizer(groups, schedules.from_function(lambda step: 1 / step, 3))
    seen = [optimizer.rates]
    for _ in range(5):
        optimizer.step()
        seen.append(optimizer.rates)
    third = float(np.float32(1 / 3))
    assert seen == [(0.5 * f, 0.25 * f) for f in (1.0, 1.0, 0.5, third, third, third)]
    optimizer.schedule = schedules.warmup(10)
    assert optimizer.rates == (0.25, 0.125)
    assert lt.AdamW([parameter(9)], lr=0.5, schedule=schedules.warmup(4)).rates == (0.125,)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rules.SGD(lr=-1), ArgumentError, "lr is -1.0; it must be finite and not negative"),
        (lambda: rules.SGD(momentum=1.0), ArgumentError, r"momentum is 1.0; it must be in \[0, 1\)"),
        (lambda: rules.SGD(nesterov=True), ArgumentError, "nesterov is True, but momentum is 0.0; give a momentum"),
        (lambda: rules.SGD(nesterov="yes"), KindError, "nesterov is 'yes'; it must be True or False"),  # type: ignore[arg-type]
        (lambda: rules.Lion(betas=(0.9, 1.0)), ArgumentError, r"betas is \(0.9, 1.0\); accepted are two numbers in"),
        (lambda: rules.Lion(betas=0.9), KindError, "betas is 0.9; it must be two numbers"),  # type: ignore[arg-type]
        (lambda: rules.AMSGrad(eps=math.nan), ArgumentError, "eps is nan"),
        (lambda: rules.Lion(weight_decay=-1), ArgumentError, "weight_decay is -1.0"),
        (lambda: schedules.table([]), ArgumentError, r"values is \[\]; it must have a factor for at least one update"),
        (lambda: schedules.table([1, -2]), ArgumentError, r"values\[1\] is -2.0; it must be finite and not negative"),
        (lambda: schedules.table([1, 1e39]), ArgumentError, r"values\[1\] is 1e\+39; .* that FP32 can hold"),
        (lambda: schedules.table(3), KindError, "values is 3; it must be a sequence of numbers"),
        (lambda: schedules.table("12"), KindError, r"values\[0\] is '1'; it must be a number"),
        (lambda: schedules.from_function(3, 4), KindError, "f is 3; it must be a function"),  # type: ignore[arg-type]
        (lambda: schedules.from_function(float, 0), ArgumentError, "steps is 0; it must be positive"),
        (lambda: schedules.from_function(lambda s: 1 - s, 4), ArgumentError, r"f\(2\) is -1.0; it must be finite"),
        (lambda: schedules.from_function(lambda s: None, 4), KindError, r"f\(1\) is None"),  # type: ignore[arg-type, return-value]
        (lambda: lt.Optimizer([]), ArgumentError, "groups is empty; it must be a sequence of pairs"),
        (lambda: lt.Optimizer(3), KindError, "groups is 3; it must be a sequence of pairs"),  # type: ignore[arg-type]
        (lambda: lt.Optimizer([parameter(1)]), KindError, r"groups\[0\] is Parameter\(p, .*; groups must be"),  # type: ignore[list-item]
        (lambda: lt.Optimizer([([parameter(1)], "SGD")]), KindError, r"groups\[0\]\[1\] is 'SGD'; it must be a rule"),  # type: ignore[list-item]
        (lambda: lt.Optimizer([([], rules.SGD())]), ArgumentError, r"groups\[0\]\[0\] is empty"),
        (lambda: lt.Optimizer([([1], rules.SGD())]), KindError, r"groups\[0\]\[0\]\[0\] is 1; it must be an lt.Param"),  # type: ignore[list-item]
    ],
)
def test_refused(make: Callable[[], Any], error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_parameter_has_one_rule() -> None:
    both = parameter(1, "both")
    with pytest.raises(OverlapError, match=r"both.data \(parameter 1\) shares memory with both.data \(parameter 0\)"):
        lt.Optimizer([([both], rules.SGD()), ([both], rules.Lion())])


def made(seed: int) -> lt.Optimizer:
    groups = [([parameter(seed, "a"), parameter(seed + 1, "b")], ALL["AMSGrad"])]
    return lt.Optimizer(
        [*groups, ([parameter(seed + 2, "c")], ALL["Lion"]), ([parameter(seed + 3, "d")], rules.SGD())],
        schedules.table([1.0, 0.5, 0.25, 0.125]),
        scaler=lt.GradScaler(4.0, growth_interval=2),
        moments="bfloat16",
        seed=3,
    )


NAMES = ["a.m", "a.v", "a.v_max", "b.m", "b.v", "b.v_max", "c.m", "steps", "skipped_steps", "scale", "growth_tracker"]


def test_a_loaded_state_goes_on_bit_by_bit() -> None:
    whole, resumed, gradients = made(30), made(30), gradients_of(40, 7)
    train(whole, gradients[:4])
    state = whole.state_dict()
    assert [*state] == NAMES
    for mine, theirs in zip(resumed.parameters, whole.parameters, strict=True):
        mine.assign(theirs.data)
    held = resumed.moments[0][0]
    resumed.load_state_dict(state)
    assert resumed.moments[0][0] is held
    for each in (whole, resumed):
        train(each, gradients[4:])
    assert all(x.data.tobytes() == y.data.tobytes() for x, y in zip(whole.parameters, resumed.parameters, strict=True))
    ours, theirs_now = whole.state_dict(), resumed.state_dict()
    assert all(ours[name].tobytes() == theirs_now[name].tobytes() for name in NAMES)
    assert state["steps"].tolist() == [4], "a state is a copy"


def damaged(change: Callable[[dict[str, Any]], Any]) -> str:
    """Loads a changed state, and returns the error; asserts that nothing was written."""
    optimizer = made(50)
    train(optimizer, gradients_of(60, 2))
    before, other = optimizer.state_dict(), made(50)
    train(other, gradients_of(70, 3))
    state: dict[str, Any] = other.state_dict()
    change(state)
    with pytest.raises(OperandError, match="state does not fit the optimizer; nothing was loaded:") as caught:
        optimizer.load_state_dict(state)
    assert all(before[name].tobytes() == array.tobytes() for name, array in optimizer.state_dict().items())
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_must_be_there_and_fit(name: str) -> None:
    assert f"\n  missing: {name}" in damaged(lambda state: state.pop(name))
    flat = damaged(lambda state: state.update({name: np.zeros(7, state[name].dtype)}))
    assert f"\n  {name} is " in flat
    assert " (7,); it must be " in flat
    assert f"\n  {name} is int8 " in damaged(lambda state: state.update({name: state[name].astype(np.int8)}))
    assert f"\n  unexpected: '{name}.x'" in damaged(lambda state: state.update({f"{name}.x": np.zeros(1)}))


def test_values_that_training_cannot_reach() -> None:
    for name, value in {"a.v": -1, "b.v_max": -1, "steps": 2**32 - 1, "scale": 0.0, "growth_tracker": 2}.items():
        found = damaged(lambda state, name=name, value=value: state[name].__setitem__(..., value))
        assert f"\n  {name} has the value " in found
        assert "; accepted are " in found
    assert "\n  c.m (<U1) is 'x'; accepted are arrays" in damaged(lambda state: state.update({"c.m": "x"}))


def test_a_state_needs_a_name_for_each_parameter() -> None:
    optimizer = lt.Optimizer([([parameter(1), parameter(2)], rules.Lion())])
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(ArgumentError, match="2 parameters are named p; give each its own name"):
            call()
    with pytest.raises(KindError, match="state is 3; it must be a mapping"):
        optimizer.load_state_dict(3)  # type: ignore[arg-type]
