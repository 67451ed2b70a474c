"""Checkpoints: a resumed run ends with the same bits; loading one that does not fit the model changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, CheckpointError, OperandError
from tests.support.training_runs import Run, arrays_of, assert_same, rewrite, run_of, state, train


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("float32", {"amsgrad": True, "moments": "bfloat16", "max_norm": 0.5}),
        ("float32", {"max_norm": math.inf}),
        ("float16", {"scaled": True}),
        ("bfloat16", {"skip_nonfinite": True}),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    unbroken, first, second = (run_of(dtype, **options) for _ in range(3))
    train(unbroken, range(12))
    train(first, range(5))
    lt.save_checkpoint(tmp_path / "run.safetensors", *first)
    train(second, range(90, 93))  # the second run first takes other steps, whose values must not matter after loading
    lt.load_checkpoint(tmp_path / "run.safetensors", *second)
    assert_same(state(second), state(first))
    train(second, range(5, 12))
    assert_same(state(second), state(unbroken))
    assert int(second[1].steps[0]) == 12


def run_of_two_rules(lion: float = 1e-3, factors: tuple[float, ...] = (0.5, 1.0, 0.25), momentum: float = 0.5) -> Run:
    model = lt.MLP([6, 12, 3], dropout=0.3, dtype="bfloat16", seed=11, device="cpu")
    weights, biases = ([getattr(each, part) for each in model.layers] for part in ("weight", "bias"))
    groups = [(weights, lt.rules.Lion(lion)), (biases, lt.rules.SGD(0.1, momentum))]
    scaler = lt.GradScaler(4.0, growth_interval=3)
    return model, lt.Optimizer(groups, lt.schedules.table(factors), scaler=scaler)


def test_a_resumed_run_of_two_rules_is_the_unbroken_one(tmp_path: Path) -> None:
    path, (unbroken, first, second) = tmp_path / "run", (run_of_two_rules() for _ in range(3))
    train(unbroken, range(6))
    train(first, range(2))
    lt.save_checkpoint(path, *first)
    lt.load_checkpoint(path, *second)
    train(second, range(2, 6))
    assert_same(state(second), state(unbroken))
    for other, named in (
        (run_of_two_rules(1e-4), r"optimizer.rules.0.lr +0.001 +0.0001"),
        (run_of_two_rules(momentum=0.25), r"optimizer.rules.1.momentum +0.5 +0.25"),
        (run_of_two_rules(factors=(0.5, 1.0, 0.5)), r"optimizer.schedule.sha256 +'\w+.* +'\w+"),
        (run_of_two_rules(factors=(0.5, 1.0)), r"optimizer.schedule.table +3 +2"),
        (run_of("bfloat16"), r"optimizer.rules +"),
    ):
        with pytest.raises(CheckpointError, match=named):
            lt.load_checkpoint(path, *other)
    lt.load_checkpoint(path, *run_of_two_rules(1e-4, (1.0,)), changed=("lr", "schedule"))


def test_arrays_are_written_in_place(tmp_path: Path) -> None:
    run = run_of("bfloat16")
    before = arrays_of(run)
    lt.save_checkpoint(tmp_path / "a", *run)
    lt.load_checkpoint(tmp_path / "a", *run)
    assert all(np.shares_memory(array, before[name]) for name, array in arrays_of(run).items())


def test_anyone_can_read_it(tmp_path: Path) -> None:
    run = run_of("bfloat16")
    lt.save_checkpoint(tmp_path / "a", *run)
    with safe_open(tmp_path / "a", framework="np") as file:
        assert {"layer0.weight", "layer0.weight.master", "layer1.bias.v", "optimizer.steps"} <= set(file.keys())
        assert file.get_slice("layer0.weight").get_dtype() == "BF16"
        assert (file.get_tensor("layer1.weight.master") == run[0].layers[1].weight.master).all()


def other_model(**changes: Any) -> Callable[[], Run]:
    options = {"dims": [6, 12, 3], "activation": "gelu", "dropout": 0.3, "seed": 11, "device": "cpu", **changes}

    def make() -> Run:
        model = lt.MLP(**options)
        return model, lt.AdamW(model.parameters(), lr=1e-2, schedule=lt.schedules.warmup_linear(3, 40))

    return make


def reordered() -> Run:
    model, _ = run_of()
    return model, lt.AdamW(model.parameters()[::-1], lr=1e-2, schedule=lt.schedules.warmup_linear(3, 40))


def frozen() -> Run:
    model, _ = run_of()
    return model, lt.AdamW(model.parameters()[:2], lr=1e-2, schedule=lt.schedules.warmup_linear(3, 40))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_model(dims=[6, 13, 3]), r"model.dims +\[6, 12, 3\] +\[6, 13, 3\]"),
        (other_model(dims=[6, 12, 3, 3]), r"model.dims +\[6, 12, 3\] +\[6, 12, 3, 3\]"),
        (other_model(activation="relu"), "model.activation.name +'gelu' +'relu'"),
        (other_model(dtype="bfloat16"), "model.dtype +'float32' +'bfloat16'"),
        (other_model(dropout=[0.3, 0.1]), r"model.dropout +0.3 +\[0.3, 0.1\]"),
        (lambda: run_of(amsgrad=True), "optimizer.amsgrad +False +True"),
        (lambda: run_of(max_norm=1.0), "optimizer.max_norm +None +1.0"),
        (lambda: run_of(moments="bfloat16"), "optimizer.moments +'float32' +'bfloat16'"),
        (lambda: run_of(scaled=True), "optimizer.skip_nonfinite +False +True"),
        (reordered, r"the order of optimizer.parameters +\['layer0.weight', "),
        (frozen, r"optimizer.parameters.layer1.weight +\[1.0, None\] +None"),
    ],
)
def test_of_another_model_or_optimizer(tmp_path: Path, make: Callable[[], Run], message: str) -> None:
    path = tmp_path / "run.safetensors"
    saved, other = run_of(), make()
    train(saved, range(2))
    lt.save_checkpoint(path, *saved)
    before = state(other)
    with pytest.raises(CheckpointError, match=message) as raised:
        lt.load_checkpoint(path, *other)
    assert str(path) in str(raised.value)
    assert_same(state(other), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, _: arrays.pop("layer0.bias.m"), "has no layer0.bias.m"),
        (lambda arrays, _: arrays.update(more=np.ones(2)), "has more, which there is not here"),
        (
            lambda arrays, _: arrays.update({"layer0.bias": np.ones(3, np.float32)}),
            r"layer0.bias is float32 \(3,\); here it is float32 \(12,\)",
        ),
        (
            lambda arrays, _: arrays.update({"layer0.bias": np.ones(12, np.float16)}),
            r"layer0.bias is float16 \(12,\); here it is float32",
        ),
        (lambda _, metadata: metadata.clear(), r"was not written by lt.save_checkpoint"),
        (lambda _, metadata: metadata.update(lt_runtime="[1]"), r"was not written by lt.save_checkpoint"),
        (lambda _, metadata: metadata.update(lt_runtime='{"format": 9}'), "has format 9; this version reads format 1"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, change: Any, message: str) -> None:
    path, run = tmp_path / "run.safetensors", run_of()
    lt.save_checkpoint(path, *run)
    rewrite(path, change)
    before = state(run)
    with pytest.raises(CheckpointError, match=message):
        lt.load_checkpoint(path, *run)
    assert_same(state(run), before)


def test_truncated_files(tmp_path: Path) -> None:
    path, run = tmp_path / "run.safetensors", run_of()
    lt.save_checkpoint(path, *run)
    content, before = path.read_bytes(), state(run)
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is damaged or no safetensors file"):
            lt.load_checkpoint(path, *run)
    assert_same(state(run), before)


def test_an_optimizer_of_something_else(tmp_path: Path) -> None:
    (model, _), (_, optimizer) = run_of(), run_of()
    for function in (lt.save_checkpoint, lt.load_checkpoint):
        with pytest.raises(ArgumentError, match=r"the optimizer has layer0.weight, which is no parameter of the model"):
            function(tmp_path / "a", model, optimizer)
    assert not [*tmp_path.iterdir()]


def test_an_array_that_was_replaced_after_the_optimizer_was_made(tmp_path: Path) -> None:
    run = run_of()
    lt.save_checkpoint(tmp_path / "a", *run)
    run[0].parameters()[0].data = run[0].parameters()[0].data.copy()
    for path, function in ((tmp_path / "a", lt.load_checkpoint), (tmp_path / "b", lt.save_checkpoint)):
        with pytest.raises(OperandError, match=r"an array of .*weight was replaced after the optimizer was made"):
            function(path, *run)
    assert not (tmp_path / "b").exists()


def test_what_was_skipped_is_kept(tmp_path: Path) -> None:
    model, optimizer = run_of(scaled=True)
    step = lt.TrainStep(model, optimizer, batch_size=16)
    x, labels = np.ones((16, 6), np.float32), np.zeros(16, np.int32)
    step(x, labels)
    step(x * np.nan, labels)
    assert (optimizer.steps.item(), optimizer.skipped_steps.item()) == (1, 1)
    lt.save_checkpoint(tmp_path / "run", model, optimizer)
    other = run_of(scaled=True)
    lt.load_checkpoint(tmp_path / "run", *other)
    assert (other[1].steps.item(), other[1].skipped_steps.item()) == (1, 1)


def rates(run: Run) -> list[tuple[float, float | None]]:
    return [(each.lr_scale, each.weight_decay) for each in run[0].parameters()]


def with_rates(lr_scale: float, weight_decay: float | None) -> Callable[[], Run]:
    def make() -> Run:
        model, _ = run_of()
        for each in model.parameters():
            each.lr_scale, each.weight_decay = lr_scale, weight_decay
        return model, lt.AdamW(model.parameters(), lr=1e-2, schedule=lt.schedules.warmup_linear(3, 40))

    return make


CHANGED: list[tuple[str, Callable[[], Run], str]] = [
    ("lr", lambda: run_of(lr=3e-2), "optimizer.lr +0.01 +0.03"),
    ("betas", lambda: run_of(betas=(0.8, 0.7)), "optimizer.beta1 +0.9 +0.8\n  optimizer.beta2 +0.999 +0.7"),
    ("eps", lambda: run_of(eps=1e-6), "optimizer.eps +1e-08 +1e-06"),
    ("weight_decay", lambda: run_of(weight_decay=0.3), "optimizer.weight_decay +0.01 +0.3"),
    ("weight_decay", with_rates(1.0, 0.5), r"optimizer.parameters.layer0.weight.weight_decay +None +0.5"),
    ("lr_scale", with_rates(0.5, None), r"optimizer.parameters.layer0.weight.lr_scale +1.0 +0.5"),
    ("schedule", lambda: run_of(schedule=None), "optimizer.schedule.decay +'linear' +'constant'\n  optimizer.schedule"),
    ("seed", other_model(seed=12), "model.seed +11 +12"),
    ("seed", lambda: run_of(seed=4), "optimizer.seed +0 +4"),
    ("dropout", other_model(dropout=0.5), "model.dropout +0.3 +0.5"),
    ("compute", other_model(compute="tf32"), "model.compute +'float32' +'tf32'"),
]


@pytest.mark.parametrize(("name", "make", "rows"), CHANGED, ids=range(len(CHANGED)))
def test_options_that_the_caller_has_changed(tmp_path: Path, name: str, make: Callable[[], Run], rows: str) -> None:
    path, saved, other = tmp_path / "run", run_of(), make()
    train(saved, range(2))
    lt.save_checkpoint(path, *saved)
    model, optimizer = other
    options = model.options, optimizer.options, rates(other)
    advice = rf"changed=\('{name}',\) yours are used for these"
    for others in ((), {"lr", "dropout"} - {name}):
        with pytest.raises(CheckpointError, match=rf"(?s)with other options:.*\n  {rows}.*{advice}"):
            lt.load_checkpoint(path, model, optimizer, changed=others)
    lt.load_checkpoint(path, model, optimizer, changed=(name, "max_norm"))
    assert_same(state(other), state(saved))
    assert (model.options, optimizer.options, rates(other)) == options


def test_all_that_differs_is_in_one_table(tmp_path: Path) -> None:
    lt.save_checkpoint(tmp_path / "run", *run_of())
    model = lt.MLP([6, 12, 3], activation="relu", dropout=0.3, seed=5, device="cpu")
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, schedule=lt.schedules.warmup_linear(3, 50))
    with pytest.raises(CheckpointError) as raised:
        lt.load_checkpoint(tmp_path / "run", model, optimizer, changed=["seed"])
    assert str(raised.value).splitlines() == [
        f"{tmp_path / 'run'} was saved with other options:",
        "  option                          in the file  here",
        "  model.activation.name           'gelu'       'relu'",
        "  optimizer.schedule.total_steps  40           50",
        "With changed=('schedule',) yours are used for these.",
    ]


def test_changed_clipping_needs_an_equal_state(tmp_path: Path) -> None:
    path, saved = tmp_path / "run", run_of(max_norm=1.0)
    train(saved, range(2))
    lt.save_checkpoint(path, *saved)
    other = run_of(max_norm=0.5)
    lt.load_checkpoint(path, *other, changed=("max_norm",))
    assert_same(state(other), state(saved))
    with pytest.raises(CheckpointError, match=r"has optimizer\.grad_norm, which there is not here"):
        lt.load_checkpoint(path, *run_of(), changed=("max_norm",))


def test_a_changed_scaler_must_suit_its_state(tmp_path: Path) -> None:
    def scaled(interval: int) -> Run:
        model, _ = run_of()
        return model, lt.AdamW(model.parameters(), scaler=lt.GradScaler(1024.0, growth_interval=interval))

    path, saved = tmp_path / "run", scaled(10)
    train(saved, range(4))
    lt.save_checkpoint(path, *saved)
    lt.load_checkpoint(path, *scaled(5), changed=("scaler",))
    with pytest.raises(CheckpointError, match=r"scaler\.growth_tracker has the value 4; accepted are 0 to 3"):
        lt.load_checkpoint(path, *scaled(4), changed=("scaler",))


@pytest.mark.parametrize("changed", [("dims",), ("lr", "activation"), "lr", [3]])
def test_what_cannot_be_changed(tmp_path: Path, changed: Any) -> None:
    run = run_of()
    lt.save_checkpoint(tmp_path / "run", *run)
    with pytest.raises(ArgumentError, match=r"changed(\[[01]\])? is .*; (accepted are|it must be a)"):
        lt.load_checkpoint(tmp_path / "run", *run, changed=changed)


def scalars(kind: Callable[[Any], Any]) -> Run:
    """Makes a run whose numeric options are all of one number type."""
    whole = int if kind in (np.float32, np.float64, np.float16) else kind
    activation = lt.Activation("leaky_relu", kind(0.25))
    dims = [whole(6), whole(12), whole(3)]
    model = lt.MLP(dims, activation, dropout=kind(0.5), seed=whole(11), device="cpu", dtype="bfloat16")
    for each in model.parameters():
        each.lr_scale, each.weight_decay = kind(0.5), kind(0.25)
    schedule = lt.schedules.warmup_linear(whole(3), whole(40), kind(0.5))
    scaler = lt.GradScaler(kind(1024), kind(2), kind(0.5), whole(3))
    rates = {"lr": kind(0.5), "betas": (kind(0.5), kind(0.75)), "eps": kind(0.125), "weight_decay": kind(0.25)}
    more = {"max_norm": kind(1), "seed": whole(5), "amsgrad": whole(1)}
    return model, lt.AdamW(model.parameters(), **rates, **more, schedule=schedule, scaler=scaler)


KINDS = [np.float64, np.float32, np.float16, lambda value: np.int8(value) if value % 1 == 0 and value < 128 else value,
         lambda value: np.int64(value) if value % 1 == 0 else np.float32(value)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=range(len(KINDS)))
def test_options_of_every_kind_of_number_are_saved_as_plain_ones(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    plain, run = tmp_path / "plain", scalars(kind)
    lt.save_checkpoint(plain, *scalars(lambda value: value))
    lt.save_checkpoint(tmp_path / "run", *run)
    assert (tmp_path / "run").read_bytes() == plain.read_bytes()
    lt.load_checkpoint(plain, *run)
    lt.save_model(tmp_path / "model", run[0])
    assert lt.load_model(tmp_path / "model", device="cpu").options == run[0].options
