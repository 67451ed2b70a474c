"""`lt.tune` and `lt.explain`: tuning on request, and explanations of plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from inspect import signature
from typing import Any, Protocol, get_args

from lt_runtime.arguments import by_layer, check_instance, flag, integer, integers, shown
from lt_runtime.errors import ArgumentError, DeviceError
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu.devices import current_device, device_count, parse_device
from lt_runtime.problem import (
    Activation,
    Chosen,
    Compute,
    ComputeName,
    DType,
    DTypeLike,
    activation_of,
    probability,
)
from lt_runtime.store.keys import Problem
from lt_runtime.tuner import search
from lt_runtime.tuner.chain import LayerChain, Tunable, chains_of
from lt_runtime.tuner.explanation import Explanations, explain_chain, explain_problem
from lt_runtime.tuner.report import TuningReport, progress_bar


class Rehearsed(Protocol):
    """The methods of a model that `tune` and `explain` use; see `Block`."""

    @property
    def device(self) -> Any:
        """The device of the parameters."""

    def rehearse(self, x: Any) -> list[Tunable]:
        """The problems to tune for inputs x, or for a number of rows: precisions, layers and products."""


def tune(
    dims: Sequence[int] | Problem | Sequence[Problem] | Rehearsed,
    rows: Any = None,
    *,
    activation: Chosen | Sequence[Chosen] | None = None,
    output_activation: Chosen | None = None,
    dtype: DTypeLike = "float32",
    compute: ComputeName = "float32",
    dropout: float | Sequence[float] = 0.0,
    bias: bool | Sequence[bool] = True,
    input_gradient: bool | None = None,
    device: Any = None,
    progress: bool = True,
) -> TuningReport:
    """Measures how the layers of a training step run fastest, and stores the results in the plan cache.

    The layers are those of `lt.MLP(dims)`, every matrix row-major and without gaps; or those of a model, which runs
    forward and back once, so that its gradients are overwritten. Other problems are passed as `dims`, or tuned at their
    first run within `lt.tuning()`. Problems in the plan cache are not measured again. It takes about
    a second a problem at most on an H200. An interruption (Ctrl-C) keeps the results so far, and the next call goes
    on from there. Problems for which the GPU has not enough memory cost a warning.

    Tuning captures graphs. While it runs, other threads must not synchronise with the whole device
    (`torch.cuda.synchronize()`, `cupy.cuda.Device().synchronize()`, cuCtxSynchronize) nor call cudaMalloc or cudaFree:
    during a capture such calls fail, and may invalidate it. They may wait for streams and events, and launch work,
    which makes the measurements less precise.

    Args:
        dims: sizes, which are the inputs of the first layer and then the outputs of each layer; or a model, which is an
            `lt.MLP` or another `lt.Block`; or one or more problems. With problems, `rows` must be left out. The
            arguments from `activation` to `input_gradient` describe the layers of sizes; otherwise leave them out.
        rows: M, the number of rows of a batch. For a model, its inputs are accepted too, as `Block.forward` takes them.
        activation: the activation of all layers but the last, ReLU if left out; or of the only layer, none if left out.
            A list or tuple has one for each layer, the last included.
        output_activation: of the last layer; none if left out, or if there is a sequence of activations.
        dtype: float32, float16 or bfloat16, as a name or a type.
        compute: "float32" or "tf32".
        dropout: probability after each layer but the last; or a list or tuple with one for each layer.
        bias: whether the layers have a bias; or a list or tuple with one for each layer.
        input_gradient: whether the first layer's dx is wanted; if left out, only where it is the only layer.
        device: the GPU, as an ordinal, "cuda:N" or a `torch.device`; if None the model's, or the current one.
        progress: show a progress bar, if standard error is a terminal.

    Returns:
        The decisions, with microseconds before and after; as text, a table.

    Raises:
        ArgumentError: an option that is not accepted, or there is no such GPU.
        DeviceError: there is no GPU at all, or the host was named.
        MissingLibraryError: CuPy is not installed.
        CaptureError: a stream is being captured that this would disturb.
        GpuError: the driver, the compiler or cuBLASLt failed.
    """
    shows = flag("progress", progress)
    options = activation, output_activation, dtype, compute, dropout, bias, input_gradient
    given, ordinal = _given(dims, rows, device, *options)
    chains = [*(each for each in given if isinstance(each, Fp8ChainProblem | LayerChain)), *chains_of(given)]
    with progress_bar(shown=shows) as show:
        tuned = [*search.tune_chains(chains, ordinal, progress=show)]
        if any(isinstance(each, Fp8ChainProblem) and each.is_open for each in chains):
            # The measurement may have moved layers to FP8 or back to their own type, in which they run other problems.
            again, _ = _given(dims, rows, device, *options)
            tuned += search.tune_chains([each for each in again if each not in chains], ordinal, progress=show)
    return TuningReport(tuned)


def explain(
    dims: Sequence[int] | Problem | Sequence[Problem] | Rehearsed,
    rows: Any = None,
    *,
    activation: Chosen | Sequence[Chosen] | None = None,
    output_activation: Chosen | None = None,
    dtype: DTypeLike = "float32",
    compute: ComputeName = "float32",
    dropout: float | Sequence[float] = 0.0,
    bias: bool | Sequence[bool] = True,
    input_gradient: bool | None = None,
    device: Any = None,
) -> Explanations:
    """How the layers of a training step would run now, and why; nothing is measured.

    The explanation of a problem names its strategy, cuBLASLt's algorithm for each product, the measured time and its
    ratio to the time at the GPU's peak rates, the slower alternatives with their times, and the rejected alternatives
    with reasons.

    Args:
        dims: as in `tune`, like all other arguments.

    Returns:
        An explanation of each problem, in the order in which they run; as text, all of them for people to read.

    Raises:
        ArgumentError, DeviceError: as in `tune`.
        PlanError: cuBLASLt has no algorithm for one of the products.
    """
    options = activation, output_activation, dtype, compute, dropout, bias, input_gradient
    given, ordinal = _given(dims, rows, device, *options)
    explained = [
        explain_chain(each, ordinal) if isinstance(each, LayerChain) else [explain_problem(each, ordinal)]
        for each in given
    ]
    return Explanations(itertools.chain(*explained))


def ordinal_of(device: object) -> int:
    """The ordinal of the GPU that a caller named, see `parse_device`; None stands for the current GPU.

    Raises:
        ArgumentError: there is no such GPU.
        DeviceError: there is no GPU at all, or the host was named.
    """
    if not device_count():
        raise DeviceError("there is no usable GPU here: see `python -m lt_runtime doctor`")
    ordinal = current_device() if device is None else parse_device(device)
    if ordinal is None:
        raise DeviceError(f"device is {shown(device)}; accepted are GPUs")
    return ordinal


def _given(dims: Any, rows: Any, device: object, *options: Any) -> tuple[list[Any], int]:
    """The chains of layers, or the problems, that the arguments of `tune` or `explain` name; and the GPU's ordinal."""
    if hasattr(dims, "rehearse"):
        if rows is None:
            raise ArgumentError("rows is missing (None): how many rows shall the model work on?")
        _check_left_out("a model", options)
        ordinal = ordinal_of(dims.device if device is None else device)
        return dims.rehearse(rows), ordinal
    problems = [dims] if isinstance(dims, Problem) else [*dims] if isinstance(dims, Sequence) else []
    if any(isinstance(each, Problem) for each in problems):
        for i, each in enumerate(problems):
            check_instance(f"dims[{i}]", each, get_args(Problem), "a problem, as the first of them")
        if rows is not None:
            raise ArgumentError(f"rows is {shown(rows)}, but a problem says itself how many it has")
        _check_left_out("a problem", options)
        return problems, ordinal_of(device)
    sizes = integers("dims", dims)
    if rows is None:
        raise ArgumentError(f"rows is missing (None): how many rows do the layers of dims {list(sizes)} work on?")
    return [mlp_chain(sizes, rows, *options)], ordinal_of(device)


