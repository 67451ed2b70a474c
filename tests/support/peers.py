"""Marks for tests that compare with another library, which skip the tests if that library is not installed."""

from __future__ import annotations

import importlib.util

import pytest

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="a peer, where it is installed")
