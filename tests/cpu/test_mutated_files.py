"""Randomly changed profiles, shapes, models and checkpoints give an `LtError` or a right result, and quickly."""

from __future__ import annotations

import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime.errors import LtError
from lt_runtime.profiling.layers import Kernel, Layer
from lt_runtime.profiling.report import Report
from lt_runtime.tuner import search
from tests.cpu.cli.conftest import Cli, cli  # noqa: F401  # a fixture
from tests.support.mutated import mutated
from tests.support.training_runs import assert_same, run_of, state

SHAPES = b'{"layers": {"a": [[8, 4, 4]]}, "mlps": {"b": {"rows": 8, "dims": [4, 4], "activation": "relu"}}}'
KERNELS = (Kernel("gemm", "fc", "forward", 0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.1),)
SECONDS, BYTES = 10, 200 << 20  # generous limits of time and memory, because the machine may be busy


def mutated_header(content: bytes) -> st.SearchStrategy[bytes]:
    """Copies a safetensors file, and changes its header, the model's text within the header, or bytes."""
    end = 8 + int.from_bytes(content[:8], "little")
    headers = mutated(content[8:end].rstrip())
    return mutated(content) | headers.map(lambda header: len(header).to_bytes(8, "little") + header + content[end:])


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, bytes]:
    Report("a GPU", 1, 1, [Layer("fc", "forward", 1, 2.0, 1.0, 1.0)], KERNELS).save(tmp_path / "profile")
    lt.save_model(tmp_path / "model", run_of()[0])
    lt.save_checkpoint(tmp_path / "checkpoint", *run_of("bfloat16"))
    return {name: (tmp_path / name).read_bytes() for name in ("profile", "model", "checkpoint")} | {"shapes": SHAPES}


def result_of(call: Callable[[], Any]) -> Any:
    """Makes a call; returns its result, or the `LtError` that it raised."""
    try:
        return call()
    except LtError as error:
        return error


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(("profile", "shapes", "model", "checkpoint")))
def test_a_changed_file_is_refused_in_a_line_or_used_rightly(
    data: st.DataObject,
    kind: str,
    tmp_path: Path,
    saved: dict[str, bytes],
    cli: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "tune_chains", lambda *_, **__: ())
    monkeypatch.setattr("lt_runtime.cli.warmup.ordinal_of", lambda _: 0)
    file, run, content = tmp_path / "changed", run_of("bfloat16"), saved[kind]
    file.write_bytes(data.draw(mutated_header(content) if kind in ("model", "checkpoint") else mutated(content)))
    uses: dict[str, Callable[[], Any]] = {
        "profile": lambda: cli("compare", tmp_path / "profile", file),
        "shapes": lambda: cli("warmup", "--shapes", file),
        "model": lambda: lt.load_model(file, device="cpu"),
        "checkpoint": lambda: lt.load_checkpoint(file, *run),
    }
    before, begin = state(run), time.monotonic()
    tracemalloc.start()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        done = result_of(uses[kind])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.monotonic() - begin < SECONDS
    assert peak < BYTES
    if isinstance(done, LtError):
        assert_same(state(run), before)
    text = f"{done}" if kind in ("model", "checkpoint") else done.out + done.err
    assert text.replace("\n", "").isprintable()
    assert not any(word in text for word in ("fault of lt_runtime", "Traceback"))
