"""Models made from a saved file alone, also from a checkpoint; damaged and forged files are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, CheckpointError, FileError, KindError, MissingFileError, OperandError
from lt_runtime.nn import mlp
from lt_runtime.saving import checkpoint_file
from tests.support.numpy_cases import DTYPES, Array
from tests.support.training_runs import assert_same, content_of, rewrite, run_of, train

TEXT = "lt_runtime"
X = np.random.default_rng(4).standard_normal((5, 6))


def trained(dtype: str = "float32", **options: Any) -> lt.MLP:
    run = run_of(dtype, **options)
    train(run, range(3))
    return run[0]


def values_of(model: lt.MLP) -> dict[str, Array]:
    found = {f"{each.name}.{part}": getattr(each, part) for each in model.parameters() for part in ("data", "master")}
    return {name: array for name, array in found.items() if array is not None}


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_comes_back_as_it_was(tmp_path: Path, dtype: str, with_optimizer: bool) -> None:
    path, run = tmp_path / "model.safetensors", run_of(dtype)
    train(run, range(3))
    if with_optimizer:
        lt.save_checkpoint(path, *run)
    else:
        lt.save_model(path, run[0])
    model = lt.load_model(path, device="cpu")
    assert model.options == run[0].options
    assert_same(values_of(model), values_of(run[0]))
    x = X.astype(DTYPES[dtype])
    assert model(x).tobytes() == run[0](x).tobytes()


def test_arrays_are_drawn_and_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("bfloat16")
    lt.save_model(tmp_path / "model", whole)
    monkeypatch.setattr(checkpoint_file, "_PIECE", 8)
    monkeypatch.setattr(mlp, "_DRAWN", 7)
    assert_same(values_of(trained("bfloat16")), values_of(whole))
    assert_same(values_of(lt.load_model(tmp_path / "model", device="cpu")), values_of(whole))


PEAK = """
import re, sys
from pathlib import Path
import lt_runtime as lt
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
before = peak()
model = lt.load_model(sys.argv[1], device="cpu")
print(peak() - before - sum(each.data.nbytes for each in model.parameters()))  # gradients are not touched yet
"""


def test_a_model_takes_little_more_memory_than_its_own_arrays(tmp_path: Path) -> None:
    lt.save_model(tmp_path / "model", lt.MLP([4096, 3072, 4096], device="cpu"))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "model")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert int(done.stdout) < 64 << 20


OPTIONS: list[dict[str, Any]] = [
    {"dims": [3, 2]},
    {"dims": (3, 4, 5, 2), "activation": "silu", "dropout": 0.25, "seed": 2**64 - 1, "compute": "tf32"},
    {"dims": [3, 4, 2], "activation": lt.Activation("leaky_relu", 0.3), "dtype": "float16"},
    {"dims": [3, 4, 2], "dtype": "bfloat16", "master_weights": False},
    {"dims": [3, 4, 2], "activation": ["tanh", "relu"], "dropout": [0.0, 0.25], "bias": [False, True]},
    {"dims": np.array([3, 4, 2]), "dtype": "bfloat16", "dropout": np.float32(0.5), "seed": np.uint64(7)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_every_option_is_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    path, model = tmp_path / "model", lt.MLP(**options, device="cpu")
    lt.save_model(path, model)
    other = lt.load_model(path, device="cpu")
    assert other.options == model.options == json.loads(json.dumps(model.options))
    assert_same(values_of(other), values_of(model))
    assert [(each.activation, each.dropout) for each in other.layers] == [
        (each.activation, each.dropout) for each in model.layers
    ]


def test_master_copies_that_an_optimizer_made_are_kept(tmp_path: Path) -> None:
    model = lt.MLP([6, 12, 3], dtype="bfloat16", master_weights=False, device="cpu")
    train((model, lt.AdamW(model.parameters())), range(3))
    lt.save_model(tmp_path / "model", model)
    assert_same(values_of(lt.load_model(tmp_path / "model", device="cpu")), values_of(model))


def test_other_tools_find_full_precision_under_plain_names(tmp_path: Path) -> None:
    model = trained("bfloat16")
    lt.save_model(tmp_path / "model", model)
    arrays = safetensors.numpy.load_file(tmp_path / "model")
    assert [*sorted(arrays)] == sorted(each.name for each in model.parameters())
    for each in model.parameters():
        assert arrays[each.name].tobytes() == each.master.tobytes()


def test_a_stale_master_copy_is_not_saved(tmp_path: Path) -> None:
    run = run_of("float16")
    run[0].layers[0].bias.data[3] = 5
    for error, save in ((OperandError, lambda path: lt.save_model(path, run[0])),
                        (CheckpointError, lambda path: lt.save_checkpoint(path, *run))):  # fmt: skip
        with pytest.raises(error, match=r"layer0.bias.data has 5.0 at \(3,\), but its master copy .*assign\(values\)"):
            save(tmp_path / "model")
    assert not [*tmp_path.iterdir()]


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    lt.save_model(tmp_path / "model", trained())
    with pytest.raises(MissingFileError):
        lt.load_model(tmp_path / "none", device="cpu")
    with pytest.raises(ArgumentError, match=r"device is 'tpu'"):
        lt.load_model(tmp_path / "model", device="tpu")
    with pytest.raises(KindError, match=r"model is 3; it must be an lt\.MLP"):
        lt.save_model(tmp_path / "model", 3)  # type: ignore[arg-type]


# Tests that load the values of a file into an existing model.


@pytest.mark.parametrize("saved_by", ["save_model", "save_checkpoint"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_without_an_optimizer(tmp_path: Path, dtype: str, saved_by: str) -> None:
    path, run = tmp_path / "run", run_of(dtype, amsgrad=True, scaled=True, max_norm=1.0)
    train(run, range(3))
    if saved_by == "save_model":
        lt.save_model(path, run[0])
    else:
        lt.save_checkpoint(path, *run)
    model = lt.MLP([6, 12, 3], activation="gelu", dtype=dtype, dropout=0.1, seed=99, device="cpu")
    arrays = values_of(model)
    lt.load_checkpoint(path, model)
    assert_same(values_of(model), values_of(run[0]))
    assert all(array is arrays[name] for name, array in values_of(model).items())
    assert model.dropout == 0.1


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"dims": [6, 13, 3]}, r"model.dims +\[6, 12, 3\] +\[6, 13, 3\]"),
        ({"activation": "relu"}, "model.activation.name +'gelu' +'relu'"),
        ({"dtype": "float16"}, "model.dtype +'float32' +'float16'"),
    ],
)
def test_values_of_another_model(tmp_path: Path, changes: dict[str, Any], row: str) -> None:
    lt.save_checkpoint(tmp_path / "run", *run_of())
    model = lt.MLP(**{"dims": [6, 12, 3], "activation": "gelu", "device": "cpu", **changes})
    before = {name: array.copy() for name, array in values_of(model).items()}
    with pytest.raises(CheckpointError, match=rf"with other options:\n  option +in the file +here\n  {row}$"):
        lt.load_checkpoint(tmp_path / "run", model)
    assert_same(values_of(model), before)


# Tests of damaged and forged files.


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        lt.load_model(path, device="cpu")
    said = str(raised.value)
    assert said.startswith(str(path))
    assert len(said.encode()) < 1000


def forge(path: Path, change: Callable[[dict[str, Array], dict[str, Any]], object]) -> None:
    """Changes arrays and options of a saved model, and writes the digest that matches the changed file."""
    arrays, metadata = content_of(path)
    description = json.loads(metadata[TEXT])
    change(arrays, description["model"])
    checkpoint_file.write(path, arrays, json.dumps(description))


FORGED: list[tuple[Callable[[dict[str, Array], dict[str, Any]], object], str]] = [
    (lambda arrays, _: arrays.pop("layer0.weight"), "has no layer0.weight$"),
    (lambda arrays, _: arrays.pop("layer1.bias"), "has no layer1.bias$"),
    (lambda arrays, _: arrays.update(more=np.ones(2, np.float32)), "has more, which there is not here"),
    (lambda arrays, _: arrays.update({"optimizer.more": np.ones(2, np.float32)}), "has optimizer.more, which there is"),
    (lambda arrays, _: arrays.update({"layer0.bias.m": np.ones(2, np.float32)}), r"layer0.bias.m is float32 \(2,\)"),
    (lambda arrays, _: arrays.update({"layer0.bias.x": np.ones(12, np.float32)}), "has layer0.bias.x, which there is"),
    (lambda arrays, _: arrays.update({"layer9.bias": np.ones(12, np.float32)}), "has layer9.bias, which there is not"),
    (lambda arrays, _: arrays.update({"layer0.bias": np.ones(12, np.int32)}), r"layer0.bias is int32 \(12,\); here"),
    (lambda arrays, _: arrays.update({"layer0.bias": np.ones((12, 1), np.float32)}), r"is float32 \(12, 1\); here"),
    (lambda _, options: options.update(dims=[10**9, 10**9]), "here its shape is|which there is not"),
    (lambda _, options: options.update(dims=[6, 10**12, 3]), r"layer0.* is float32 \(.*\); here its shape is \(10{12}"),
    (lambda _, options: options.update(dims=[6, 12, 3, 10**12]), "has no layer2.weight"),
    (lambda _, options: options.update(dims=[6, 12]), "has layer1.(bias|weight), which there is not here"),
    (lambda _, options: options.update(dims=[]), "has layer0.bias, which there is not here"),
    (lambda _, options: options.update(dims=[6, 12.0, 3]), "was not written by"),
    (lambda _, options: options.update(dims={"6": 12}), "was not written by"),
    (lambda _, options: options.update(dims="612"), "was not written by"),
    (lambda _, options: options.update(dims=None), "was not written by"),
    (lambda _, options: options.pop("dims"), "was not written by"),
    (lambda _, options: options.update(activation={"name": "nothing"}), "no model: activation is .*'nothing'.*; ac"),
    (lambda _, options: options.update(activation={"names": "relu"}), "describes no model: .*names"),
    (lambda _, options: options.update(activation=3), "describes no model: activation is 3;"),
    (lambda _, options: options.update(dtype="int8"), "describes no model: the model has type int8;"),
    (lambda _, options: options.update(dropout=2), "describes no model: dropout is 2.0"),
    (lambda _, options: options.update(seed="x" * 999), "describes no model: seed is 'xxx.{,100}; it must be an int"),
    (lambda _, options: options.update(device="cuda"), "describes no model: .*device"),
    (lambda _, options: options.update(later=1), "describes no model: .*later"),
    (lambda _, options: options.update(dtype=json.loads("[" * 400 + "]" * 400)), "describes no model"),
]


@pytest.mark.parametrize(("change", "message"), FORGED, ids=range(len(FORGED)))
def test_forged_files(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "model"
    lt.save_model(path, run_of()[0])
    forge(path, change)
    refused(path, message)


def test_values_beyond_the_range_of_the_type(tmp_path: Path) -> None:
    path, model = tmp_path / "model", trained("float16")
    lt.save_model(path, model)
    forge(path, lambda arrays, _: arrays["layer0.weight"].__setitem__((3, 2), 1e30))
    refused(path, r"cannot be used: layer0.weight has 1e\+30 at \(3, 2\), which is too large for float16")
    before = {name: array.copy() for name, array in values_of(model).items()}
    with pytest.raises(CheckpointError, match=r"layer0.weight has 1e\+30"):
        lt.load_checkpoint(path, model)
    assert_same(values_of(model), before)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_paths_that_no_file_can_have(name: str) -> None:
    run = run_of()
    calls: list[Callable[[], object]] = [
        lambda: lt.load_model(name, device="cpu"),
        lambda: lt.save_model(name, run[0]),
        lambda: lt.load_checkpoint(name, *run),
        lambda: lt.save_checkpoint(name, *run),
        lambda: lt.profile(lambda: None, steps=1).save(name),
    ]
    for call in calls:
        with pytest.raises(FileError, match="a path has no NUL"):
            call()


def test_millions_of_layers_are_refused_before_their_names_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    lt.save_model(path, run_of()[0])
    forge(path, lambda _, options: options.update(dims=[1] * 1_000_000))
    monkeypatch.setattr("lt_runtime.saving.checkpoints.shapes_of", None)
    refused(path, "describes 999999 layers, but has 4 arrays")


def test_memory_in_use_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    lt.save_model(path, run_of()[0])
    meminfo = "MemTotal: 99999999 kB\nMemAvailable: 0 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: meminfo)
    refused(path, "takes 984 bytes of memory to be read; this machine has 0 available$")


def test_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "model"
    lt.save_model(path, run_of()[0])
    rewrite(path, lambda arrays, _: arrays["layer1.bias"].__setitem__(1, 7))
    refused(path, "is damaged: its content does not have the digest")
    lt.save_checkpoint(path, *run_of("float16"))
    rewrite(path, lambda arrays, _: arrays["layer1.bias.m"].__setitem__(1, 7))  # load_model does not read this array
    refused(path, "is damaged: its content does not have the digest")


def test_an_older_checkpoint_is_read(tmp_path: Path) -> None:
    path, run = tmp_path / "run", run_of("bfloat16")
    lt.save_checkpoint(path, *run)
    # Files of the package's first versions lack this option.
    forge(path, lambda _, options: options.pop("master_weights"))
    assert_same(values_of(lt.load_model(path, device="cpu")), values_of(run[0]))
    lt.load_checkpoint(path, *run)


@pytest.mark.parametrize(
    ("dims", "huge", "message"),
    [
        ([1 << 20, 1 << 20], "layer0.weight", "takes 8796093022208 bytes .*; this machine has [0-9]+ available$"),
        ([6, 12, 3], "layer0.weight.m", r"is float32 \(.*\); here its shape is"),
    ],
)
def test_holes_are_no_memory(tmp_path: Path, dims: list[int], huge: str, message: str) -> None:
    """A sparse file that claims 4 TiB of arrays is refused unread, even if the model would really have that size."""
    path, model = tmp_path / "model", lt.MLP([2, 2], device="cpu")
    lt.save_model(path, model)
    text = json.dumps({"format": 1, "model": model.options | {"dims": dims}})
    side = 1 << 20
    described: dict[str, Any] = {"__metadata__": {TEXT: text, "lt_runtime.sha256": "0" * 64}}
    described[huge] = {"dtype": "F32", "shape": [side, side], "data_offsets": [0, 4 * side * side]}
    if huge != "layer0.weight":
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        described |= {f"layer{i}.weight": empty for i in range(len(dims) - 1)}
    header = json.dumps(described).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 4 * side * side)
    refused(path, message)


# Tests of models that are made of blocks.

CPU: dict[str, Any] = {"device": "cpu"}


def _tied() -> lt.Block:
    first = lt.Linear(6, 8, activation=lt.Activation("leaky_relu", 0.3), dropout=0.25, seed=1, **CPU)
    again = lt.Linear(6, 8, weight=first.weight, bias=False, activation="gelu", seed=2)
    return lt.Chain(first, lt.Linear(8, 6, weight=first.weight.T, seed=3), again)


def _stack(**options: Any) -> lt.Block:
    gated = lt.SwiGLU(8, 12, dropout=0.25, seed=4, bias=True, **options, **CPU)
    norm = lt.LayerNorm(8, eps=1e-3, bias=False, **options, **CPU)
    mlp = lt.MLP([8, 5, 8], ["tanh", "none"], dropout=[0.25, 0], bias=[True, False], seed=6, **options, **CPU)
    blocks = (lt.Residual(lt.Chain(lt.RMSNorm(8, **options, **CPU), gated)), lt.Dropout(0.5, seed=5), norm, mlp)
    return lt.Chain(lt.Linear(6, 8, seed=7, **options, **CPU), *blocks)


def _towers() -> lt.Block:
    first, second = lt.Linear(6, 4, seed=1, compute="tf32", **CPU), lt.Gated(6, 3, seed=2, activation="tanh", **CPU)
    return lt.Chain(
        lt.Parallel(first, second, first, split=False), lt.LayerNorm(14, **CPU), lt.GEGLU(14, 3, seed=3, **CPU)
    )


MODELS: dict[str, Callable[[], lt.Block]] = {
    "tied": _tied,
    "stack": _stack,
    "stack of 16-bit": lambda: _stack(dtype="bfloat16"),
    "no masters": lambda: lt.Linear(6, 3, seed=1, dtype="bfloat16", master_weights=False, **CPU),
    "a block twice": _towers,
    "in FP8": lambda: lt.GEGLU(6, 32, seed=1, dtype="bfloat16", precision=lt.FP8(recipe="rowwise"), **CPU),
    "sum": lambda: lt.Parallel(lt.RMSNorm(6, **CPU), lt.ReGLU(6, 4, seed=1, **CPU), join="sum", split=False),
}


def _outputs(model: Any) -> bytes:
    """A model's outputs in training mode, with dropout."""
    outputs: bytes = model.forward(X.astype(model.dtype.numpy), lt.Pass(3)).tobytes()
    return outputs


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_blocks_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    path, model = tmp_path / "model", MODELS[name]()
    for each in model.parameters():
        each.assign(np.random.default_rng(8).standard_normal(each.data.shape))
    lt.save_model(path, model)
    again = lt.load_model(path, device="cpu")
    # The comparison includes the names, and so which weights are shared.
    assert_same(values_of(again), values_of(model))
    assert _outputs(again) == _outputs(model)
    lt.save(tmp_path / "state", model=model)
    lt.load(tmp_path / "state", model=again)  # loading checks that all options are equal
    target = X[:, : model.outputs].astype(model.dtype.numpy)
    runs = [(each, lt.AdamW(each.parameters(), lr=1e-2)) for each in (model, again, MODELS[name]())]
    steps = [lt.TrainStep(*run, loss=_square) for run in runs]
    for step in steps[:2]:
        step(X.astype(model.dtype.numpy), target)
    assert_same(values_of(again), values_of(model))
    lt.save_checkpoint(path, *runs[0])
    lt.load_checkpoint(path, *runs[2])
    assert_same(values_of(lt.load_model(path, device="cpu")), values_of(model))
    for step in (steps[0], steps[2]):
        step(X.astype(model.dtype.numpy), target)
    assert_same(values_of(runs[2][0]), values_of(model))


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_a_part_loads_into_an_equal_model(tmp_path: Path, name: str) -> None:
    path, part, other = tmp_path / "part", MODELS[name](), MODELS[name]()
    lt.Chain(lt.Linear(6, 6, **CPU), lt.Chain(part)).parameters()  # the names of the parameters begin with "1.0."
    runs = [(each, lt.AdamW(each.parameters(), lr=1e-2)) for each in (part, other)]
    steps = [lt.TrainStep(*run, loss=_square) for run in runs]
    x, target = X.astype(part.dtype.numpy), X[:, : part.outputs].astype(part.dtype.numpy)
    steps[0](x, target)
    lt.save_checkpoint(path, *runs[0])
    lt.load_checkpoint(path, *runs[1])
    assert _outputs(lt.load_model(path, device="cpu")) == _outputs(part)
    for step in steps:
        step(x, target)
    for ours, theirs in zip(part.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)
        np.testing.assert_equal(ours.master, theirs.master)


