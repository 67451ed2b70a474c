"""Hides threads from the package, which makes no automatic captures beside threads that it does not know."""

from __future__ import annotations

import threading

import pytest


def hide_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides all threads that live now, but the current one; earlier tests, or a compiler, have started them."""
    before, enumerate_all = {*threading.enumerate()} - {threading.current_thread()}, threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [each for each in enumerate_all() if each not in before])
