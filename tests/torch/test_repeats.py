"""Operators that repeat the prepared calls of earlier calls: what they launch, and when they compute anew."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lt_runtime import ranges
from lt_runtime.kernels.call import DropoutState
from lt_runtime.ops import call, first_use
from lt_runtime.ops.call import New
from lt_runtime.plans import cache
from lt_runtime.problem import Philox
from lt_runtime.torch import repeats

STREAM, SCALARS, CONSTANT = 7, (1.0, 0.0), object()


def tensor(*shape: int) -> Any:
    """A tensor whose address is a multiple of 512 bytes, as on a GPU."""
    count, memory = math.prod(shape), np.empty(math.prod(shape) + 128, np.float32)
    start = -memory.ctypes.data % 512 // 4
    aligned = memory[start : start + count].data
    return torch.frombuffer(aligned, dtype=torch.float32).view(shape) if count else torch.empty(shape)


class Operator:
    """Stands in for an operator y = product(x, w), by calls that a test gives; counts its computations.

    Attributes:
        calls: makes the calls, as `recorded_by` tells of them, from x, w and y.
        results: makes the results.
    """

    def __init__(self) -> None:
        self.computed, self.launched = 0, list[Any]()
        self.prepared = prepared()
        self.calls: Callable[..., list[Any]] = lambda *arrays: [made_call(self.prepared, *arrays)]
        self.results: Callable[[], list[Any]] = lambda: [tensor(4, 8)]

    def __call__(self, x: Any, w: Any, *key: Any) -> list[Any]:
        def compute() -> repeats.Made:
            self.computed += 1
            made = self.results()
            if (record := call._recording.get()) is not None:
                for each in self.calls(x, w, *made):
                    record(each)
                    del each  # frees the call's arrays before the next call is made
            return made, CONSTANT

        made, constant = repeats.repeated((self, *key), (x, w), compute)
        assert constant is CONSTANT
        return made


def prepared(*new: tuple[int, New], written: tuple[int, ...] = (2,), dropouts: Any = None) -> Any:
    """A prepared call of (x, w, y), unless `written` names other arrays than the third."""
    request = SimpleNamespace(dropouts=dropouts, new=dict(new), written=written)
    operation = SimpleNamespace(is_scaled=True)
    return SimpleNamespace(request=request, generation=cache.generation, operation=operation)


def made_call(prepared_call: Any, *arrays: Any) -> Any:
    return prepared_call, addresses_of(*arrays), SCALARS, arrays


def dropping(step: int) -> Any:
    """A prepared call with dropout, whose step is at the address `step`; 0 for a step of the host."""
    made = prepared(dropouts=(0.1, 0.0))
    states = DropoutState(60000, Philox(3, 1), step), None
    made.operation.call = lambda *arguments: SimpleNamespace(dropouts=states)
    return made


def addresses_of(*arrays: Any) -> tuple[int, ...]:
    return tuple(0 if each is None else each.data_ptr() for each in arrays)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """An operator whose launches go into its list instead of to a GPU."""
    made = Operator()

    def repeat(*launch: Any) -> bool:
        made.launched.append(launch)
        return True

    repeats._recipes.clear()
    monkeypatch.setattr(repeats, "repeat", repeat)
    monkeypatch.setattr(repeats, "is_current", lambda device: True)
    monkeypatch.setattr(repeats, "_empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return made


def operands() -> tuple[Any, Any]:
    return tensor(4, 16), tensor(16, 8)


def test_later_calls_launch_what_the_first_one_recorded(operator: Operator) -> None:
    operator(*operands())
    x, w = operands()
    (y,) = operator(x, w)
    assert operator.computed == 1
    assert operator.launched == [(operator.prepared, addresses_of(x, w, y), SCALARS, STREAM)]
    assert (y.shape, y.dtype) == ((4, 8), torch.float32)


def test_memory_between_two_calls_is_allocated_as_well(operator: Operator) -> None:
    between = New((4, 32), np.dtype(np.float32), None)  # type: ignore[arg-type]
    first, second = prepared((1, between), written=()), prepared(written=(3,))
    h = tensor(4, 32)
    operator.calls = lambda x, w, y: [made_call(first, x, h), made_call(second, h, w, None, y)]
    operator(*operands())
    x, w = operands()
    (y,) = operator(x, w)
    (_, (of_x, of_h), *_), (_, (from_h, *others), *_) = operator.launched
    assert operator.computed == 1
    assert of_h == from_h
    assert of_h not in addresses_of(x, w, y, h)
    assert (of_x, *others) == (x.data_ptr(), w.data_ptr(), 0, y.data_ptr())


def test_masks_are_drawn_by_the_step_of_the_present_call(operator: Operator) -> None:
    x, w = operands()
    operator.prepared = dropping(w.data_ptr())
    operator(x, w)
    x, w = operands()
    operator(x, w)
    ((_, _, states, _),) = operator.launched
    assert states == [DropoutState(60000, Philox(3, 1), w.data_ptr()), None]


def test_memory_between_calls_lives_from_its_first_to_its_last_call(operator: Operator) -> None:
    between = New((4, 32), np.dtype(np.float32), None)  # type: ignore[arg-type]
    makes, reads, h, g = prepared((1, between), written=()), prepared(written=(1,)), tensor(4, 32), tensor(4, 32)
    operator.calls = lambda x, w, y: [
        made_call(makes, x, h), made_call(makes, h, g), made_call(reads, g, y), made_call(reads, x, y)
    ]  # fmt: skip
    operator(*operands())
    ((recipe,),) = [[*repeats._recipes.values()]]
    assert [(step.first, step.last) for step in recipe.steps] == [((0,), ()), ((1,), (0,)), ((2,), (1,)), ((), ())]


def test_memory_may_be_freed_and_allocated_anew(operator: Operator) -> None:
    between = New((4, 32), np.dtype(np.float32), None)  # type: ignore[arg-type]
    makes, reads = prepared((1, between), written=()), prepared(written=(1,))

    def calls(x: Any, w: Any, y: Any) -> Any:
        h, g = at(MEMORY), tensor(4, 32)
        yield made_call(makes, x, h)
        yield made_call(makes, h, g)
        del h
        h = at(MEMORY)
        yield made_call(makes, g, h)
        yield made_call(reads, h, y)

    operator.calls = calls
    operator(*operands())
    x, w = operands()
    (y,) = operator(x, w)
    assert operator.computed == 1
    passed = [addresses for _, addresses, *_ in operator.launched]
    assert [x.data_ptr(), *(out for _, out in passed)] == [*(given for given, _ in passed), y.data_ptr()]


def test_operands_may_be_one_tensor(operator: Operator) -> None:
    x, other = tensor(16, 16), tensor(16, 16)
    operator(x, x)
    operator(x, other)
    assert operator.computed == 2
    (y,) = operator(other, other)
    assert operator.computed == 2
    assert operator.launched == [(operator.prepared, addresses_of(other, other, y), SCALARS, STREAM)]


def test_a_recipe_keeps_no_scalars_that_its_calls_do_not_read(operator: Operator) -> None:
    operator.prepared.operation.is_scaled = False
    operator(*operands())
    operator(*operands())
    assert operator.launched[0][2] is None


def test_errors_are_those_of_the_computation(operator: Operator) -> None:
    for x, *key in ((tensor(4, 16), ["relu"]), (torch.eye(4, 16).to_sparse(),)):
        operator(x, tensor(16, 8), *key)
    assert operator.computed == 2


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


CHANGES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "option": lambda: (*operands(), "gelu"),
    "shape": lambda: (tensor(5, 16), tensor(16, 8)),
    "strides": lambda: (tensor(16, 4).t(), tensor(16, 8)),
    "type": lambda: (tensor(2, 16).view(torch.bfloat16).view(4, 16), tensor(16, 8)),
    "alignment": lambda: (tensor(65)[1:].view(4, 16), tensor(16, 8)),
}
STATES: dict[str, Callable[[], Any]] = {
    "plans are forgotten": lambda: patched(cache, "generation", object()),
    "tuning": lambda: first_use.within(first_use.asked_for),
    "a profiler listens": lambda: patched(ranges, "is_heard", True),
    "another device": lambda: patched(repeats, "is_current", lambda device: False),
    "overlapping operands": lambda: patched(repeats, "repeat", lambda *launch: False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_forms_are_computed(operator: Operator, change: str) -> None:
    operator(*operands())
    operator(*CHANGES[change]())
    assert operator.computed == 2
    assert not operator.launched


@pytest.mark.parametrize("state", STATES)
def test_some_states_need_a_computation(operator: Operator, state: str) -> None:
    operator(*operands())
    with STATES[state]():
        operator(*operands())
    assert operator.computed == 2
    operator(*operands())
    assert len(operator.launched) == (state != "plans are forgotten")


MEMORY = np.empty(512, np.float32)


def at(memory: Any) -> Any:
    """A new tensor (4, 32) at the address of an array: two such tensors have one address, but not one storage."""
    return torch.frombuffer(memory.data, dtype=torch.float32)[: 4 * 32].view(4, 32)


def reusing(x: Any, w: Any, y: Any) -> Any:
    """The first call makes memory. The second one reads other memory at its address."""
    yield made_call(prepared((1, New((4, 32), np.dtype(np.float32), None)), written=()), x, at(MEMORY))  # type: ignore[arg-type]
    yield made_call(prepared(written=(2,)), at(MEMORY), w, y)


KEPT = tensor(64)
PART = New((4, 9), np.dtype(np.float32), None)  # type: ignore[arg-type]
EMPTY = New((0, 8), np.dtype(np.float32), None)  # type: ignore[arg-type]
UNKNOWN: dict[str, Callable[[Operator], None]] = {
    "other memory": lambda op: setattr(op, "calls", lambda x, w, y: [made_call(prepared(), x, KEPT, y)]),
    "memory at an address that was another's": lambda op: setattr(op, "calls", reusing),
    "memory of a later result": lambda op: setattr(op, "calls", lambda x, w, y: [made_call(prepared(), y, w, x)]),
    "a result that no call writes": lambda op: setattr(op, "calls", lambda x, w, y: [made_call(prepared(), x, w, x)]),
    "a dropout step of the host": lambda op: setattr(op, "prepared", dropping(0)),
    "a dropout step elsewhere": lambda op: setattr(op, "prepared", dropping(KEPT.data_ptr())),
    "no call": lambda op: setattr(op, "calls", lambda x, w, y: []),
    "a planned call": lambda op: setattr(op, "calls", lambda x, w, y: [None]),
    "a view": lambda op: setattr(op, "results", lambda: [tensor(4, 16)[:, :8]]),
    "empty memory": lambda op: setattr(
        op, "calls", lambda x, w, y: [made_call(prepared((1, EMPTY), written=(2,)), x, tensor(0, 8), y)]
    ),
    "an empty result": lambda op: setattr(op, "results", lambda: [tensor(0, 8)]),
    "one address twice": lambda op: setattr(op, "results", lambda: [KEPT[:32].view(4, 8), KEPT[:8]]),
    "a part of new memory": lambda op: setattr(
        op, "calls", lambda x, w, y: [made_call(prepared((1, PART), written=()), x, y)]
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_determined_by_its_calls_is_computed_each_time(operator: Operator, kind: str) -> None:
    UNKNOWN[kind](operator)
    for _ in range(3):
        operator(*operands())
    assert operator.computed == 3
    assert not operator.launched
