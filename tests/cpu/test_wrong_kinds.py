"""Passes every wrong kind of value to every parameter of the public interface, on NumPy and on the pretended GPU.

`SOUND` has valid arguments for each function. A parameter accepts values of its default's kind, unless `ACCEPTED` or
`ACCEPTED_BY` has another rule. A function without an entry fails.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

import lt_runtime
from tests.support.fake_gpu import FakeGpu
from tests.support.fake_torch import CpuTensor
from tests.support.placed import host_of

M, N, K = 8, 8, 16


class Tensor(CpuTensor):
    """A vector of two numbers."""

    shape = (2,)

    def stride(self) -> tuple[int, ...]:
        return (1,)


E4M3: Final = np.dtype(ml_dtypes.float8_e4m3fn)
KINDS: Final[Mapping[str, Any]] = {
    "none": None,
    "object": object(),
    "text": "wrong",
    "float": 1.5,
    "nan": math.nan,
    "true": True,
    "huge": 10**5000,
    "list": [1],
    "dict": {},
    "array": np.array([1 + 2j, 3]),
    "tensor": Tensor(),
}
SHOWN: Final[Mapping[str, str]] = {
    "none": "None",
    "object": "object",
    "text": "wrong|'w'",
    "float": "1.5",
    "nan": "nan",
    "true": "True|bool",
    "huge": "int",
    "list": r"\[1\]|is 1;",
    "dict": r"\{\}|\[\]",
    "array": r"1\.\+2\.j|complex128|shape \((2,)?\)",
    "tensor": r"Tensor|shape \(2,\)",
}
"""For each kind of wrong value, the pattern by which an error message must show it."""


@dataclass
class World:
    """Where the tested functions run: on NumPy arrays or on the pretended GPU.

    Attributes:
        lt: the package.
        place: function that copies a NumPy array to where the functions run.
        arrays: arrays that a refused call must not change.
    """

    lt: Any
    place: Callable[[Any], Any]
    gpu: FakeGpu | None = None
    arrays: list[Any] = field(default_factory=list)

    def ones(self, *shape: int, dtype: Any = np.float32) -> Any:
        values = np.ones(shape, dtype)
        array = self.place(values.view(np.uint8)).view(E4M3) if values.dtype == E4M3 else self.place(values)
        self.arrays.append(array)
        return array

    @property
    def device(self) -> str:
        return "cpu" if self.gpu is None else "cuda"

    def model(self) -> Any:
        model = self.lt.MLP([K, N], device=self.device)
        self.arrays += [array for each in model.parameters() for array in (each.data, each.grad)]
        return model

    def trained(self) -> tuple[Any, Any]:
        model = self.model()
        optimizer = self.lt.AdamW(model.parameters(), max_norm=1.0)
        self.arrays += [*(array for each in optimizer.moments for array in each), optimizer.steps, optimizer.grad_norm]
        return model, optimizer

    def context(self) -> Any:
        _, ctx = self.lt.linear_fwd(self.ones(M, K), self.ones(N, K), self.ones(N), activation="gelu")
        return ctx

    def gated(self) -> dict[str, Any]:
        """The operands of `gated_bwd`."""
        _, ctx = self.lt.gated_fwd(self.ones(M, 2 * N))
        return {"dy": self.ones(M, N), "ctx": ctx, "out": self.ones(M, 2 * N)}

    def values(self) -> list[bytes]:
        """Waits for all work; returns the contents of all arrays."""
        if self.gpu is None:
            return [each.tobytes() for each in self.arrays]
        self.gpu.streams.synchronize_all()
        return [host_of(self.gpu, each).tobytes() for each in self.arrays]


Call = tuple[Callable[..., Any], dict[str, Any]]


def operands(world: World, *shapes: tuple[int, ...], names: str) -> dict[str, Any]:
    return {name: world.ones(*shape) for name, shape in zip(names.split(), shapes, strict=True)}


def linear_fwd(world: World) -> Call:
    lt, shapes = world.lt, ((M, K), (N, K), (N,), (M, N), (M, N))
    arrays = operands(world, *shapes, names="x w bias out out_z")
    return lt.linear_fwd, {**arrays, "activation": "leaky_relu", "dropout": 0.5, "rng": lt.Philox()}


def linear_bwd(world: World) -> Call:
    lt, above = world.lt, world.context()
    _, below = lt.linear_fwd(world.ones(M, N), world.ones(K, N), world.ones(K), activation="gelu", out=above.x)
    shapes = ((M, N), (M, K), (N, K), (N,), (M, N), (K,))
    arrays = operands(world, *shapes, names="dy out_dx out_dw out_db out_dz out_db_below")
    return lt.linear_bwd, {**arrays, "ctx": above, "through": below}


def matmul(world: World) -> Call:
    arrays = operands(world, (M, K), (K, N), (M, N), (N,), (M, N), (M, N), names="a b c bias aux out")
    return world.lt.matmul, {**arrays, "epilogue": "gelu_aux_bias", "beta": 1.0}


def float8_matmul(world: World) -> Call:
    arrays = {"a": world.ones(16, 32, dtype=E4M3), "b": world.ones(16, 32, dtype=E4M3).T}
    arrays |= operands(world, (1,), (1,), (1,), (1,), names="scale_a scale_b scale_d amax_d")
    out = world.ones(16, 16, dtype=E4M3)
    return world.lt.matmul, {**arrays, "out": out, "dtype": "float8_e4m3fn", "fast_accumulation": True}


def fp8_update(world: World) -> Call:
    state = world.lt.FP8State()
    world.lt.linear_fwd(world.ones(16, 16), world.ones(16, 16), precision=state)
    world.arrays += [state.slots, state.history]
    return state.update, {"skipped": world.ones(1, dtype=np.uint32)}


def loss(name: str, *names: str, labels: Any = np.float32, **more: tuple[int, ...]) -> Callable[[World], Call]:
    def make(world: World) -> Call:
        target = world.ones(M, dtype=labels) if labels is np.int32 else world.ones(M, N)
        given = {names[0]: world.ones(M, N), names[1]: target}
        given |= {"out_gradient": world.ones(M, N), "out_loss": world.ones()}
        return getattr(world.lt, name), given | {each: world.ones(*shape) for each, shape in more.items()}

    return make


def norm_forward(name: str) -> Callable[[World], Call]:
    def make(world: World) -> Call:
        shapes = ((M, N), (N,), (M, N), (M, N), (M, N), (M,))
        given = operands(world, *shapes, names="x weight add out out_sum out_rstd")
        more = {"bias": world.ones(N), "out_mean": world.ones(M)} if name == "layer_norm_fwd" else {}
        return getattr(world.lt, name), given | more

    return make


def norm_backward(name: str) -> Callable[[World], Call]:
    def make(world: World) -> Call:
        bias = [world.ones(N)] if name == "layer_norm" else []
        _, ctx = getattr(world.lt, f"{name}_fwd")(world.ones(M, N), world.ones(N), *bias)
        given = operands(world, (M, N), (M, N), (M, N), (N,), names="dy add out_dx out_dweight")
        more = {"out_dbias": world.ones(N)} if bias else {}
        return getattr(world.lt, f"{name}_bwd"), given | more | {"ctx": ctx}

    return make


def raw(name: str, shapes: Mapping[str, tuple[int, ...]], **flags: bool) -> Callable[[World], Call]:
    def make(world: World) -> Call:
        addresses = {name: world.ones(*shape).data.ptr for name, shape in shapes.items()}
        sizes = {"m": M, "k": K, "n": N, "trans_a": False, "trans_b": False, "with_bias": True}
        return getattr(world.lt.raw, name), {**addresses, **sizes, **flags, "act": "gelu", "leaky_slope": 0.5}

    return make


def parameter(world: World) -> Call:
    def make(**fields: Any) -> Any:
        return world.lt.AdamW([world.lt.Parameter(**fields)])

    half = world.ones(4, dtype=np.float16)
    return make, {"data": half, "grad": world.ones(4), "master": world.ones(4), "name": "p"}


def assigned(world: World) -> Call:
    half = world.ones(4, dtype=np.float16)
    return world.lt.Parameter(half, world.ones(4), world.ones(4), name="p").assign, {"values": np.zeros(4)}


def model_forward(world: World) -> Call:
    model = world.model()
    model.layers[0].dropout = 0.5
    return model.forward, {"x": world.ones(M, K), "step": 1}


def model_backward(world: World) -> Call:
    model = world.model()
    _, contexts = model.forward(world.ones(M, K))
    return model.backward, {"dy": world.ones(M, N), "contexts": contexts}


def averages(world: World) -> Any:
    ema = world.lt.EMA(world.model())
    world.arrays += ema.averages.values()
    return ema


def setter(target: Any) -> Callable[..., None]:
    """Returns a function that sets attributes of `target`."""

    def put(**attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(target, name, value)

    return put


def batch(world: World) -> dict[str, Any]:
    return {"x": world.ones(M, K), "target": world.ones(M, dtype=np.int32)}


def with_trained(name: str, **more: Any) -> Callable[[World], Call]:
    names = ("model", "optimizer")
    return lambda world: (getattr(world.lt, name), dict(zip(names, world.trained(), strict=True)) | more)


def plain(path: str, /, **arguments: Any) -> Callable[[World], Call]:
    """Makes valid calls of a function that takes no arrays."""

    def make(world: World) -> Call:
        found = world.lt
        for name in path.split("."):
            found = getattr(found, name)
        return found, dict(arguments)

    return make


LAYERS: Final = {"dims": [K, N, N], "rows": M, "activation": "relu"}
FORWARD_RAW: Final = {"A": (M, K), "B": (K, N), "bias": (N,), "Y": (M, N), "Z": (M, N)}
BACKWARD_RAW: Final = {
    "A": (M, K),
    "B": (K, N),
    "C": (M, N),
    "gY": (M, N),
    "Z": (M, N),
    "gA": (M, K),
    "gB": (K, N),
    "gC": (M, N),
    "gBias": (N,),
}

SOUND: Final[Mapping[str, Callable[[World], Call]]] = {
    "linear_fwd": linear_fwd,
    "linear": lambda w: (
        w.lt.linear,
        operands(w, (M, K), (N, K), (N,), (M, N), names="x w bias out") | {"activation": "leaky_relu"},
    ),
    "linear_bwd": linear_bwd,
    "matmul": matmul,
    "matmul of float8": float8_matmul,
    "matmul of operand sums": lambda w: (
        w.lt.matmul,
        operands(w, (M, K), (K, N), (N,), names="a b bias_gradient") | {"epilogue": "bgradb"},
    ),
    "mse_loss": loss("mse_loss", "prediction", "target"),
    "huber_loss": loss("huber_loss", "prediction", "target"),
    "bce_with_logits": loss("bce_with_logits", "logits", "targets", pos_weight=(N,)),
    "cross_entropy": loss("cross_entropy", "logits", "labels", labels=np.int32),
    "layer_norm_fwd": norm_forward("layer_norm_fwd"),
    "rms_norm_fwd": norm_forward("rms_norm_fwd"),
    "layer_norm_bwd": norm_backward("layer_norm"),
    "rms_norm_bwd": norm_backward("rms_norm"),
    "cast_fp8": lambda w: (
        w.lt.cast_fp8,
        operands(w, (M, N), (), (), names="x scale amax")
        | {name: w.ones(*shape, dtype=float8_e4m3fn) for name, shape in (("out", (M, N)), ("out_transposed", (N, M)))},
    ),
    "cast_fp8_rows": lambda w: (
        w.lt.cast_fp8_rows,
        operands(w, (M, N), (M,), (N,), names="x out_scales out_transposed_scales")
        | {name: w.ones(*shape, dtype=float8_e4m3fn) for name, shape in (("out", (M, N)), ("out_transposed", (N, M)))},
    ),
    "add": lambda w: (w.lt.add, operands(w, (M, N), (M, N), (M, N), names="a b out")),
    "dropout": lambda w: (w.lt.dropout, {"x": w.ones(M, N), "p": 0.5, "rng": w.lt.Philox(), "out": w.ones(M, N)}),
    "gated_fwd": lambda w: (
        w.lt.gated_fwd,
        operands(w, (M, 2 * N), (M, N), names="h out")
        | {"activation": "leaky_relu", "dropout": 0.5, "rng": w.lt.Philox()},
    ),
    "gated_bwd": lambda w: (w.lt.gated_bwd, w.gated()),
    "bind": lambda w: (w.lt.bind, {"operation": w.lt.linear, **operands(w, (M, K), (N, K), (M, N), names="x w out")}),
    "contiguous": plain("contiguous"),
    "Parameter": parameter,
    "Parameter.assign": assigned,
    "Parameter.renew_copies": lambda w: (w.model().parameters()[0].renew_copies, {}),
    "Parameter set": lambda w: (setter(w.model().parameters()[0]), {}),
    "AdamW": lambda w: (w.lt.AdamW, {"parameters": w.model().parameters()}),
    "AdamW set": lambda w: (setter(w.trained()[1]), {}),
    "Optimizer": lambda w: (w.lt.Optimizer, {"groups": [(w.model().parameters(), w.lt.rules.SGD())]}),
    "Optimizer.apply_settings": lambda w: (w.trained()[1].apply_settings, {}),
    "Optimizer.check_arrays": lambda w: (w.trained()[1].check_arrays, {}),
    "Optimizer.step": lambda w: (w.trained()[1].step, {}),
    "Optimizer.state_dict": lambda w: (w.trained()[1].state_dict, {}),
    "MLP": lambda w: (w.lt.MLP, {"dims": [K, N, N], "device": w.device, "dtype": "bfloat16"}),
    "Block.parameters": lambda w: (w.model().parameters, {}),
    "Block.state_dict": lambda w: (w.model().state_dict, {}),
    "Block.load_state_dict": lambda w: ((model := w.model()).load_state_dict, {"state": model.state_dict()}),
    "Linear": lambda w: (w.lt.Linear, {"inputs": K, "outputs": N, "device": w.device}),
    "LayerNorm": lambda w: (w.lt.LayerNorm, {"width": N, "device": w.device, "dtype": "bfloat16"}),
    "RMSNorm": lambda w: (w.lt.RMSNorm, {"width": N, "device": w.device, "dtype": "bfloat16"}),
    "Gated": lambda w: (w.lt.Gated, {"width": N, "hidden": K, "device": w.device}),
    "Dropout": plain("Dropout", p=0.5),
    "Residual": lambda w: (w.lt.Residual, {"block": w.lt.LayerNorm(N, device=w.device)}),
    "Pass": plain("Pass"),
    "MLP.__call__": lambda w: (w.model(), {"x": w.ones(M, K)}),
    "MLP.forward": model_forward,
    "MLP.backward": model_backward,
    "TrainStep": with_trained("TrainStep"),
    "TrainStep.__call__": lambda w: (w.lt.TrainStep(*w.trained()), batch(w)),
    "TrainStep.__call__ in parts": lambda w: (w.lt.TrainStep(*w.trained(), accumulate=2), batch(w)),
    "TrainStep.evaluate": lambda w: (
        w.lt.TrainStep(*w.trained()).evaluate,
        {"batches": [(w.ones(M, K), w.ones(M, dtype=np.int32))]},
    ),
    "TrainStep.metrics": lambda w: (w.lt.TrainStep(*w.trained()).metrics, {}),
    "group": plain("group"),
    "EMA": lambda w: (w.lt.EMA, {"model": w.model()}),
    "EMA.update": lambda w: (averages(w).update, {}),
    "EMA.copy_to": lambda w: (averages(w).copy_to, {}),
    "EMA.check_arrays": lambda w: (averages(w).check_arrays, {}),
    "evaluate": lambda w: (w.lt.evaluate, {"model": w.model(), "batches": [(w.ones(M, K), w.ones(M, dtype=np.int32))]}),
    "save_checkpoint": with_trained("save_checkpoint", path="/nowhere/at/all"),
    "load_checkpoint": with_trained("load_checkpoint", path="/nowhere/at/all"),
    "save_model": lambda w: (w.lt.save_model, {"path": "/nowhere/at/all", "model": w.model()}),
    "load_model": plain("load_model", path="/nowhere/at/all"),
    "save": lambda w: (w.lt.save, {"path": "/nowhere/at/all", "model": w.model()}),
    "load": lambda w: (w.lt.load, {"path": "/nowhere/at/all", "model": w.model()}),
    "share": lambda w: (w.lt.share, {"batches": [], "group": w.lt.group(), "batch_size": 2}),
    "prefetch": lambda w: (w.lt.prefetch, {"iterable": [], "device": w.device}),
    "tune": plain("tune", **LAYERS),
    "explain": plain("explain", **LAYERS),
    "tuning": plain("tuning"),
    "Activation": plain("Activation", name="leaky_relu"),
    "Activation.of": plain("Activation.of", activation="leaky_relu"),
    "Epilogue": plain("Epilogue"),
    "Philox": plain("Philox"),
    "Schedule": plain("Schedule", decay="linear", total_steps=5),
    "FP8": plain("FP8"),
    "FP8State": plain("FP8State"),
    "FP8State.state_dict": lambda w: (w.lt.FP8State().state_dict, {}),
    "FP8State.update": fp8_update,
    "GradScaler": plain("GradScaler"),
    "schedules.constant": plain("schedules.constant"),
    "schedules.warmup": plain("schedules.warmup"),
    "schedules.warmup_linear": plain("schedules.warmup_linear", warmup_steps=1, total_steps=5),
    "schedules.warmup_cosine": plain("schedules.warmup_cosine", warmup_steps=1, total_steps=5),
    "raw.forward_raw": raw("forward_raw", FORWARD_RAW, save_z=True),
    "raw.backward_raw": raw("backward_raw", BACKWARD_RAW),
}
GPU_ONLY: Final = ("tune", "explain", "raw.forward_raw", "raw.backward_raw")

ACCEPTED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("dropout", "rng", "share", "final_factor", "rows", "backoff_factor"), ""),
    **dict.fromkeys(("loss_options", "names"), "none dict"),
    **dict.fromkeys(("trans_a", "trans_b", "with_bias", "save_z"), "true"),
    "grad_scale": "none float nan",
    "path": "text",
    "leaky_slope": "float",
    "max_norm": "none float",
    "input_gradient": "none true",
    "tune": "none true",
}
"""Kinds that parameters accept, by the parameter's name."""
ACCEPTED_BY: Final[Mapping[str, Mapping[str, str]]] = {
    "matmul": {"alpha": "float nan", "beta": "none float nan", "bias": "", "aux": "", "bias_gradient": "none array"},
    "matmul of operand sums": {"bias_gradient": ""},
    "matmul of float8": {"alpha": "float nan", "fast_accumulation": "true"},
    "cross_entropy": {"label_smoothing": "", "ignore_index": "none"},
    "contiguous": {"array": "array tensor"},
    "Parameter": {"name": "text", "weight_decay": "none float"},
    "Parameter set": {"name": "text", "lr_scale": "float", "weight_decay": "none float"},
    "AdamW set": {"lr": "float", "weight_decay": "float", "schedule": "none"},
    "MLP.forward": {"step": ""},
    **{name: {"seed": "none"} for name in ("Linear", "Gated", "Dropout")},
    "Pass": {"step": "array tensor", "frozen": "list dict", "inputs": "text list"},
    "TrainStep": {"batch_size": "none huge", "accumulate": "huge"},
    "TrainStep.__call__ in parts": {"x": "", "target": ""},
    "EMA": {"decay": ""},
    "load_model": {"precision": "none"},
    "evaluate": {"batches": "dict"},
    "TrainStep.evaluate": {"batches": "dict"},
    "prefetch": {"iterable": "text list dict array"},
    "share": {"batches": "text list dict array"},
    "Epilogue": {"value": "huge array"},
    "Philox": {"step": "array tensor"},
}
"""Kinds that parameters accept, by function. If the function's name has a space, only these parameters are tried."""
SHOWN_AS: Final[Mapping[str, Mapping[str, str]]] = {
    "dropout": {"p": "dropout probability"},
    "MLP": {"dtype": "the model"},
    "Linear": {"dtype": "the layer"},
    "Gated": {"dtype": "the layer"},
    "LayerNorm": {"dtype": "the norm"},
    "RMSNorm": {"dtype": "the norm"},
    "MLP.forward": {"micro_batch": "micro_batch|layer"},
    "MLP.backward": {"contexts": "contexts|ctx"},
    "TrainStep.__call__": {"target": "target|labels"},
    "TrainStep.__call__ in parts": {"target": "target|labels"},
    "tune": {"dtype": "the chain"},
    "explain": {"dtype": "the chain"},
    "Activation": {"name": "activation"},
    "Epilogue": {"value": "epilogue"},
    "raw.forward_raw": {"leaky_slope": "leaky_slope|negative_slope"},
    "raw.backward_raw": {"leaky_slope": "leaky_slope|negative_slope"},
}
"""Names that errors use for a parameter, where they differ from its own."""

