"""Fixtures for tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from lt_runtime.cli import main


class Done(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        try:
            status = main([*map(str, arguments)])
        except SystemExit as end:
            status = int(end.code or 0)
        return Done(status, *capsys.readouterr())

    return run
