"""Every parameter of the public interface is given every wrong kind of value, on NumPy and on the pretended GPU.

`ROWS` states for each function which kinds each of its parameters accepts. A function or a parameter without an entry
fails.
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

import numpy as np
import pytest

import lt_runtime
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

M, N, K = 8, 8, 16


class Tensor:
    """A tensor of PyTorch's on the CPU."""

    is_cuda, device, shape, dtype = False, "cpu", (2,), "torch.float32"

    def data_ptr(self) -> int:
        return 1 << 40  # of memory that nobody owns

    def get_device(self) -> int:
        return -1

    def stride(self) -> tuple[int, ...]:
        return (1,)


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
"""What a message must say of a value of each kind."""


@dataclass
class World:
    """Where the functions run.

    Attributes:
        lt: the package.
        place: puts a NumPy array there.
        arrays: those that no refused call may change.
    """

    lt: Any
    place: Callable[[Any], Any]
    gpu: FakeGpu | None = None
    arrays: list[Any] = field(default_factory=list)

    def ones(self, *shape: int, dtype: Any = np.float32) -> Any:
        array = self.place(np.ones(shape, dtype))
        self.arrays.append(array)
        return array

    def model(self) -> Any:
        model = self.lt.MLP([K, N], device="cpu" if self.gpu is None else "cuda")
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

    def values(self) -> list[bytes]:
        """The contents of all arrays, once everything is done."""
        if self.gpu is None:
            return [each.tobytes() for each in self.arrays]
        self.gpu.streams.synchronize_all()
        return [host_of(self.gpu, each).tobytes() for each in self.arrays]


