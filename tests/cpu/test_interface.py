"""Functions accept every spelling of a device or a type. Modules list only public names. Objects show their options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DTypeError
from lt_runtime.gpu import devices
from lt_runtime.gpu.devices import parse_device
from lt_runtime.nn.device import ComputeDevice
from lt_runtime.problem import DType
from tests.support.numpy_cases import DTYPES


class TorchDtype:
    """An object with the representation of a PyTorch type, and without a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"torch.{self._name}"


def torch_device(kind: str, index: int | None = None) -> Any:
    return SimpleNamespace(type=kind, index=index)


SPELLINGS = {
    "float32": ("float32", np.float32, np.dtype(np.float32), TorchDtype("float32"), DType.FLOAT32),
    "float16": ("float16", np.float16, np.dtype(np.float16), TorchDtype("float16"), DType.FLOAT16),
    "bfloat16": ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), TorchDtype("bfloat16"), DType.BFLOAT16),
}
EVERY_TYPE = [(name, spelling) for name, spellings in SPELLINGS.items() for spelling in spellings]
ON_THE_HOST = ["cpu", torch_device("cpu"), torch_device("cpu", 0), ComputeDevice(None)]


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_count", lambda: 2)


@pytest.mark.parametrize(("name", "spelling"), EVERY_TYPE)
def test_types_of_models_and_products(name: str, spelling: Any) -> None:
    assert lt.MLP([2, 3], dtype=spelling, device="cpu").layers[0].weight.data.dtype == DTYPES[name]
    a = np.ones((2, 2), DTYPES[name])
    assert lt.matmul(a, a, dtype=spelling).dtype == DTYPES[name]


@pytest.mark.parametrize(("name", "spelling"), [each for each in EVERY_TYPE if each[0] != "float16"])
def test_types_of_moments(name: str, spelling: Any) -> None:
    parameters = lt.MLP([2, 3], device="cpu").parameters()
    assert lt.AdamW(parameters, moments=spelling).moments[0][0].dtype == DTYPES[name]


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [("half", "half"), (np.int32, "int32"), (np.dtype("f8"), "float64"), (float, "float"), (None, "None")],
)
def test_types_that_are_none(dtype: Any, shown: str) -> None:
    with pytest.raises(DTypeError, match=f"the model has type {shown}; accepted are float32, float16, bfloat16$"):
        lt.MLP([2, 3], dtype=dtype, device="cpu")


def test_moments_that_are_none() -> None:
    with pytest.raises(ArgumentError, match=r"moments is <class 'numpy.float16'>; accepted are 'float32' and"):
        lt.AdamW(lt.MLP([2, 3], device="cpu").parameters(), moments=np.float16)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("device", "ordinal"),
    [
        (0, 0),
        (1, 1),
        (np.int64(1), 1),
        ("auto", 0),
        ("cuda", 0),
        ("cuda:1", 1),
        (torch_device("cuda"), 0),
        (torch_device("cuda", 1), 1),
        (ComputeDevice(1), 1),
    ],
)
def test_gpus(device: Any, ordinal: int) -> None:
    assert parse_device(device) == ordinal


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("device", ON_THE_HOST)
def test_the_host(device: Any) -> None:
    model = lt.MLP([2, 3], device=device)
    assert model.device == ComputeDevice(None)
    assert [*lt.prefetch([np.ones(1)], device=device)] == [1]
    assert [*lt.prefetch([np.ones(1)], device=model.device)] == [1]


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    "make", [lambda device: lt.MLP([2, 3], device=device), lambda device: lt.prefetch([], device=device)]
)
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "device is 'tpu'; accepted are 'auto', 'cpu', 'cuda' and 'cuda:N', a GPU's ordinal, and a torch"),
        ("cuda:", "device is 'cuda:'; accepted"),
        (torch_device("mps", 0), r"device is namespace\(type='mps', index=0\); accepted"),
        (True, "device is True; accepted"),
        (None, "device is None; accepted"),
        (2, "device is 2, but this machine has 2 usable GPUs; try 'cpu'"),
        (-1, "device is -1, but this machine has 2"),
        (torch_device("cuda", 2), "but this machine has 2"),
    ],
)
def test_devices_that_are_none(make: Any, device: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(device)


def test_without_a_gpu_auto_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    assert parse_device("auto") is None
    with pytest.raises(ArgumentError, match="device is 'cuda', but this machine has 0 usable GPUs"):
        parse_device("cuda")


def test_only_the_interface_is_listed() -> None:
    _ = lt.errors, lt.MLP, lt.rules, lt.schedules
    public = {name for name in dir(lt) if not (name.startswith("__") and name.endswith("__"))}
    assert public == {*lt.__all__, "range"}, "a star import would hide Python's range"
    assert dir(lt.raw) == ["backward_raw", "forward_raw"]
    assert dir(lt.schedules) == [
        *("Schedule", "Table", "constant", "from_function", "table"),
        *("warmup", "warmup_cosine", "warmup_linear"),
    ]
    assert dir(lt.rules) == ["AMSGrad", "AdamW", "Lion", "SGD"]
    assert {"__version__", "__all__", "__name__", "__doc__"} <= set(dir(lt))


def test_a_context_shows_what_it_is_of() -> None:
    x, w = np.ones((5, 3), DTYPES["bfloat16"]), np.ones((4, 3), DTYPES["bfloat16"])
    _, ctx = lt.linear_fwd(x, w, activation="gelu")
    assert repr(ctx) == "LinearContext(M=5, N=4, K=3, bfloat16, gelu, dropout=0.0)"
    _, ctx = lt.linear_fwd(x, w, dropout=0.5, rng=lt.Philox(1))
    assert repr(ctx) == "LinearContext(M=5, N=4, K=3, bfloat16, none, dropout=0.5)"


def test_what_trains_shows_what_it_was_made_with() -> None:
    model = lt.MLP([784, 64, 10], device="cpu")
    optimizer, ema = lt.AdamW(model.parameters()), lt.EMA(model, 0.99)
    assert repr(ema) == "EMA(MLP 784-64-10 on cpu, decay=0.99)"
    step = lt.TrainStep(model, optimizer, loss="mse", accumulate=2, ema=ema)
    shown = "TrainStep(MLP 784-64-10 on cpu, AdamW, loss=mse, batch_size=None, accumulate=2, EMA)"
    assert repr(step) == shown
    step = lt.TrainStep(model, optimizer, loss=test_only_the_interface_is_listed, batch_size=8)
    shown = "TrainStep(MLP 784-64-10 on cpu, AdamW, loss=test_only_the_interface_is_listed, batch_size=8, accumulate=1)"
    assert repr(step) == shown
    with lt.prefetch([np.ones(2)], depth=3, device="cpu") as batches:
        assert repr(batches) == "Prefetcher(depth=3, cpu, open)"
    assert repr(batches) == "Prefetcher(depth=3, cpu, closed)"
