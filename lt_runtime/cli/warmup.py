"""The command `warmup`: tunes layers before any training, and prints a table of the results."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lt_runtime.cli import INTERRUPTED
from lt_runtime.cli.output import show
from lt_runtime.cli.shapes import Layers, preset, read_shapes
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.ops.tuning import mlp_chain, ordinal_of
from lt_runtime.problem import ComputeName, MatmulProblem
from lt_runtime.store.recording import read_recorded
from lt_runtime.tuner import search
from lt_runtime.tuner.chain import LayerChain, chains_of
from lt_runtime.tuner.report import Tuned, TuningReport, progress_bar


def run(arguments: argparse.Namespace) -> int:
    """Tunes the requested problems, and prints the report as a table or as one JSON object.

    Returns:
        The exit status: 0, or 130 after an interrupt; results up to then are kept and printed.

    Raises:
        ArgumentError: an option or a file is not accepted.
        DeviceError: there is no such GPU.
        LtError: the tuner failed; results up to then are kept and printed.
    """
    chains = _chains(arguments)
    device = ordinal_of(arguments.device)
    tuned: list[Tuned] = []
    try:
        with progress_bar() as progress:
            tuned.extend(search.tune_chains(chains, device, progress=progress))
    except (KeyboardInterrupt, LtError) as error:
        if tuned or isinstance(error, KeyboardInterrupt):
            _show(tuned, is_complete=False, as_json=arguments.json)
        if isinstance(error, LtError):
            raise
        return INTERRUPTED
    return _show(tuned, is_complete=True, as_json=arguments.json)


def _show(tuned: list[Tuned], *, is_complete: bool, as_json: bool) -> int:
    report = TuningReport(tuned)
    result = {"ok": is_complete, "gain": report.gain, "seconds": report.seconds, "tuned": report.to_json()}
    stopped = [] if is_complete else ["Stopped: what is in the table is kept."]
    return show(result, [report.table(), report.summary, *stopped], as_json=as_json)


def _chains(arguments: argparse.Namespace) -> list[LayerChain | MatmulProblem]:
    """All chains of layers and all products that the arguments name.

    Raises:
        ArgumentError: the arguments name no problem, or a value is not accepted.
    """
    found: list[LayerChain | MatmulProblem] = []
    given, types = list(_layers(arguments)), dict.fromkeys(arguments.dtype or ["float32"])
    if arguments.compute == "tf32" and "float32" not in types:
        raise ArgumentError("--compute is tf32, which needs --dtype float32")
    for dtype in types:
        compute: ComputeName = arguments.compute if dtype == "float32" else "float32"
        for layers in given:
            names = arguments.activation or [layers.activation]
            found += [mlp_chain(layers.dims, layers.rows, name, dtype=dtype, compute=compute) for name in names]
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