def _check_left_out(described: str, options: Sequence[Any]) -> None:
    """Raises unless all options of `mlp_chain` have their defaults, because `dims` describes the layers itself."""
    for parameter, value in zip([*signature(mlp_chain).parameters.values()][2:], options, strict=True):
        if type(value) is not type(parameter.default) or value != parameter.default:
            raise ArgumentError(
                f"{parameter.name} is {shown(value)}, but {described} has its own: leave it out, or give sizes as dims"
            )


def mlp_chain(
    dims: Sequence[int],
    rows: int,
    activation: Chosen | Sequence[Chosen] | None = None,
    output_activation: Chosen | None = None,
    dtype: DTypeLike = "float32",
    compute: ComputeName = "float32",
    dropout: float | Sequence[float] = 0.0,
    bias: bool | Sequence[bool] = True,
    input_gradient: bool | None = None,
) -> LayerChain:
    """The chain of an MLP's layers, or of a single layer; arguments and errors are those of `tune`."""
    layers = len(dims) - 1
    if layers == 1 and not isinstance(dropout, (list, tuple)) and probability("dropout", dropout):
        raise ArgumentError(
            f"dropout is {dropout}, but of dims {list(dims)} the only layer is the last, which has none"
        )
    activations = _activations(activation, output_activation, dims)
    _, dropouts = by_layer("dropout", dropout, layers, probability, 0.0)
    _, biases = by_layer("bias", bias, layers, flag)
    drops, kind = [p > 0 for p in dropouts], DType.parse("the chain", dtype)
    sizes, types = (integer("rows", rows), integers("dims", dims)), (kind, Compute.parse(compute, kind))
    has_dx = layers == 1 if input_gradient is None else flag("input_gradient", input_gradient)
    return LayerChain.of_mlp(*sizes, activations, *types, dropout=drops, bias=biases, input_gradient=has_dx)


def _activations(
    activation: Chosen | Sequence[Chosen] | None, output_activation: Chosen | None, dims: Sequence[int]
) -> list[Activation]:
    """Each layer's activation. If there is only one layer, a single `activation` is its activation."""
    has_all, has_one = isinstance(activation, (list, tuple)), len(dims) == 2
    if output_activation is not None and (has_all or (has_one and activation is not None)):
        both = f"activation is {shown(activation)} and output_activation {shown(output_activation)}"
        why = "a sequence has the last layer's too" if has_all else f"dims {list(dims)} has only one layer"
        raise ArgumentError(f"{both}, but {why}")
    last = activation_of("output_activation", "none" if output_activation is None else output_activation)
    if activation is None:
        activation = "relu"
    elif has_one and not has_all:
        activation = [activation]  # type: ignore[list-item]
    return by_layer("activation", activation, len(dims) - 1, activation_of, last)[1]
