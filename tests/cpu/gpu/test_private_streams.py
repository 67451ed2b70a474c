"""Streams of our own: one for each purpose, beside the default stream."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from lt_runtime.gpu import streams


def test_each_purpose_has_a_stream_that_does_not_wait_for_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    def create(*arguments: object) -> int:
        made.append(arguments)
        return len(made)

    monkeypatch.setattr(streams, "call", create)
    asked = [(0, "this test"), (0, "another test"), (1, "this test")]
    assert [streams.private_stream(*each) for each in (*asked, *asked)] == [1, 2, 3, 1, 2, 3]
    assert made == [("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)] * 3
