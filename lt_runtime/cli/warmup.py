"""Tuning from the command line, so that no training has to: shapes to problems to the tuner to a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from rich.console import Console

from lt_runtime.cli.shapes import Mlp, Shapes, preset, read_shapes
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.ops._tuning_report import TuningReport
from lt_runtime.ops._tuning_run import progress_bar, tune_in_parts
from lt_runtime.ops.tuning import ordinal_of
from lt_runtime.problem import Activation, Compute, DType
from lt_runtime.store.keys import Problem
from lt_runtime.store.recording import read_recorded
from lt_runtime.tuner.stacks import Stack

if TYPE_CHECKING:
    from lt_runtime.tuner.tuning import Tuned

INTERRUPTED: Final = 130
_DEFAULT_ACTIVATION: Final = "relu"


def run(arguments: argparse.Namespace) -> int:
    """Tunes what was asked for and prints what came of it, as a table or as one JSON object.

    Returns:
        The exit status: 0, or 130 if it was interrupted; what was decided until then is kept and printed.

    Raises:
        ArgumentError: an option or a file that is not accepted.
        DeviceError: there is no such GPU.
        LtError: the tuner failed; what was decided until then is kept and printed.
    """
    problems = problems_of(arguments)
    device = ordinal_of(arguments.device)
    tuned: list[Tuned] = []
    stopped_by: KeyboardInterrupt | LtError | None = None
    try:
        with progress_bar() as progress:
            for part in tune_in_parts(problems, device, effort=arguments.effort, progress=progress):
                tuned += part
    except (KeyboardInterrupt, LtError) as error:
        stopped_by = error
    if tuned or not isinstance(stopped_by, LtError):
        _show(TuningReport(tuned), is_complete=stopped_by is None, as_json=arguments.json)
    if isinstance(stopped_by, LtError):
        raise stopped_by
    return 0 if stopped_by is None else INTERRUPTED


def _show(report: TuningReport, *, is_complete: bool, as_json: bool) -> None:
    if as_json:
        head = {"ok": is_complete, "gain": report.gain, "seconds": report.seconds}
        print(json.dumps(head | {"tuned": report.to_json()}, indent=2))
        return
    console = Console()
    console.print(report.table())
    console.print(report.summary, highlight=False, soft_wrap=True)
    if not is_complete:
        console.print("Stopped: what is in the table is kept.", highlight=False)


def problems_of(arguments: argparse.Namespace) -> list[Problem]:
    """Every problem that was asked for, none twice.

    Raises:
        ArgumentError: nothing was asked for, or something that is not accepted.
    """
    found = [problem for stack in _stacks(arguments) for problem in stack.problems()]
    if arguments.recorded is not None:
        found += read_recorded(arguments.recorded)
    if not found:
        raise ArgumentError("there is nothing to tune: give --shapes, --mlp with --rows, --preset or --recorded")
    return list(dict.fromkeys(found))


def _stacks(arguments: argparse.Namespace) -> Iterator[Stack]:
    given = list(_shapes(arguments))
    types = list(_types(arguments.dtype or ["float32"], arguments.compute))
    for shapes in given:
        for dtype, compute in types:
            yield from _stacks_of(shapes, arguments.activation, dtype, compute)


def _shapes(arguments: argparse.Namespace) -> Iterator[Shapes]:
    if arguments.shapes is not None:
        yield read_shapes(arguments.shapes)
    for name in arguments.preset or ():
        yield preset(name)
    if arguments.mlp and arguments.rows is None:
        raise ArgumentError("--mlp needs --rows, the rows of its batch")
    if arguments.rows is not None and not arguments.mlp:
        raise ArgumentError("--rows needs --mlp; the layers of files and presets say their own")
    for dims in arguments.mlp or ():
        yield Shapes({}, {"": Mlp(arguments.rows, dims)})


def _types(names: Iterable[str], compute: str) -> Iterator[tuple[DType, Compute]]:
    """The types, each with how it is computed: TF32 is for FP32 alone.

    Raises:
        ArgumentError: TF32 was asked for, and FP32 was not.
    """
    types = [DType.parse("--dtype", name) for name in dict.fromkeys(names)]
    if compute == Compute.TF32.value and DType.FLOAT32 not in types:
        raise ArgumentError(f"--compute is {compute}, which needs --dtype float32")
    for dtype in types:
        yield dtype, Compute.parse(compute if dtype is DType.FLOAT32 else Compute.FLOAT32.value, dtype)


def _stacks_of(shapes: Shapes, activations: list[str] | None, dtype: DType, compute: Compute) -> Iterator[Stack]:
    """Each layer of a group as one that stands alone, with all its gradients; each MLP as a training step has it."""
    for m, n, k in (layer for group in shapes.layers.values() for layer in group):
        for name in activations or [_DEFAULT_ACTIVATION]:
            final = Activation(name)
            yield Stack(m, (k, n), Activation(), dtype, compute, final_activation=final, input_gradient=True)
    for mlp in shapes.mlps.values():
        for name in activations or [mlp.activation or _DEFAULT_ACTIVATION]:
            yield Stack(mlp.rows, mlp.dims, Activation(name), dtype, compute)
