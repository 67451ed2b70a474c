"""Tunes layers before any training runs: reads shapes, hands their problems to the tuner, prints its report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import Final

from rich.console import Console

from lt_runtime.cli.shapes import Layers, preset, read_shapes
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.ops.tuning import ordinal_of
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem
from lt_runtime.store.recording import read_recorded
from lt_runtime.tuner import search
from lt_runtime.tuner.chain import Chain, chains_of
from lt_runtime.tuner.report import Tuned, TuningReport, progress_bar

INTERRUPTED: Final = 130


def run(arguments: argparse.Namespace) -> int:
    """Tunes the problems that were asked for, and prints the report as a table or as one JSON object.

    Returns:
        The exit status: 0, or 130 if it was interrupted; what was decided until then is kept and printed.

    Raises:
        ArgumentError: an option or a file is not accepted.
        DeviceError: there is no such GPU.
        LtError: the tuner failed; what was decided until then is kept and printed.
    """
    chains = _chains(arguments)
    device = ordinal_of(arguments.device)
    tuned: list[Tuned] = []
    stopped_by: KeyboardInterrupt | LtError | None = None
    try:
        with progress_bar() as progress:
            tuned.extend(search.tune_chains(chains, device, effort=arguments.effort, progress=progress))
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


def _chains(arguments: argparse.Namespace) -> list[Chain | MatmulProblem]:
    """Every chain of layers, and every product, that was asked for.

    Raises:
        ArgumentError: nothing was asked for, or something that is not accepted.
    """
    found: list[Chain | MatmulProblem] = []
    given, types = list(_layers(arguments)), list(_types(arguments.dtype or ["float32"], arguments.compute))
    for dtype, compute in types:
        for layers in given:
            names = arguments.activation or [layers.activation]
            found += [_chain(layers, activation, dtype, compute) for activation in names]
    if arguments.recorded is not None:
        found += chains_of(read_recorded(arguments.recorded))
    if not found:
        raise ArgumentError("there is nothing to tune: give --shapes, --mlp with --rows, --preset or --recorded")
    return found


def _layers(arguments: argparse.Namespace) -> Iterator[Layers]:
    if arguments.shapes is not None:
        for layers in read_shapes(arguments.shapes).values():
            yield from layers
    for name in arguments.preset or ():
        yield from preset(name)
    if arguments.mlp and arguments.rows is None:
        raise ArgumentError("--mlp needs --rows, the rows of its batch")
    if arguments.rows is not None and not arguments.mlp:
        raise ArgumentError("--rows needs --mlp; the layers of files and presets say their own")
    yield from (Layers(arguments.rows, dims) for dims in arguments.mlp or ())


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


def _chain(layers: Layers, activation: str | None, dtype: DType, compute: Compute) -> Chain:
    """The layers by the rule of `lt.tune`: a layer that stands alone has the activation itself, and makes its dx."""
    rows, dims, _ = layers
    if len(dims) == 2:
        final = Activation(activation or "none")
        return Chain.of_mlp(rows, dims, final, dtype, compute, final_activation=final, input_gradient=True)
    return Chain.of_mlp(rows, dims, Activation(activation or "relu"), dtype, compute)