Call = tuple[Callable[..., Any], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A function of the interface.

    Attributes:
        make: gives it with sound arguments.
        accepts: the kinds that each parameter accepts.
        aliases: what errors call a parameter, if not by its name.
        gpu_only: whether it needs a GPU.
    """

    make: Callable[[World], Call]
    accepts: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    gpu_only: bool = False


def linear_fwd(world: World) -> Call:
    lt, ones = world.lt, world.ones
    operands = {"x": ones(M, K), "w": ones(N, K), "bias": ones(N), "out": ones(M, N), "out_z": ones(M, N)}
    return lt.linear_fwd, {**operands, "activation": "leaky_relu", "dropout": 0.5, "rng": lt.Philox()}


def linear(world: World) -> Call:
    ones = world.ones
    operands = {"x": ones(M, K), "w": ones(N, K), "bias": ones(N), "out": ones(M, N)}
    return world.lt.linear, {**operands, "activation": "leaky_relu"}


def linear_bwd(world: World) -> Call:
    lt, ones, above = world.lt, world.ones, world.context()
    _, below = lt.linear_fwd(ones(M, N), ones(K, N), ones(K), activation="gelu", out=above.x)
    outputs = {"out_dx": ones(M, K), "out_dw": ones(N, K), "out_db": ones(N), "out_dz": ones(M, N)}
    return lt.linear_bwd, {"dy": ones(M, N), "ctx": above, "through": below, **outputs, "out_db_below": ones(K)}


def matmul(world: World) -> Call:
    ones = world.ones
    options = {"epilogue": "gelu_aux_bias", "bias": ones(N), "aux": ones(M, N), "out": ones(M, N), "beta": 1.0}
    return world.lt.matmul, {"a": ones(M, K), "b": ones(K, N), "c": ones(M, N), **options}


def operand_sums(world: World) -> Call:
    ones = world.ones
    return world.lt.matmul, {"a": ones(M, K), "b": ones(K, N), "epilogue": "bgradb", "bias_gradient": ones(N)}


def mse_loss(world: World) -> Call:
    ones = world.ones
    buffers = {"out_gradient": ones(M, N), "out_loss": ones()}
    return world.lt.mse_loss, {"prediction": ones(M, N), "target": ones(M, N), **buffers}


def cross_entropy(world: World) -> Call:
    ones = world.ones
    buffers = {"out_gradient": ones(M, N), "out_loss": ones()}
    return world.lt.cross_entropy, {"logits": ones(M, N), "labels": ones(M, dtype=np.int32), **buffers}


def huber_loss(world: World) -> Call:
    return world.lt.huber_loss, mse_loss(world)[1]


def bce_with_logits(world: World) -> Call:
    ones = world.ones
    operands = {"logits": ones(M, N), "targets": ones(M, N), "pos_weight": ones(N)}
    return world.lt.bce_with_logits, {**operands, "out_gradient": ones(M, N), "out_loss": ones()}


def dropout(world: World) -> Call:
    return world.lt.dropout, {"x": world.ones(M, N), "p": 0.5, "rng": world.lt.Philox(), "out": world.ones(M, N)}


def forward_raw(world: World) -> Call:
    arrays = {"A": (M, K), "B": (K, N), "bias": (N,), "Y": (M, N), "Z": (M, N)}
    addresses = {name: world.ones(*shape).data.ptr for name, shape in arrays.items()}
    flags = {"trans_a": False, "trans_b": False, "with_bias": True, "save_z": True}
    return world.lt.raw.forward_raw, {**addresses, "m": M, "k": K, "n": N, **flags, "act": "gelu", "leaky_slope": 0.5}


def backward_raw(world: World) -> Call:
    arrays = {"A": (M, K), "B": (K, N), "C": (M, N), "gY": (M, N), "Z": (M, N), "gA": (M, K), "gB": (K, N)}
    arrays |= {"gC": (M, N), "gBias": (N,)}
    addresses = {name: world.ones(*shape).data.ptr for name, shape in arrays.items()}
    flags = {"trans_a": False, "trans_b": False, "with_bias": True}
    return world.lt.raw.backward_raw, {**addresses, "m": M, "k": K, "n": N, **flags, "act": "gelu", "leaky_slope": 0.5}


def bound(world: World) -> Call:
    buffers = {"x": world.ones(M, K), "w": world.ones(N, K), "out": world.ones(M, N)}
    return world.lt.bind, {"operation": world.lt.linear, **buffers}


def parameter(world: World) -> Call:
    data, grad, master = (world.ones(4, dtype=np.float16), world.ones(4), world.ones(4))

    def make(**fields: Any) -> Any:
        return world.lt.AdamW([world.lt.Parameter(**fields)])

    return make, {"data": data, "grad": grad, "master": master, "name": "p"}


def assigned(world: World) -> Call:
    tensor = world.lt.Parameter(world.ones(4, dtype=np.float16), world.ones(4), world.ones(4), name="p")
    return tensor.assign, {"values": np.zeros(4)}


def loaded_state(world: World) -> Call:
    model = world.model()
    return model.load_state_dict, {"state": model.state_dict()}


def model(world: World) -> Call:
    device = "cpu" if world.gpu is None else "cuda"
    return world.lt.MLP, {"dims": [K, N, N], "device": device, "dtype": "bfloat16"}


def model_forward(world: World) -> Call:
    model = world.model()
    model.layers[0].dropout = 0.5
    return model.forward, {"x": world.ones(M, K), "step": 1}


def model_backward(world: World) -> Call:
    model = world.model()
    _, contexts = model.forward(world.ones(M, K))
    return model.backward, {"dy": world.ones(M, N), "contexts": contexts}


def evaluation(world: World) -> Call:
    batches = [(world.ones(M, K), world.ones(M, dtype=np.int32))]
    return world.lt.evaluate, {"model": world.model(), "batches": batches}


def train_step(world: World) -> Call:
    model, optimizer = world.trained()
    return world.lt.TrainStep, {"model": model, "optimizer": optimizer}


def made_step(world: World, **options: Any) -> Any:
    return world.lt.TrainStep(*world.trained(), **options)


def averages(world: World) -> Any:
    ema = world.lt.EMA(world.model())
    world.arrays += ema.averages.values()
    return ema


def setter(target: Any) -> Callable[..., None]:
    """Sets attributes."""

    def put(**attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(target, name, value)

    return put


def one_step(world: World) -> Call:
    return made_step(world), {"x": world.ones(M, K), "target": world.ones(M, dtype=np.int32)}


def one_step_in_parts(world: World) -> Call:
    return made_step(world, accumulate=2), {"x": world.ones(M, K), "target": world.ones(M, dtype=np.int32)}


def checkpoint(name: str) -> Callable[[World], Call]:
    def make(world: World) -> Call:
        model, optimizer = world.trained()
        return getattr(world.lt, name), {"path": "/nowhere/at/all", "model": model, "optimizer": optimizer}

    return make


def tuning(world: World) -> Call:
    def enter(effort: Any) -> None:
        with world.lt.tuning(effort):
            raise AssertionError("there is no such effort")

    return enter, {"effort": "default"}


def asked_of(name: str) -> Callable[[World], Call]:
    return lambda world: (getattr(world.lt, name), {"dims": [K, N, N], "rows": M, "activation": "relu"})


def plain(path: str, **arguments: Any) -> Callable[[World], Call]:
    """A function that needs no arrays."""

    def make(world: World) -> Call:
        found = world.lt
        for name in path.split("."):
            found = getattr(found, name)
        return found, dict(arguments)

    return make


STREAM = "none"
OPTIONS = {"activation": "", "negative_slope": "float", "compute": "", "propagate_nan": "true"}
FLAG, NUMBER = "true", "float"
LAYERS = {
    "dims": "", "rows": "", "activation": "none", "output_activation": "none", "dtype": "", "compute": "",
    "dropout": "", "bias": FLAG, "input_gradient": "none true",
}  # fmt: skip
LAYER_ALIASES = {"dtype": "the chain"}
RAW = {
    **dict.fromkeys(("m", "k", "n", "act"), ""), **dict.fromkeys(("trans_a", "trans_b", "with_bias"), FLAG),
    "leaky_slope": NUMBER, "stream": STREAM,
}  # fmt: skip
CHECKPOINT = {"path": "text", "model": "", "optimizer": ""}
LOSS = {
    "row_weights": "none",
    "grad_scale": "none float nan",
    "share": "",
    "out_gradient": "none",
    "out_loss": "none",
    "stream": STREAM,
}

ROWS: Final[Mapping[str, Row]] = {
    "linear_fwd": Row(
        linear_fwd,
        {"x": "", "w": "", "bias": "none", **OPTIONS, "dropout": "", "rng": "", "out": "none", "out_z": "none"}
        | {"stream": STREAM},
    ),
    "linear": Row(linear, {"x": "", "w": "", "bias": "none", **OPTIONS, "out": "none", "stream": STREAM}),
    "linear_bwd": Row(
        linear_bwd,
        {"dy": "", "ctx": "", "through": "none", "stream": STREAM}
        | dict.fromkeys(("need_dx", "need_dw", "need_db", "need_db_below", "before_activation", "require_same"), FLAG)
        | {"accumulate": FLAG}
        | dict.fromkeys(("out_dx", "out_dw", "out_db", "out_dz", "out_db_below"), "none"),
    ),
    "matmul": Row(
        matmul,
        {"a": "", "b": "", "c": "none", "alpha": "float nan", "beta": "none float nan", "epilogue": "", "bias": ""}
        | {"aux": "", "dtype": "none", "compute": "", "out": "none", "stream": STREAM, "bias_gradient": "none array"},
    ),
    "matmul of operand sums": Row(operand_sums, {"bias_gradient": ""}),
    "mse_loss": Row(mse_loss, {"prediction": "", "target": "", **LOSS}),
    "huber_loss": Row(huber_loss, {"prediction": "", "target": "", "delta": "float", **LOSS}),
    "bce_with_logits": Row(bce_with_logits, {"logits": "", "targets": "", "pos_weight": "none", **LOSS}),
    "cross_entropy": Row(
        cross_entropy,
        {"logits": "", "labels": "", **LOSS, "label_smoothing": "", "ignore_index": "none", "class_weights": "none"},
    ),
    "dropout": Row(
        dropout, {"x": "", "p": "", "rng": "", "out": "none", "stream": STREAM}, {"p": "dropout probability"}
    ),
    "bind": Row(bound, {"operation": "", "stream": STREAM}),
    "contiguous": Row(plain("contiguous"), {"array": "array tensor"}),
    "Parameter": Row(
        parameter,
        {"data": "", "grad": "", "master": "none", "name": "text", "lr_scale": "float", "weight_decay": "none float"},
    ),
    "Parameter.assign": Row(assigned, {"values": ""}),
    "AdamW": Row(
        lambda world: (world.lt.AdamW, {"parameters": world.model().parameters()}),
        {"parameters": "", "lr": NUMBER, "betas": "", "eps": NUMBER, "weight_decay": NUMBER, "schedule": "none"}
        | {"amsgrad": FLAG, "max_norm": "none float", "skip_nonfinite": FLAG, "scaler": "none", "moments": ""}
        | {"stochastic_rounding": FLAG, "seed": ""},
    ),
    "AdamW set": Row(
        lambda world: (setter(world.trained()[1]), {}),
        {"lr": NUMBER, "weight_decay": NUMBER, "schedule": "none"},
    ),
    "Parameter set": Row(
        lambda world: (setter(world.model().parameters()[0]), {}),
        {"name": "text", "lr_scale": "float", "weight_decay": "none float"},
    ),
    "AdamW.apply_settings": Row(lambda world: (world.trained()[1].apply_settings, {}), {"stream": STREAM}),
    "AdamW.check_arrays": Row(lambda world: (world.trained()[1].check_arrays, {}), {}),
    "AdamW.step": Row(lambda world: (world.trained()[1].step, {}), {"stream": STREAM}),
    "MLP": Row(
        model,
        {"dims": "", "activation": "", "dtype": "", "dropout": "", "seed": "", "device": "", "compute": ""}
        | {"master_weights": FLAG, "bias": FLAG, "output_activation": "none"},
        {"dtype": "the model"},
    ),
    "MLP.parameters": Row(lambda world: (world.model().parameters, {}), {}),
    "MLP.state_dict": Row(lambda world: (world.model().state_dict, {}), {"names": "none dict"}),
    "MLP.load_state_dict": Row(loaded_state, {"state": "", "strict": FLAG, "names": "none dict"}),
    "MLP.__call__": Row(lambda world: (world.model(), {"x": world.ones(M, K)}), {"x": "", "stream": STREAM}),
    "MLP.forward": Row(
        model_forward,
        {"x": "", "step": "", "micro_batch": "", "copy_step": FLAG, "stream": STREAM},
        {"micro_batch": "micro_batch|layer"},
    ),
    "MLP.backward": Row(
        model_backward,
        {"dy": "", "contexts": "", "accumulate": FLAG, "need_dx": FLAG, "stream": STREAM},
        {"contexts": "contexts|ctx"},
    ),
    "TrainStep": Row(
        train_step,
        {"model": "", "optimizer": "", "loss": "", "loss_options": "none dict", "batch_size": "none huge"}
        | {"graph": FLAG, "accumulate": "huge", "ema": "none", "tune": f"none {FLAG}"},
    ),
    "EMA": Row(lambda world: (world.lt.EMA, {"model": world.model()}), {"model": "", "decay": ""}),
    "EMA.update": Row(lambda world: (averages(world).update, {}), {"stream": STREAM}),
    "EMA.copy_to": Row(lambda world: (averages(world).copy_to, {}), {"model": ""}),
    "EMA.check_arrays": Row(lambda world: (averages(world).check_arrays, {}), {}),
    "TrainStep.__call__": Row(
        one_step, {"x": "", "target": "", "row_weights": "none", "stream": STREAM}, {"target": "target|labels"}
    ),
    "TrainStep.__call__ in parts": Row(one_step_in_parts, {"x": "", "target": ""}, {"target": "target|labels"}),
    "TrainStep.metrics": Row(lambda world: (made_step(world).metrics, {}), {"stream": STREAM}),
    "evaluate": Row(
        evaluation, {"model": "", "batches": "dict", "loss": "", "loss_options": "none dict", "stream": STREAM}
    ),
    "save_checkpoint": Row(checkpoint("save_checkpoint"), CHECKPOINT),
    "load_checkpoint": Row(checkpoint("load_checkpoint"), {**CHECKPOINT, "optimizer": "none", "changed": ""}),
    "save_model": Row(
        lambda world: (world.lt.save_model, {"path": "/nowhere/at/all", "model": world.model()}),
        {"path": "text", "model": ""},
    ),
    "load_model": Row(lambda world: (world.lt.load_model, {"path": "/nowhere/at/all"}), {"path": "text", "device": ""}),
    "prefetch": Row(
        lambda world: (world.lt.prefetch, {"iterable": [], "device": "cpu" if world.gpu is None else "cuda"}),
        {"iterable": "text list dict array", "depth": "", "device": "", "stream": STREAM},
    ),
    "tune": Row(
        asked_of("tune"), {**LAYERS, "effort": "", "device": "none", "progress": FLAG}, LAYER_ALIASES, gpu_only=True
    ),
    "explain": Row(asked_of("explain"), {**LAYERS, "device": "none"}, LAYER_ALIASES, gpu_only=True),
    "tuning": Row(tuning, {"effort": ""}),
    "Activation": Row(
        plain("Activation", name="leaky_relu"), {"name": "", "negative_slope": NUMBER}, {"name": "activation"}
    ),
    "Activation.of": Row(plain("Activation.of", activation="leaky_relu"), {"activation": "", "negative_slope": NUMBER}),
    "Epilogue": Row(plain("Epilogue"), {"value": "huge array"}, {"value": "epilogue"}),
    "Philox": Row(plain("Philox"), {"seed": "", "layer": "", "step": "array tensor"}),
    "Schedule": Row(
        plain("Schedule", decay="linear", total_steps=5),
        {"decay": "", "warmup_steps": "", "total_steps": "", "final_factor": ""},
    ),
    "GradScaler": Row(
        plain("GradScaler"),
        {"init_scale": NUMBER, "growth_factor": NUMBER, "backoff_factor": "", "growth_interval": ""},
    ),
    "schedules.constant": Row(plain("schedules.constant"), {}),
    "schedules.warmup": Row(plain("schedules.warmup"), {"warmup_steps": ""}),
    **{
        f"schedules.{name}": Row(
            plain(f"schedules.{name}", warmup_steps=1, total_steps=5),
            {"warmup_steps": "", "total_steps": "", "final_factor": ""},
        )
        for name in ("warmup_linear", "warmup_cosine")
    },
    "raw.forward_raw": Row(
        forward_raw,
        {**RAW, "save_z": FLAG, **dict.fromkeys(("A", "B", "bias", "Y", "Z"), "")},
        {"leaky_slope": "leaky_slope|negative_slope"},
        gpu_only=True,
    ),
    "raw.backward_raw": Row(
        backward_raw,
        {**RAW, **dict.fromkeys(("A", "B", "C", "gY", "Z", "gA", "gB", "gC", "gBias"), "")},
        {"leaky_slope": "leaky_slope|negative_slope"},
        gpu_only=True,
    ),
}

ELSEWHERE: Final = {
    "cublaslt": "bindings, which have checks and tests of their own",
    "errors": "exceptions",
    "ACTIVATIONS": "a tuple",
    "CaptureReport": "what check_capture returns",
    "check_capture": "tests/cpu/profiling/test_capture_check.py has what it refuses",
    "GradScaler.bind": "called by an optimizer alone",
    **dict.fromkeys(("LinearContext", "Loss", "Metrics"), "classes of results"),
    **dict.fromkeys(("Prefetcher", "Prefetcher.close"), "the class of what prefetch returns"),
    "profile": "tests/cpu/profiling/test_profile_on_host.py has what it refuses",
    "range": "tests/cpu/test_ranges.py has what it refuses",
}


def public(lt: ModuleType) -> Iterator[tuple[str, Any]]:
    """Everything that a script may call."""
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
                if is_public and (inspect.isfunction(function) or isinstance(function, classmethod)):
                    yield f"{name}.{method}", getattr(value, method)


def test_every_parameter_has_an_entry() -> None:
    found = {name: value for name, value in public(lt_runtime) if name not in ELSEWHERE}
    assert found.keys() == {name for name in ROWS if " " not in name}
    for name, function in found.items():
        if name == "Epilogue":  # an enumeration's signature is that of making one
            continue
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(function).parameters.items()
        asked = {each for each, parameter in parameters if parameter.kind not in kinds and each != "self"}
        assert asked == set(ROWS[name].accepts), name


CASES = [(name, parameter) for name, row in ROWS.items() for parameter in row.accepts]


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    nn = SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, nn=nn))


@pytest.mark.usefixtures("_torch")
@pytest.mark.parametrize(("name", "parameter"), [case for case in CASES if not ROWS[case[0]].gpu_only])
def test_on_numpy_arrays(name: str, parameter: str) -> None:
    _check(World(lt_runtime, lambda array: array), name, parameter)


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_on_the_pretended_gpu(gpu: FakeGpu, name: str, parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.torch, "Tensor", Tensor)
    _check(World(gpu.lt, gpu.cp.asarray, gpu), name, parameter)


def _check(world: World, name: str, parameter: str) -> None:
    row = ROWS[name]
    function, sound = row.make(world)
    before, complaints = world.values(), []
    for kind, value in {**KINDS, "array": world.place(KINDS["array"])}.items():
        if kind in row.accepts[parameter].split():
            continue
        complaint = _complaint(
            world, function, {**sound, parameter: value}, row.aliases.get(parameter, parameter), kind
        )
        if complaint:
            complaints.append(f"{kind}: {complaint}")
        if world.values() != before:
            complaints.append(f"{kind}: something was written")
            break
    assert not complaints, "\n".join(complaints)


def _complaint(world: World, function: Any, arguments: dict[str, Any], shown_as: str, kind: str) -> str | None:
    """What is wrong with how a function refuses arguments."""
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
