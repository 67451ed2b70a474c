"""Made-up machines: the GPUs that the plan store and the cache commands find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from lt_runtime.store import document as module
from lt_runtime.store import plan_store
from lt_runtime.store.document import Fingerprint

HasGpus: TypeAlias = Callable[..., None]
"""Sets the fingerprints of the machine's GPUs, in the order of their ordinals."""


@pytest.fixture
def has_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[HasGpus]:
    """A fixture: function that sets the made-up machine's GPUs, of which there are none at first."""
    gpus: list[Fingerprint] = []
    monkeypatch.setattr(module, "device_count", lambda: len(gpus))
    for user in (module, plan_store):
        monkeypatch.setattr(user, "fingerprint", lambda device: gpus[device])

    def say(*fingerprints: Fingerprint) -> None:
        gpus[:] = fingerprints
        module.machine.cache_clear()

    say()
    yield say
    module.machine.cache_clear()