def _square(outputs: Array, target: Array, gradient: Array, stream: None) -> Array:
    gradient[...] = outputs
    return np.square(outputs.astype(np.float32)).mean()  # type: ignore[no-any-return]


class Own(lt.Linear):
    """A block class defined outside of the package, as a user's would be."""


def test_models_that_no_file_describes(tmp_path: Path) -> None:
    gated, linear = lt.SwiGLU(6, 3, **CPU), lt.Linear(6, 6, **CPU)
    gated.up.weight = linear.weight
    for model, complaint in (
        (
            lt.Chain(linear, lt.Residual(Own(6, 6, **CPU))),
            r"^1.inner \(Own\) is no block of the package.*lt.save, make",
        ),
        (Own(6, 6, **CPU), r"^the model \(Own\) is no block"),
        (lt.Chain(linear, gated), r"^1 \(SwiGLU\) shares a parameter that its constructor does not take"),
        (lt.Linear(6, 3, weight=lt.Linear(3, 6, **CPU).weight.T), r"^the model \(Linear\) shares a parameter"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            lt.save_model(tmp_path / "model", model)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, _: arrays.pop("0.weight"), "describes no model: '0.weight'"),
        (lambda arrays, _: arrays.pop("1.inner.1.down.weight"), "has no 1.inner.1.down.weight"),
        (
            lambda arrays, _: arrays.update({"9.weight": np.ones(2, np.float32)}),
            "has 9.weight, which there is not here",
        ),
        (lambda arrays, _: arrays.update({"1.inner.1.up.weight": np.ones((4, 8), np.float32)}), "here its shape is"),
        (lambda arrays, _: arrays.update({"0.weight": np.ones((8, 0), np.float32)}), "no model: inputs is 0"),
        (lambda _, options: options["parts"]["4"].update(dims=[8, 10**9, 8]), "layer0.* here its shape is"),
        (lambda _, options: options["parts"]["0"].update(block="Pass"), "describes no model: 'Pass'"),
        (lambda _, options: options["parts"].update({"0": "7."}), "describes no model: '7.'"),
        (lambda _, options: options["parts"].update({"0": 7}), "describes no model"),
        (lambda _, options: options["parts"]["0"].update(inputs=10**12), "describes no model: .*inputs"),
        (lambda _, options: options["parts"]["0"].update(weight="1.weight"), "describes no model: '1.weight'"),
        (lambda _, options: options["parts"].pop("0"), "has no [0-9]"),
        (lambda _, options: options.pop("parts"), "describes no model: 'parts'"),
    ],
    ids=range(13),
)
def test_forged_models_of_blocks(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "model"
    lt.save_model(path, _stack())
    forge(path, change)
    refused(path, message)
