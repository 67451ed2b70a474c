"""State dicts are saved and loaded bit for bit, also with PyTorch's names; one that does not fit changes nothing."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.arrays import transfer
from lt_runtime.errors import ArgumentError, KindError, OperandError
from tests.support.numpy_cases import DTYPES, Array
from tests.support.torch_state import fake_module, sequential_names, sequential_state
from tests.support.training_runs import Run, assert_same, run_of, state, train

DIMS, NAMES = [6, 12, 3], sequential_names(2)
ORDER = ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"]


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_module())


def bits_of(values: dict[str, Array]) -> dict[str, tuple[str, bytes]]:
    return {name: (array.dtype.name, array.tobytes()) for name, array in values.items()}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_pytorch_stay_bit_for_bit(dtype: str, requires_grad: bool) -> None:
    theirs = sequential_state(DIMS, dtype, requires_grad=requires_grad)
    expected = bits_of({name: tensor.values for name, tensor in theirs.items()})
    model, _ = run_of(dtype)
    # The optimizer is made before the weights are loaded.
    optimizer = lt.AdamW(model.parameters(), lr=0.0, weight_decay=0.1)
    left = model.load_state_dict(theirs, names=NAMES)
    assert left == ([], [])
    assert bits_of(model.state_dict(names=NAMES)) == expected
    train((model, optimizer), range(10))
    assert bits_of(model.state_dict(names=NAMES)) == expected
    assert bits_of(model.state_dict()) == {ours: expected[NAMES[ours]] for ours in ORDER}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_beyond_the_models_type_are_trained_on(dtype: str) -> None:
    theirs = {name: tensor.values for name, tensor in sequential_state(DIMS, "float32").items()}
    model, _ = run_of(dtype)
    model.load_state_dict(theirs, names=NAMES)
    for each in model.parameters():
        assert each.master.tobytes() == theirs[NAMES[each.name]].tobytes()
        assert each.data.tobytes() == each.master.astype(DTYPES[dtype]).tobytes()


def test_what_is_given_out_is_the_callers_own() -> None:
    model, _ = run_of("bfloat16")
    given = model.state_dict()
    assert [*given] == ORDER
    before = bits_of(given)
    for each in model.parameters():
        assert not np.shares_memory(given[each.name], each.data)
        each.assign(np.zeros(each.data.shape))
    assert bits_of(given) == before
    model.load_state_dict(given)
    assert bits_of(model.state_dict()) == before


def test_names_need_not_say_what_stays() -> None:
    model, _ = run_of()
    given = model.state_dict(names={"layer1.weight": "head.weight"})
    assert [*given] == ["layer0.weight", "layer0.bias", "head.weight", "layer1.bias"]
    model.load_state_dict(given, names={"layer1.weight": "head.weight"})


def test_names_may_change_places() -> None:
    model = lt.MLP([4, 4, 4], device="cpu")
    names = {"layer0.weight": "layer1.weight", "layer1.weight": "layer0.weight"}
    first, second = model.layers[0].weight.data.copy(), model.layers[1].weight.data.copy()
    model.load_state_dict(model.state_dict(), names=names)
    np.testing.assert_array_equal(model.layers[0].weight.data, second)
    np.testing.assert_array_equal(model.layers[1].weight.data, first)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0.weight": "layer0.weight"}, "names has '0.weight'; the model's parameters are layer0.weight, layer0"),
        ({"layer0.weight": "layer1.weight"}, "names gives layer0.weight and layer1.weight the same name, 'layer1"),
        ({"layer0.weight": "a", "layer0.bias": "a"}, "names gives layer0.weight and layer0.bias the same name, 'a'"),
        ({"layer0.weight": 3}, r"names\['layer0.weight'\] is 3; it must be a string"),
        ([("layer0.weight", "a")], r"names is \[\('layer0.weight', 'a'\)\]; it must be None or a mapping"),
    ],
)
def test_names_that_cannot_be(names: Any, message: str) -> None:
    model, _ = run_of()
    for call in (lambda: model.state_dict(names=names), lambda: model.load_state_dict({}, names=names)):
        with pytest.raises(ArgumentError, match=message):
            call()


def unfit(model: lt.MLP) -> dict[str, Any]:
    given = model.state_dict()
    given["layer0.bias"] = np.ones(5)
    given["layer1.weight"] = given["layer1.weight"].astype(np.complex64)
    given["layer1.biass"] = given.pop("layer1.bias")
    given[3] = None
    return given


def test_everything_that_does_not_fit_is_listed() -> None:
    run = run_of("bfloat16")
    before = state(run)
    with pytest.raises(OperandError) as raised:
        run[0].load_state_dict(unfit(run[0]))
    first, *lines = str(raised.value).splitlines()
    assert first.startswith("state has the names ['layer0.weight', 'layer0.bias', ")
    assert first.endswith(", which does not fit the model; nothing was loaded:")
    assert lines[:3] == ["  missing: layer1.bias", "  unexpected: 'layer1.biass'", "  unexpected: 3"]
    assert (
        lines[3] == "  where a parameter has another name in the state, pass names={'layer1.bias': 'layer1.biass', ...}"
    )
    assert lines[4].startswith("  layer0.bias is array([1., 1., 1., 1., 1.]), of shape (5,); it must have shape (12,)")
    assert lines[5].startswith("  layer1.weight (complex64) is array(")
    assert len(lines) == 6
    assert_same(state(run), before)


def test_without_strict_the_rest_is_loaded_and_told() -> None:
    model, other = run_of()[0], lt.MLP(DIMS, seed=5, device="cpu")
    given = {"layer0.weight": other.layers[0].weight.data, "more": np.ones(3)}
    kept = model.layers[1].weight.data.copy()
    left = model.load_state_dict(given, strict=False)
    assert (left.missing, left.unexpected) == (["layer0.bias", "layer1.weight", "layer1.bias"], ["more"])
    np.testing.assert_array_equal(model.layers[0].weight.data, other.layers[0].weight.data)
    np.testing.assert_array_equal(model.layers[1].weight.data, kept)


@pytest.mark.parametrize("given", [{}, {"0.weight": np.ones((12, 6)), "0.bias": np.ones(12)}])
def test_without_strict_something_must_fit(given: dict[str, Array]) -> None:
    model, _ = run_of()
    with pytest.raises(OperandError, match=r"missing: layer0\.weight\n"):
        model.load_state_dict(given, strict=False)


@pytest.mark.parametrize("failing", [0, 3, 7])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_write_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, failing: int, error: type[BaseException]
) -> None:
    run, other = run_of("bfloat16"), lt.MLP(DIMS, seed=5, device="cpu")
    before, calls, store = state(run), list[None](), transfer.store

    def fail(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == failing + 1:
            raise error("in the middle")
        store(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "store", fail)
        with pytest.raises(error, match="in the middle"):
            run[0].load_state_dict(other.state_dict())
    assert_same(state(run), before)
    run[0].load_state_dict(other.state_dict())


def test_what_is_no_state() -> None:
    model, _ = run_of()
    with pytest.raises(KindError, match=r"state is \[1\]; it must be a mapping from names to arrays"):
        model.load_state_dict([1])  # type: ignore[arg-type]


def resumed(run: Run, given: dict[str, Array]) -> dict[str, Array]:
    run[0].load_state_dict(given)
    train(run, range(3))
    return state(run)


def test_a_model_with_the_same_weights_trains_alike() -> None:
    given = lt.MLP(DIMS, seed=77, device="cpu").state_dict()
    used = run_of("bfloat16")
    train(used, range(40, 43))
    with_fresh_optimizer = used[0], lt.AdamW(used[0].parameters(), lr=1e-2)
    fresh_model = run_of("bfloat16")[0]
    fresh = fresh_model, lt.AdamW(fresh_model.parameters(), lr=1e-2)
    assert_same(resumed(with_fresh_optimizer, given), resumed(fresh, given))