OF_BLOCKS: Final = ("parameters", "state_dict", "load_state_dict")
"""The methods of blocks that users call."""
OF_GROUPS: Final = ("abort", "agree", "barrier", "close", "engine", "from_first", "gather", "patience", "sum")
ELSEWHERE: Final = {
    "cublaslt": "bindings, which have checks and tests of their own",
    "errors": "exceptions",
    "ACTIVATIONS": "a tuple",
    "CaptureReport": "what check_capture returns",
    "check_capture": "tests/cpu/profiling/test_capture_check.py has what it refuses",
    "GradScaler.bind": "called by an optimizer alone",
    "FP8State.load_state_dict": "tests/cpu/test_fake_gpu_fp8_layers.py has what it refuses",
    **dict.fromkeys(("Epoch", "GatedContext", "LinearContext", "Loss", "Metrics", "NormContext"), "classes of results"),
    **dict.fromkeys(("Prefetcher", "Prefetcher.close"), "the class of what prefetch returns"),
    **dict.fromkeys(("Group", *(f"Group.{name}" for name in OF_GROUPS)), "the class of what group returns"),
    **dict.fromkeys(("Block", "Chain", "Parallel"), "tests/cpu/nn/test_blocks.py has what they refuse"),
    **dict.fromkeys(("SwiGLU", "GEGLU", "ReGLU"), "Gated with another default"),
    **dict.fromkeys(("Optimizer.keep", "Optimizer.whole_state"), "called by a step, and by functions for files"),
    "Optimizer.load_state_dict": "tests/cpu/ops/optimizers/test_rules.py has what it refuses",
    **dict.fromkeys(("schedules.table", "schedules.from_function"), "tests/cpu/ops/optimizers/test_rules.py, as above"),
    "fit": "tests/cpu/training/test_fit.py has what it refuses",
    "profile": "tests/cpu/profiling/test_profile_on_host.py has what it refuses",
    "range": "tests/cpu/test_ranges.py has what it refuses",
}


