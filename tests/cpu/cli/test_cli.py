"""The command line: refused arguments, help, and the demo from end to end."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lt_runtime
from lt_runtime.cli import demo
from tests.cpu.cli.conftest import Cli

ROOT = Path(__file__).parents[3]
EPOCHS = 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: COMMAND"),
        ("train", "invalid choice: 'train'"),
        ("demo --epochs 0", "0 is not positive"),
        ("demo --dtype float64", "invalid choice: 'float64'"),
        ("demo --epochs " + "9" * 5000, f"--epochs: '{'9' * 60}...' is no integer that is accepted"),
        ("demo --epochs " + "9" * 400, f"--epochs: '{'9' * 60}...' is larger than 9223372036854775807"),
        ("demo --seed 1.5", "--seed: '1.5' is no integer"),
        (f"warmup --rows 8 --mlp 8,{'9' * 5000}", "argument --mlp: '999"),
        ("warmup --rows 8 --mlp 8,,8", "argument --mlp: '' is no integer"),
        ("warmup --dtype " + "9" * 5000, "argument --dtype: '999"),
        ("demo --fast", "unrecognized arguments: --fast"),
        ("doctor --json file", "unrecognized arguments: file"),
        # The argument parser accepts the following devices; the command then refuses them.
        ("demo --device cuda:" + "9" * 5000, "device is 'cuda:999"),
        ("demo --device tpu", "device is 'tpu'; accepted are 'auto', 'cpu', 'cuda' and 'cuda:N'"),
        ("demo --device cuda:99", "device is 'cuda:99', but this machine has"),
        ("demo --device cpu --dropout 1.5", "dropout is 1.5; it must be in [0, 1)"),
        ("demo --device cpu --dropout nan", "dropout is nan"),
        ("demo --device cpu --seed -1", "seed is -1; it must be an integer in [0, 2**64)"),
        ("demo --device cpu --json /dev/null/a", "--json is /dev/null/a, but /dev/null is no directory"),
    ],
)
def test_refused_arguments(arguments: str, message: str, cli: Cli) -> None:
    status, _, error = cli(*arguments.split())
    assert message in error
    assert len(error.splitlines()[-1]) < 300
    assert status == 2 or (status, error.count("\n"), error[:17]) == (1, 1, "lt_runtime demo: ")


def test_the_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"lt_runtime {lt_runtime.__version__}\n", "")


@pytest.mark.parametrize("command", ["cache", "check", "compare", "demo", "doctor", "profile", "warmup", "cache show"])
def test_help_says_what_a_command_does(command: str, cli: Cli) -> None:
    _, description, *_ = cli(*command.split(), "--help").out.split("\n\n")
    assert description.endswith(".")


def test_the_demo(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ["--device", "cpu", "--epochs", str(EPOCHS), "--dtype", "bfloat16", "--json", str(file), "--profile"]
    command = [sys.executable, "-m", "lt_runtime", "demo", *options]
    # The model's products are so small that they run faster without BLAS threads.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    result = json.loads(file.read_text())
    assert set(result) == {"device", "dtype", "accuracy", "preparation_seconds", "samples_per_second", "loss", "layers"}
    assert (result["device"], result["dtype"]) == ("cpu", "bfloat16")
    assert 0.96 <= result["accuracy"] <= 1
    assert f"accuracy: {result['accuracy']:.2%}" in done.stdout
    assert result["samples_per_second"] > 0
    assert f"samples per second on cpu, after {result['preparation_seconds']:.1f} s of preparation" in done.stdout
    steps = EPOCHS * (len(demo.load_digits().labels) // 64)
    assert len(result["loss"]) == steps
    assert np.mean(result["loss"][-20:]) < 0.1 < 2 < result["loss"][0]
    assert {layer["name"] for layer in result["layers"]} == {"", "layer0", "layer1", "layer2"}
    for name in ("layer0", "layer1", "layer2", "loss", "optimizer"):
        assert name in done.stdout


def quick_training(monkeypatch: pytest.MonkeyPatch, effect: Callable[[], None] = lambda: None) -> None:
    def train(*_: object) -> demo.Result:
        effect()
        return demo.Result("cpu", "float32", 0.97, 0.5, 1000.0, [2.0, 0.1], [])

    monkeypatch.setattr(demo, "train", train)


def test_results_replace_the_target_of_a_link_and_a_failed_training_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "elsewhere")

    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    command = "demo", "--device", "cpu", "--json", tmp_path / "link"
    quick_training(monkeypatch, fail)
    failed = cli(*command)
    assert (failed.status, failed.err) == (1, "lt_runtime demo: elsewhere: No space left on device\n")
    assert (tmp_path / "old").read_text() == "old"
    quick_training(monkeypatch)
    assert cli(*command).status == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "old").read_text())["accuracy"] == 0.97
    assert {path.name for path in tmp_path.iterdir()} == {"link", "old"}


def test_an_unforeseen_exception_is_one_line(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    quick_training(monkeypatch, lambda: {}["key"])
    status, _, error = cli("demo", "--device", "cpu")
    assert (status, error.count("\n")) == (1, 1)
    assert error.startswith("lt_runtime demo: KeyError: 'key'; this is a fault of lt_runtime")


def test_a_fifth_of_the_digits_is_held_out() -> None:
    digits = demo.load_digits()
    assert (len(digits.labels), len(digits.held_out_labels)) == (1797 - 359, 359)
    assert digits.images.dtype == digits.held_out_images.dtype == np.float32
    images = {image.tobytes() for image in digits.images}
    assert not any(image.tobytes() in images for image in digits.held_out_images)
    assert (digits.images.min(), digits.images.max()) == (0, 1)
