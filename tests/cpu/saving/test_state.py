"""`lt.save` and `lt.load` of any models, optimizers, averages, training steps and plain values, by keyword."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, CheckpointError, KindError
from lt_runtime.saving import checkpoint_file
from tests.support.numpy_cases import DTYPES, Array
from tests.support.training_runs import assert_same, content_of

TEXT = "lt_runtime"


class Tied(lt.Block):
    __hash__: Any = None  # as in a dataclass

    def __init__(self, dtype: str = "float32", dropout: float = 0.25) -> None:
        options: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
        self.enc = lt.Linear(6, 4, activation="gelu", dropout=dropout, seed=7, **options)
        self.norm = lt.RMSNorm(4, **options)
        self.dec = lt.Linear(4, 6, weight=self.enc.weight.T, seed=8)

    def forward(self, x: Any, run: lt.Pass) -> Any:
        return self.dec.forward(self.norm.forward(self.enc.forward(x, run), run), run)

    def backward(self, dy: Any, run: lt.Pass) -> Any:
        return self.enc.backward(self.norm.backward(self.dec.backward(dy, run), run), run)


class Run:
    """A model with a shared weight, and its training: two update rules, a loss scaler, averages and a training step."""

    def __init__(self, dtype: str = "float32", dropout: float = 0.25, **options: Any) -> None:
        self.model = Tied(dtype, dropout)
        weights, others = self.model.parameters()[:1], self.model.parameters()[1:]
        rules = options.pop("rules", (lt.rules.Lion(1e-3), lt.rules.AdamW(1e-2)))
        groups = [*zip((weights, others), rules, strict=True)]
        options = {"scaler": lt.GradScaler(256.0, growth_interval=3), "max_norm": 1.0, **options}
        self.optimizer = lt.Optimizer(groups, **options)
        self.ema = lt.EMA(self.model, 0.9)
        self.step = lt.TrainStep(self.model, self.optimizer, loss="mse", ema=self.ema)

    @property
    def owners(self) -> dict[str, Any]:
        return {"model": self.model, "head": self.optimizer, "ema": self.ema, "step": self.step}

    def train(self, steps: range) -> None:
        for i in steps:
            x = np.random.default_rng(i).standard_normal((8, 6)).astype(DTYPES[self.model.dtype.value])
            self.step(x, x)

    def state(self) -> dict[str, Array]:
        found = {
            f"{each.name}.{part}": getattr(each, part)
            for each in self.model.parameters()
            for part in ("data", "master")
        }
        found |= {**self.ema.averages, **self.optimizer.state_dict()}
        return {name: array.copy() for name, array in found.items() if array is not None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(path: Path) -> Run:
    """Makes a few steps, and saves the run at `path`."""
    made = Run("bfloat16")
    made.train(range(3))
    lt.save(path, **made.owners, epoch=3)
    return made


def refused(path: Path, run: Run, message: str, **options: Any) -> str:
    """Checks that loading fails and changes nothing; returns the message."""
    before = run.state()
    with pytest.raises(CheckpointError, match=message) as raised:
        lt.load(path, **run.owners, **options)
    assert_same(run.state(), before)
    assert str(raised.value).startswith(str(path))
    return str(raised.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_run_is_the_unbroken_one(path: Path, dtype: str) -> None:
    unbroken, first, second = Run(dtype), Run(dtype), Run(dtype)
    unbroken.train(range(6))
    first.train(range(3))
    lt.save(path, **first.owners, epoch=3, best=math.inf, rate=np.float32(0.5), note="ä")
    second.train(range(90, 92))
    assert lt.load(path, **second.owners) == {"epoch": 3, "best": math.inf, "rate": 0.5, "note": "ä"}
    assert_same(second.state(), first.state())
    second.train(range(3, 6))
    assert_same(second.state(), unbroken.state())


def test_keys_are_names(path: Path, run: Run) -> None:
    parameters = ("enc.weight", "enc.bias", "norm.weight", "dec.bias")
    expected = {f"model/{name}{part}" for name in parameters for part in ("", ".master")}
    expected |= {f"ema/{name}" for name in parameters} | {f"head/{name}.m" for name in parameters}
    expected |= {f"head/{name}.v" for name in parameters[1:]}
    expected |= {f"head/{name}" for name in ("steps", "skipped_steps", "scale", "growth_tracker")}
    arrays, _ = content_of(path)
    assert arrays.keys() == expected
    assert arrays["head/dec.bias.m"].tobytes() == run.optimizer.state_dict()["dec.bias.m"].tobytes()


def test_some_owners_alone(path: Path, run: Run) -> None:
    other = Run("bfloat16")
    assert lt.load(path) == {"epoch": 3}
    assert lt.load(path, head=other.optimizer) == {"epoch": 3}
    assert_same(other.optimizer.state_dict(), run.optimizer.state_dict())
    lt.load(path, model=other.model)
    assert_same(other.model.state_dict(), run.model.state_dict())
    with pytest.raises(CheckpointError, match="has no net; its objects are ema, head, model, step"):
        lt.load(path, net=other.model)
    with pytest.raises(CheckpointError, match=r"kind +'EMA' +'Optimizer'"):
        lt.load(path, ema=other.optimizer)


def test_master_copies_that_are_only_in_the_file(tmp_path: Path) -> None:
    saved, without = (lt.MLP([4, 2], dtype="bfloat16", master_weights=each, device="cpu") for each in (True, False))
    lt.save(tmp_path / "model", model=saved)
    message = r"bias has no master copy here: make the optimizer before loading.*\), pass it to lt.load"
    with pytest.raises(CheckpointError, match=message):
        lt.load(tmp_path / "model", model=without)
    lt.AdamW(without.parameters())
    lt.load(tmp_path / "model", model=without)


KEYS = [
    "model/enc.weight",
    "model/norm.weight.master",
    "head/enc.weight.m",
    "head/dec.bias.v",
    "head/steps",
    "ema/enc.bias",
]
DAMAGE: dict[str, tuple[Callable[[dict[str, Array], str], object], str]] = {
    "missing": (lambda arrays, key: arrays.pop(key), "has no {key}"),
    "renamed": (lambda arrays, key: arrays.update({key + "x": arrays.pop(key)}), "has (no {key}|{key}x, which)"),
    "extra": (lambda arrays, key: arrays.update({key + ".x": arrays[key]}), r"has {key}\.x, which there is not here"),
    "shape": (lambda arrays, key: arrays.update({key: arrays[key][None]}), r"{key} is \w+ \(1, .*; here it is"),
    "type": (
        lambda arrays, key: arrays.update({key: np.zeros(arrays[key].shape, np.int32)}),
        "{key} is int32 .*; here",
    ),
    "foreign": (lambda arrays, key: arrays.update({"x" + key: arrays[key]}), "has x{key}, which belongs to none of"),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_every_name_that_does_not_fit_is_refused_by_name(path: Path, run: Run, key: str, damage: str) -> None:
    (arrays, metadata), (change, message) = content_of(path), DAMAGE[damage]
    change(arrays, key)
    checkpoint_file.write(path, arrays, metadata[TEXT])
    refused(path, Run("bfloat16"), message.replace("{key}", re.escape(key)))


def test_values_that_training_cannot_reach(path: Path, run: Run) -> None:
    for key, value in [("head/dec.bias.v", -1.0), ("head/scale", 0.0), ("head/steps", 2**32 - 1)]:
        arrays, metadata = content_of(path)
        arrays[key].reshape(-1)[-1] = value
        checkpoint_file.write(path.with_name("other"), arrays, metadata[TEXT])
        refused(path.with_name("other"), Run("bfloat16"), f"cannot be used: {key} has the value")
    arrays, metadata = content_of(path)
    arrays["model/enc.weight"][0, 0] = 9.0
    checkpoint_file.write(path, arrays, metadata[TEXT])
    refused(path, Run("bfloat16"), "cannot be used: model/enc.weight.data has 9.* but its master copy")
    before = path.read_bytes()
    run.optimizer.scaler.scale[...] = 0.0
    with pytest.raises(CheckpointError, match=r"run is not written: head/scale has the value 0\.0"):
        lt.save(path, **run.owners)
    assert path.read_bytes() == before


def test_every_difference_is_in_the_table(path: Path, run: Run) -> None:
    schedule = lt.schedules.warmup(5)
    other = Run("bfloat16", 0.5, rules=(lt.rules.Lion(2e-3), lt.rules.AdamW(1e-2, weight_decay=0.5)), schedule=schedule)
    other.model.dec.bias.lr_scale = 0.5
    said = refused(path, other, "was saved with other options")
    rows = [tuple(line.split()) for line in said.splitlines()[2:-1]]
    assert rows == [
        *[("model/enc.dropout", "0.25", "0.5"), ("head/schedule.warmup_steps", "0", "5")],
        *[("head/group", "0.lr", "0.001", "0.002"), ("head/group", "1.weight_decay", "0.01", "0.5")],
        ("head/dec.bias.lr_scale", "1.0", "0.5"),
    ]
    names = ("dropout", "lr", "lr_scale", "schedule", "weight_decay")
    assert said.endswith(f"With changed={names} yours are used for these.")
    lt.load(path, **other.owners, changed=names)
    assert (other.optimizer.rules[0].lr, other.model.dec.bias.lr_scale) == (2e-3, 0.5)
    assert_same(other.state(), run.state())


SCHEDULES = [lt.schedules.warmup_linear(2, 9), lt.schedules.table([0.5, 0.25, 0.125]), lt.schedules.table([1.0])]


@pytest.mark.parametrize("theirs", SCHEDULES)
@pytest.mark.parametrize("ours", SCHEDULES)
def test_settings_of_the_file(path: Path, theirs: Any, ours: Any) -> None:
    rules = lt.rules.Lion(0.5, weight_decay=0.25), lt.rules.AdamW(0.125)
    saved, other = Run(rules=rules, schedule=theirs), Run(schedule=ours)
    saved.model.enc.bias.lr_scale, saved.model.norm.weight.weight_decay = 0.5, 0.0
    lt.save(path, **saved.owners)
    refused(path, other, r"head/group 0\.lr")
    lt.load(path, **other.owners, settings="file", changed=("weight_decay",))
    assert [(rule.lr, rule.weight_decay) for rule in other.optimizer.rules] == [(0.5, 0.0), (0.125, 0.01)]
    assert (other.optimizer.schedule, other.model.enc.bias.lr_scale) == (theirs, 0.5)
    assert other.model.norm.weight.weight_decay is None
    lt.load(path, **other.owners, settings="file")
    assert other.optimizer.rules == rules
    assert other.model.norm.weight.weight_decay == 0.0
    lt.load(path, **other.owners)


def test_settings_of_adamw(path: Path) -> None:
    def made(**settings: Any) -> dict[str, Any]:
        model = lt.MLP([6, 4, 3], seed=2, device="cpu")
        return {"net": model, "opt": lt.AdamW(model.parameters(), **settings)}

    saved, other = made(lr=0.5, weight_decay=0.25, max_norm=math.inf), made(max_norm=math.inf)
    lt.save(path, **saved)
    lt.load(path, **other, settings="file")
    assert (other["opt"].lr, other["opt"].weight_decay) == (0.5, 0.25)
    with pytest.raises(CheckpointError, match=r"opt/max_norm"):
        lt.load(path, **made(), settings="file")
    with pytest.raises(CheckpointError, match=r"format 2; load it with lt\.load"):
        lt.load_checkpoint(path, saved["net"], saved["opt"])
    lt.save_checkpoint(path, saved["net"], made()["opt"].__class__(saved["net"].parameters()))
    with pytest.raises(CheckpointError, match=r"format 1; load it with lt\.load_checkpoint or lt\.load_model"):
        lt.load(path, **saved)


SETTINGS: list[Callable[[dict[str, Any]], Any]] = [
    lambda given: given.update({"head/group 1.lr": -1.0}),
    lambda given: given.pop("head/group 1.lr"),
    lambda given: given.update({"head/dec.bias.lr_scale": None}),
    lambda given: given.update({"head/schedule": {"decay": "sudden"}}),
]


@pytest.mark.parametrize("change", SETTINGS)
def test_settings_that_a_file_cannot_have(path: Path, run: Run, change: Callable[[dict[str, Any]], Any]) -> None:
    arrays, metadata = content_of(path)
    described = json.loads(metadata[TEXT])
    change(described["options"])
    checkpoint_file.write(path, arrays, json.dumps(described))
    refused(path, Run("bfloat16"), "its settings are wrong", settings="file")


def linear(**options: Any) -> lt.Linear:
    return lt.Linear(4, 4, device="cpu", seed=len(options), **options)


def test_an_array_that_two_models_share_is_written_once(path: Path) -> None:
    shared = linear()
    one, two = lt.Chain(shared, linear()), lt.Chain(linear(bias=False), lt.RMSNorm(4, device="cpu"), shared)
    lt.save(path, b=two, opt=lt.AdamW([shared.weight]), a=one)
    arrays, _ = content_of(path)
    assert "b/2.weight" not in arrays
    assert "opt/0.weight.m" in arrays
    copies = lt.Chain(linear(), linear()), lt.Chain(linear(bias=False), lt.RMSNorm(4, device="cpu"), linear())
    with pytest.raises(CheckpointError, match=r"b/2\.bias is the same array as a/0\.bias only in the file"):
        lt.load(path, a=copies[0], b=copies[1])
    lt.load(path, b=copies[1])
    assert copies[1].state_dict()["2.weight"].tobytes() == one.parameters()[0].data.tobytes()
    lt.save(path, a=copies[0], b=copies[1])
    with pytest.raises(CheckpointError, match=r"b/2\.bias is the same array as a/0\.bias only here"):
        lt.load(path, a=one, b=two)


def test_one_optimizer_over_two_models(path: Path) -> None:
    def made() -> dict[str, Any]:
        models = {"a": lt.Chain(linear()), "b": lt.Chain(linear())}
        parameters = [each for model in models.values() for each in model.parameters()]
        return {**models, "opt": lt.AdamW(parameters, lr=1e-2)}

    saved, other = made(), made()
    for i, each in enumerate(saved["opt"].parameters):
        each.grad[...] = i + 1
    saved["opt"].step()
    lt.save(path, **saved)
    assert {"opt/a/0.weight.m", "opt/b/0.weight.m"} <= content_of(path)[0].keys()
    lt.load(path, **other)
    for one, two in zip(saved["opt"].moments, other["opt"].moments, strict=True):
        assert [each.tobytes() for each in one] == [each.tobytes() for each in two]
    with pytest.raises(ArgumentError, match=r"2 parameters of opt are named 0\.\w+; pass the models"):
        lt.load(path, opt=other["opt"])


def test_the_order_of_parameters_is_free_and_a_part_is_a_model(path: Path) -> None:
    model, again = lt.Chain(linear(), lt.Chain(linear())), lt.Chain(linear(), lt.Chain(linear()))
    optimizer, reverse = lt.AdamW(model.parameters()), lt.AdamW(again.parameters()[::-1])
    optimizer.moments[0][0][...] = 3.0
    lt.save(path, model=model, opt=optimizer, part=model.sequence[1])
    lt.load(path, model=again, opt=reverse, part=again.sequence[1])
    assert reverse.moments[-1][0].max() == 3.0
    lt.load(path, part=lt.Chain(linear()))


BLOCKS: list[tuple[Callable[[], lt.Block], Callable[[], lt.Block], str]] = [
    (lambda: lt.RMSNorm(4, device="cpu"), lambda: lt.LayerNorm(4, bias=False, device="cpu"), r"m/block +'RMSNorm'"),
    (lambda: linear(dropout=0.5), lambda: lt.Linear(4, 4, device="cpu", seed=2, dropout=0.5), r"m/seed +1 +2"),
    (lambda: linear(activation="relu"), lambda: linear(activation="tanh"), r"m/activation\.name +'relu' +'tanh'"),
    (lambda: lt.Chain(linear()), lambda: lt.Chain(linear(), linear()), r"(?s)\A(?!.*With).*m/1\.block +None +'Linear'"),
    (lambda: linear(dtype="float16"), linear, r"m/weight is float16 \(4, 4\); here it is float32"),
]


@pytest.mark.parametrize(("theirs", "ours", "row"), BLOCKS, ids=range(len(BLOCKS)))
def test_options_of_blocks(path: Path, theirs: Callable[[], lt.Block], ours: Callable[[], lt.Block], row: str) -> None:
    lt.save(path, m=theirs())
    lt.load(path, m=theirs())
    with pytest.raises(CheckpointError, match=row):
        lt.load(path, m=ours())


def test_seeds_matter_only_for_dropout(path: Path) -> None:
    lt.save(path, m=lt.Linear(4, 4, device="cpu", seed=1))
    lt.load(path, m=lt.Linear(4, 4, device="cpu", seed=2))


@pytest.mark.parametrize(("owners", "kind", "message"), [
    ({}, ArgumentError, "there is nothing to save"),
    ({"a": lt.GradScaler()}, KindError, r"a is GradScaler\(.*; it must be an lt.Block, an lt.Optimizer \(whose scaler"),
    ({"a": None}, KindError, "a is None; it must be"),
    ({"settings": linear()}, ArgumentError, "'settings' is no keyword"),
    ({"a/b": linear()}, ArgumentError, "'a/b' is no keyword"),
    ({"a": "\ud800"}, ArgumentError, r"run is not written: the names or the values \{'a': '.*cannot be saved"),
])  # fmt: skip
def test_what_cannot_be_saved(path: Path, owners: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        lt.save(path, **owners)
    assert not path.exists()


@pytest.mark.parametrize("options", [{"settings": "both"}, {"changed": ("dims",)}, {"changed": "lr"}, {"epoch": 3}])
def test_what_load_does_not_take(path: Path, run: Run, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"(settings|changed|epoch)(\[0\])? is "):
        lt.load(path, **options)


@pytest.mark.parametrize("section", ["options", "shared", "values"])
@pytest.mark.parametrize("value", [None, [], 3, {"model": []}, {"model": {"float": "x"}}])
def test_texts_that_save_does_not_write(path: Path, run: Run, section: str, value: Any) -> None:
    arrays, metadata = content_of(path)
    checkpoint_file.write(path, arrays, json.dumps({**json.loads(metadata[TEXT]), section: value}))
    refused(path, run, "was not written by|belongs to none|has no")
