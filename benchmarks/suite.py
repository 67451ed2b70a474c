"""A benchmark suite, and the conditions under which its rows are measured: plan caches, variables, other processes."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.report import Finding, Json, Row

GRAPH: Final = "torch_graph"
AUTOTUNE: Final = "max-autotune-no-cudagraphs"
"""The mode in which torch.compile makes the contenders `torch_max_autotune`."""
MAX_AUTOTUNE: Final = "torch_max_autotune"
TORCH_COMPILE: Final = "torch_compile"
JAX: Final = "jax"
CACHE_VARIABLE: Final = "LT_RUNTIME_CACHE_DIR"
UNTUNED: Final = ("LT_RUNTIME_TUNE", "off")
"""The environment variable that switches measuring off in training steps, and its value: suites tune explicitly."""
_ROOT: Final = Path(__file__).parents[1]

Job = Callable[[Any], Row]
"""Type: a function that measures a row on the given CuPy stream, which can be captured."""


def _nothing(_: Any) -> Any:
    return {}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark suite: its cases, jobs and summary.

    Attributes:
        rounds: the default number of rounds in which the contenders take turns.
        order: the cases, in the order of the result file.
        jobs: by case, the jobs for a command line.
        findings: computes the figures over all rows.
        facts: computes further entries of the result file.
        has_context: whether the jobs use the GPU in this process, and not only in other processes.
    """

    rounds: int
    order: Sequence[str]
    jobs: Callable[[argparse.Namespace], Mapping[str, Job]]
    findings: Callable[[Sequence[Json]], Sequence[Finding]] = _nothing
    facts: Callable[[Sequence[Json]], Json] = _nothing
    has_context: bool = True

    @classmethod
    def of(cls, measure: Callable[..., Row], cases: Sequence[Any], **attributes: Any) -> Self:
        """A suite of cases, each of which has a `name` and is measured by `measure(case, options, stream)`.

        The options `--dtype` and `--activation` choose cases by their `kind` and `activation`.
        """
        return cls(order=[case.name for case in cases], jobs=partial(jobs_of, measure, cases), **attributes)


def jobs_of(measure: Callable[..., Row], cases: Sequence[Any], options: argparse.Namespace) -> dict[str, Job]:
    """The jobs of the cases that the options choose; see `Suite.of`."""
    chosen = (
        case
        for case in cases
        if options.dtype in (None, getattr(case, "kind", None))
        and options.activation in (None, getattr(case, "activation", None))
    )
    return {case.name: partial(measure, case, options) for case in chosen}


def modes(options: argparse.Namespace, *, compiled: bool = False) -> dict[str, str | None]:
    """Maps names of PyTorch's contenders to modes of torch.compile; None for the contender that is not compiled.

    Args:
        compiled: whether the default mode takes part even if no option asks for it.
    """
    made: dict[str, str | None] = {GRAPH: None}
    made |= {TORCH_COMPILE: "default"} if compiled or options.torch_compile else {}
    return made | ({MAX_AUTOTUNE: AUTOTUNE} if options.max_autotune else {})


@contextlib.contextmanager
def ready(*, has_context: bool) -> Iterator[Any]:
    """Prepares this process for the jobs of a suite; yields their stream, or None for a suite without a context."""
    stream = None
    if has_context:
        import cupy as cp

        stream = cp.cuda.Stream(non_blocking=True)
    with variable(*UNTUNED):
        yield stream


@contextlib.contextmanager
def plan_cache(directory: str | None = None, *, keep: bool = False) -> Iterator[Path]:
    """Gives this process a plan cache in another directory, whose path it yields; compiled kernels are shared.

    Args:
        directory: an existing directory; an empty temporary one if left out.
        keep: whether to stay with the present plan cache, whose path is then yielded.
    """
    from lt_runtime.paths import cache_directory

    current = cache_directory()
    if keep:
        yield current
        return
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="lt_runtime_plans_"))
        kernels, link = current / "kernels", Path(directory) / "kernels"
        kernels.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(kernels.resolve(), target_is_directory=True)
        stack.enter_context(variable(CACHE_VARIABLE, directory))
        yield Path(directory)


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within a `with` block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def run_folder() -> str:
    """Makes a temporary directory, which is removed when the process ends."""
    made = tempfile.mkdtemp(prefix="lt_runtime_run_")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def matches(pattern: str | None, name: str) -> bool:
    """Whether a regular expression is found in a name, ignoring case; None matches every name."""
    return re.search(pattern or "", name, re.IGNORECASE) is not None


def last_line(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a process, and returns the JSON in the last line that it prints.

    Raises:
        CalledProcessError: the process failed.
    """
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))
