"""Commands on randomly changed plan files and recordings: an error line or a right result, soon, nothing lost."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.store.document import Document
from lt_runtime.store.entries import signed
from lt_runtime.store.keys import parse_key, problem_key
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner import search
from tests.cpu.cli.conftest import Cli
from tests.support.machine import HasGpus
from tests.support.mutated import mutated
from tests.support.plan_entries import H200, KEY, LAYER, OTHER, layer, product, product_key

DATA = Document(H200, {KEY: signed(KEY, product()), LAYER: signed(LAYER, layer(barred="slow"))}).render()
RECORDING = "# lt_runtime\n" + "".join(json.dumps({"problem": key}) + "\n" for key in (KEY, LAYER, OTHER))
COMMANDS = ("merge", "verify", "show", "list", "export", "warmup")
SECONDS, BYTES = 10, 200 << 20  # generous limits of time and memory, because the machine may be busy


def resigned(data: Any) -> Any:
    """Recomputes the digests of the entries of a plan file's content."""
    entries = data.get("entries") if isinstance(data, dict) else None
    if isinstance(entries, dict):
        for key, entry in entries.items():
            if isinstance(entry, dict):
                plain = {name: value for name, value in entry.items() if name != "digest"}
                text = json.dumps([key, plain], sort_keys=True, separators=(",", ":"))
                entry["digest"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return data


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpus: HasGpus) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(search, "tune_chains", lambda *_, **__: ())
    monkeypatch.setattr("lt_runtime.cli.warmup.ordinal_of", lambda _: 0)
    has_gpus(H200)
    return tmp_path / "cache" / "plans" / H200.file_name


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), command=st.sampled_from(COMMANDS), is_own=st.booleans())
def test_a_changed_file_is_refused_in_a_line_or_used_rightly(
    data: st.DataObject, command: str, cache: Path, tmp_path: Path, cli: Cli, *, is_own: bool
) -> None:
    shutil.rmtree(cache.parent, ignore_errors=True)
    PlanStore(cache, H200).put({product_key(7): product()})
    theirs = tmp_path / "theirs"
    if command == "warmup":
        theirs.write_bytes(data.draw(mutated(RECORDING.encode())))
        arguments = ["warmup", "--recorded", theirs]
    else:
        (cache if is_own else theirs).write_bytes(data.draw(mutated(DATA, resigned)))
        target = tmp_path / "exported"
        target.unlink(missing_ok=True)
        arguments = ["cache", command, *{"merge": [theirs], "show": ["*"], "export": [target]}.get(command, [])]
    if not theirs.exists():
        theirs.write_bytes(DATA)
    content, begin = cache.read_bytes(), time.monotonic()
    tracemalloc.start()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        done = cli(*arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.monotonic() - begin < SECONDS
    assert peak < BYTES
    assert done.status in (0, 1)
    assert "fault of lt_runtime" not in done.err
    assert "Traceback" not in done.err
    assert all(line.isprintable() for line in (done.out + done.err).split("\n"))
    if done.status and command != "verify":
        assert done.err.startswith("lt_runtime ")
    if command != "merge" or done.status:
        kept = cache if cache.exists() else next(cache.parent.glob("*.json.*-1"))
        assert kept.read_bytes() == content
    elif not is_own:
        found = Document.read(cache)
        assert found.raw.items() >= json.loads(content)["entries"].items()
        assert all(problem_key(parse_key(key)) == key for key in found.raw)