def public(lt: ModuleType) -> Iterator[tuple[str, Any]]:
    """Every public function, class and method."""
    named = [(name, getattr(lt, name)) for name in lt.__all__]
    for module in ("raw", "schedules"):
        for name, value in vars(getattr(lt, module)).items():
            is_own = getattr(value, "__module__", None) == f"lt_runtime.{module}"
            if not name.startswith("_") and is_own and not inspect.isclass(value) and callable(value):
                named.append((f"{module}.{name}", value))
    for name, value in named:
        if inspect.ismodule(value):
            continue
        yield name, value
        if inspect.isclass(value) and not issubclass(value, lt.Epilogue):
            for method, function in vars(value).items():
                is_public = not method.startswith("_") or method == "__call__"
                is_known = value is lt.Block if method in OF_BLOCKS else value is lt.MLP and method != "parts"
                if issubclass(value, lt.Block | lt.Pass) and not is_known:
                    continue  # methods that blocks call on each other are tested in tests/cpu/nn/test_blocks.py
                if is_public and (inspect.isfunction(function) or isinstance(function, classmethod)):
                    yield f"{name}.{method}", getattr(value, method)


def accepted_of(name: str) -> dict[str, str]:
    """The kinds that each parameter of a function accepts."""
    special = ACCEPTED_BY.get(name, {})
    if " " in name or name == "Epilogue":  # an enum has no signature from which the kinds could be read
        return dict(special)
    found = {}
    for each, parameter in inspect.signature(PUBLIC[name]).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and each != "self":
            by_default = {type(None): "none", bool: "true", float: "float"}.get(type(parameter.default), "")
            found[each] = special.get(each, ACCEPTED.get(each, by_default))
    return found


