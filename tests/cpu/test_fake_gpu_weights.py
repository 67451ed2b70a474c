"""Weights and checkpoints on the pretended GPU: bit for bit while graphs go on; stale master copies are refused."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.numpy_cases import DTYPES, Array

_DIMS, _ROWS = [8, 16, 3], 16
_STALE = r"layer0.weight.data has 0.*, but its master copy .* by parameter.assign\(values\)"


class _Run:
    """A model in training on the GPU, with its optimizer and step."""

    def __init__(self, gpu: FakeGpu, dtype: str, *, graph: bool = True, dropout: float = 0.0, **options: Any) -> None:
        self.gpu, self.dtype, lt = gpu, dtype, gpu.lt
        self.model = lt.MLP(_DIMS, activation="gelu", dtype=dtype, dropout=dropout, seed=3, device="cuda")
        self.optimizer = lt.AdamW(self.model.parameters(), **options)
        self.step = lt.TrainStep(self.model, self.optimizer, batch_size=_ROWS, graph=graph)
        gpu.streams.synchronize_all()

    def train(self, steps: range) -> None:
        for i in steps:
            generator = np.random.default_rng(i)
            x = generator.standard_normal((_ROWS, _DIMS[0])).astype(DTYPES[self.dtype])
            labels = generator.integers(0, _DIMS[-1], _ROWS)
            self.step(self.gpu.cp.asarray(x), self.gpu.cp.asarray(labels), stream=self.gpu.stream)
        self.gpu.synchronize(self.gpu.stream.ptr)

    def bits(self) -> dict[str, bytes]:
        self.gpu.streams.synchronize_all()
        return {name: self.gpu.host_of(array).tobytes() for name, array in self.model.state_dict().items()}

    def state(self) -> list[bytes]:
        """Returns the bytes of every array that training changes."""
        self.gpu.streams.synchronize_all()
        return [self.gpu.host_of(each).tobytes() for each in _arrays(self.model, self.optimizer)]


def _arrays(model: Any, optimizer: Any) -> list[Any]:
    arrays = [array for each in model.parameters() for array in (each.data, each.master)]
    arrays += [moment for moments in optimizer.moments for moment in moments]
    arrays += [optimizer.steps, optimizer.skipped_steps, optimizer.grad_norm]
    arrays += [optimizer.scaler.scale, optimizer.scaler.growth_tracker]
    return [each for each in arrays if each is not None]


def _with_everything(lt: Any) -> dict[str, Any]:
    """Returns the options of an optimizer with every array that a checkpoint may have."""
    return {"lr": 1e-2, "scaler": lt.GradScaler(1024.0, growth_interval=3), "max_norm": 1.0, "amsgrad": True}


def _numbers(shape: tuple[int, ...], dtype: str) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(DTYPES[dtype])


class _InterfaceOnly:
    def __init__(self, array: Any) -> None:
        self._array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__
        self.dtype, self.shape = array.dtype, array.shape


SOURCES: dict[str, Callable[[FakeGpu, Array], Any]] = {
    "NumPy": lambda _, values: values,
    "CuPy": lambda gpu, values: gpu.cp.asarray(values),
    "CuPy, transposed": lambda gpu, values: gpu.cp.asarray(values.T.copy()).T,
    "PyTorch": lambda gpu, values: gpu.torch.Tensor(gpu.cp.asarray(values)),
    "PyTorch, transposed": lambda gpu, values: gpu.torch.Tensor(gpu.cp.asarray(values.T.copy()).T),
    "the interface": lambda gpu, values: _InterfaceOnly(gpu.cp.asarray(values)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
def test_values_of_any_library(gpu: FakeGpu, source: str, dtype: str) -> None:
    run = _Run(gpu, dtype)
    weight, values = run.model.layers[0].weight, _numbers((16, 8), dtype)
    data, master = weight.data, weight.master
    weight.assign(SOURCES[source](gpu, values))
    assert weight.data is data
    assert weight.master is master
    assert gpu.host_of(data).tobytes() == values.tobytes()
    assert master is None or gpu.host_of(master).tobytes() == values.astype(np.float32).tobytes()
    assert weight.data.dtype == DTYPES[dtype]


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_stay_bit_for_bit_in_a_graph_that_was_captured_before(gpu: FakeGpu, dtype: str, graph: bool) -> None:
    run = _Run(gpu, dtype, graph=graph, lr=0.0, weight_decay=0.1)
    run.train(range(2))
    given = {each.name: _numbers(each.data.shape, dtype) for each in run.model.parameters()}
    run.model.load_state_dict({name: gpu.cp.asarray(array) for name, array in given.items()})
    run.train(range(10))
    assert run.bits() == {name: array.tobytes() for name, array in given.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_goes_on_from_new_values(gpu: FakeGpu, dtype: str) -> None:
    used, fresh = _Run(gpu, dtype, lr=1e-2), _Run(gpu, dtype, lr=1e-2)
    given = {each.name: _numbers(each.data.shape, "float32") for each in used.model.parameters()}
    used.train(range(3))
    for run in (used, fresh):
        run.model.load_state_dict(given)
    for array in (*used.optimizer.moments, (used.optimizer.steps,)):
        for each in array:
            each.fill(0)
    gpu.streams.synchronize_all()
    for run in (used, fresh):
        run.train(range(5, 9))
    assert used.bits() == fresh.bits()


@contextlib.contextmanager
def _current(gpu: FakeGpu) -> Iterator[None]:
    with gpu.stream:
        yield
    gpu.synchronize(gpu.stream.ptr)


def test_values_on_their_way_are_waited_for(gpu: FakeGpu) -> None:
    run, values = _Run(gpu, "float16"), _numbers((16, 8), "float16")
    weight = run.model.layers[0].weight
    with _current(gpu):
        late = gpu.cp.zeros((16, 8), np.float16)
        late[...] = values  # the copy into `late` has not run yet, so that `assign` must wait for it
        weight.assign(late)
        assert gpu.host_of(weight.data).tobytes() == values.tobytes()
    with _current(gpu):
        late[...] = 2 * values
        weight.assign(late)
        given = run.model.state_dict()
    assert given["layer0.weight"].get().tobytes() == (2 * values).tobytes()


def test_work_that_reads_the_old_values_comes_first(gpu: FakeGpu) -> None:
    run = _Run(gpu, "float32")
    weight, x = run.model.layers[0].weight, gpu.cp.asarray(np.ones((4, 8), np.float32))
    expected = gpu.lt.linear(x, weight.data.copy())
    gpu.streams.synchronize_all()
    y = gpu.lt.linear(x, weight.data, stream=gpu.stream)
    weight.assign(np.zeros((16, 8)))
    gpu.streams.synchronize_all()
    assert gpu.host_of(y).tobytes() == gpu.host_of(expected).tobytes()


def test_within_a_capture_nothing_is_written(gpu: FakeGpu) -> None:
    run = _Run(gpu, "float16")
    weight = run.model.layers[0].weight
    before = gpu.host_of(weight.data).tobytes()
    with gpu.stream:
        gpu.stream.begin_capture()
        with pytest.raises(gpu.lt.errors.CaptureError, match=r"is being captured; layer0.weight.data cannot"):
            weight.assign(np.zeros((16, 8)))
        gpu.stream.end_capture()
    assert gpu.host_of(weight.data).tobytes() == before


def _spoil(run: _Run) -> None:
    run.model.layers[0].weight.data[3, 2] = 0.5
    run.gpu.streams.synchronize_all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("graph", [True, False])
def test_a_first_step_refuses_a_stale_master_copy(gpu: FakeGpu, dtype: str, graph: bool) -> None:
    run = _Run(gpu, dtype, graph=graph)
    _spoil(run)
    before = run.bits()
    for _ in range(2):
        with pytest.raises(gpu.lt.errors.OperandError, match=_STALE):
            run.train(range(1))
    assert run.bits() == before
    assert run.optimizer.steps.item() == 0
    run.model.layers[0].weight.assign(run.model.layers[0].weight.data)
    run.train(range(1))
    assert run.bits() != before


def test_an_optimizers_first_step_refuses_a_stale_master_copy(gpu: FakeGpu) -> None:
    run = _Run(gpu, "bfloat16")
    _spoil(run)
    with pytest.raises(gpu.lt.errors.OperandError, match=_STALE):
        run.optimizer.step(stream=gpu.stream)
    run.model.layers[0].weight.assign(run.model.layers[0].weight.data)
    run.optimizer.step(stream=gpu.stream)
    gpu.synchronize(gpu.stream.ptr)
    assert run.optimizer.steps.item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_model_goes_from_device_to_device(gpu: FakeGpu, dtype: str, tmp_path: Path) -> None:
    run, lt = _Run(gpu, dtype, lr=1e-2), gpu.lt
    run.train(range(3))
    lt.save_model(tmp_path / "model", run.model)
    on_host = lt.load_model(tmp_path / "model", device="cpu")
    assert {name: array.tobytes() for name, array in on_host.state_dict().items()} == run.bits()
    lt.save_model(tmp_path / "again", on_host)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "model").read_bytes()
    on_gpu = lt.load_model(tmp_path / "again")
    assert on_gpu.device.ordinal == 0
    masters = [
        (each.master, other.master) for each, other in zip(on_gpu.parameters(), run.model.parameters(), strict=True)
    ]
    for one, other in masters:
        assert (one is None) == (other is None)
        assert one is None or gpu.host_of(one).tobytes() == gpu.host_of(other).tobytes()
    assert {name: gpu.host_of(array).tobytes() for name, array in on_gpu.state_dict().items()} == run.bits()


def test_values_without_an_optimizer_while_a_graph_goes_on(gpu: FakeGpu, tmp_path: Path) -> None:
    saved, run = _Run(gpu, "bfloat16", lr=1e-2), _Run(gpu, "bfloat16", lr=0.0)
    saved.train(range(3))
    gpu.lt.save_checkpoint(tmp_path / "run", saved.model, saved.optimizer)
    run.train(range(1))
    gpu.lt.load_checkpoint(tmp_path / "run", run.model)
    run.train(range(2))
    assert run.bits() == saved.bits()


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_run_is_the_unbroken_one(gpu: FakeGpu, dtype: str, graph: bool, tmp_path: Path) -> None:
    lt = gpu.lt
    unbroken, first, second = (_Run(gpu, dtype, graph=graph, dropout=0.3, **_with_everything(lt)) for _ in range(3))
    unbroken.train(range(8))
    first.train(range(4))
    lt.save_checkpoint(tmp_path / "run", first.model, first.optimizer)
    second.train(range(90, 93))
    lt.load_checkpoint(tmp_path / "run", second.model, second.optimizer)
    assert second.state() == first.state()
    on_host = lt.MLP(_DIMS, activation="gelu", dtype=dtype, dropout=0.3, seed=3, device="cpu")
    optimizer = lt.AdamW(on_host.parameters(), **_with_everything(lt))
    lt.load_checkpoint(tmp_path / "run", on_host, optimizer)
    assert [each.tobytes() for each in _arrays(on_host, optimizer)] == first.state()
    second.train(range(4, 8))
    assert second.state() == unbroken.state()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_write_that_fails_changes_nothing(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    run, other = (_Run(gpu, "float32", **_with_everything(gpu.lt)) for _ in range(2))
    path = tmp_path / "run"
    run.train(range(3))
    gpu.lt.save_checkpoint(path, run.model, run.optimizer)
    other.train(range(3, 5))
    before, calls = other.state(), list[None]()
    transfer = importlib.import_module("lt_runtime.arrays.transfer")
    store = transfer.store

    def fail(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 9:
            raise error("in the middle")
        store(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "store", fail)
        with pytest.raises(error, match="in the middle"):
            gpu.lt.load_checkpoint(path, other.model, other.optimizer)
    assert other.state() == before
    gpu.lt.load_checkpoint(path, other.model, other.optimizer)
    assert other.state() == run.state()