PUBLIC: Final = {name: value for name, value in public(lt_runtime) if name not in ELSEWHERE}
CASES: Final = [(name, parameter) for name in SOUND for parameter in accepted_of(name)]


def test_every_function_has_an_entry() -> None:
    assert PUBLIC.keys() == {name for name in SOUND if " " not in name}


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    nn = SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, nn=nn))


@pytest.mark.usefixtures("_torch")
@pytest.mark.parametrize(("name", "parameter"), [case for case in CASES if case[0] not in GPU_ONLY])
def test_on_numpy_arrays(name: str, parameter: str) -> None:
    _check(World(lt_runtime, lambda array: array), name, parameter)


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_on_the_pretended_gpu(gpu: FakeGpu, name: str, parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.torch, "Tensor", Tensor)
    _check(World(gpu.lt, gpu.cp.asarray, gpu), name, parameter)


def _check(world: World, name: str, parameter: str) -> None:
    function, sound = SOUND[name](world)
    accepted, shown_as = accepted_of(name)[parameter].split(), SHOWN_AS.get(name, {}).get(parameter, parameter)
    before, complaints = world.values(), []
    for kind, value in {**KINDS, "array": world.place(KINDS["array"])}.items():
        if kind in accepted:
            continue
        complaint = _complaint(world, function, {**sound, parameter: value}, shown_as, kind)
        if complaint:
            complaints.append(f"{kind}: {complaint}")
        if world.values() != before:
            complaints.append(f"{kind}: something was written")
            break
    assert not complaints, "\n".join(complaints)


def _complaint(world: World, function: Any, arguments: dict[str, Any], shown_as: str, kind: str) -> str | None:
    """Calls a function with a wrong argument; returns a message unless the function refuses it with a clear error."""
    positional = [arguments.pop("operation")] if "operation" in arguments else []
    try:
        made = function(*positional, **arguments)
    except world.lt.errors.LtError as error:
        if not isinstance(error, (TypeError, ValueError)):
            return f"{type(error).__name__} is neither a TypeError nor a ValueError: {error}"
        if not _says(rf"(?<!\w)({shown_as})(?!\w)", error):
            return f"does not name {shown_as}: {error}"
        return None if _says(SHOWN[kind], error) else f"does not show the value: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    with contextlib.suppress(AttributeError):
        made.close()
    return "accepted"


def _says(pattern: str, error: Exception) -> bool:
    return re.search(pattern, str(error)) is not None
