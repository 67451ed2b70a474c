"""Faults between the package and the pretended GPU, each of which the checks of the other tests must notice.

A fault changes the arguments of cuBLASLt or of a kernel, as a mistake in the package would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lt_runtime.cublaslt import ComputeType, Epilogue
from lt_runtime.epilogue import Epilogue as Wanted
from lt_runtime.problem import Philox
from tests.support.fake_cublaslt import Layout, Matmul
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer, LayerData, layer_case
from tests.support.matmul_checks import Product, matmul_case
from tests.support.placed import COLUMNS, FLAT

_Change = Callable[[Matmul], Matmul]
_SHIFTED = dataclasses.replace(FLAT, offset=1)


def _check_everything(gpu: FakeGpu) -> None:
    """Makes a few calls of each kind and checks their results; a planted fault must make a check fail."""
    for case in (
        layer_case(),
        layer_case(activation="relu", accumulate=True),
        layer_case(dropout=0.5),
        layer_case(dropout=0.5, rng=Philox(7, 3, 6)),
        layer_case(activation="none", m=17, n=19, k=23),
        layer_case(y=COLUMNS, dy=COLUMNS),  # in this call a kernel of ours adds the bias
    ):
        layers = [Layer(gpu, case, gpu.stream, LayerData(case, seed)) for seed in range(2)]
        for layer in layers:
            layer.check()
        layers[0].refill(5)
        layers[0].check()
    square = {"m": 32, "n": 32, "k": 32}
    for product in (
        matmul_case(**square),
        matmul_case(**square, a=_SHIFTED, b=_SHIFTED),
        matmul_case(with_c=True, alpha=2.0, beta=-0.5),
        matmul_case(with_c=True, alpha=2.0, beta=-0.5, device_scalars=True),
        matmul_case(batches=(3, 3, 3), with_c=True, beta=-0.5),
        *(matmul_case(epilogue=each) for each in Wanted),
    ):
        for seed in range(2):
            Product(gpu, dataclasses.replace(product, data_seed=seed), gpu.stream).check()
    _check_full_precision(gpu)


def _check_full_precision(gpu: FakeGpu) -> None:
    """Checks a full-FP32 product of data that TF32 would round."""
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(shape).astype(np.float32) for shape in ((16, 64), (64, 24)))
    made = gpu.lt.matmul(gpu.cp.asarray(a), gpu.cp.asarray(b), stream=gpu.stream)
    with gpu.stream:
        np.testing.assert_allclose(made.get(), a.astype(np.float64) @ b, atol=1e-5)


def _remembered(pick: Callable[[Matmul], Any], change: Callable[[Matmul, Any], Matmul]) -> _Change:
    """Makes a fault: an argument gets the value of the first similar call, as by a cache with an incomplete key."""
    seen: dict[Any, Any] = {}
    return lambda call: change(call, seen.setdefault((call.desc, call.layouts), pick(call)))


def _desc(**changes: Any) -> _Change:
    return lambda call: call._replace(desc=dataclasses.replace(call.desc, **changes))


def _renamed(old: str, new: str) -> _Change:
    """Makes a fault: cuBLASLt gets another epilogue, whose name differs in one part."""

    def change(call: Matmul) -> Matmul:
        name = Epilogue(call.desc.epilogue).name.replace(old, new).strip("_") or "DEFAULT"
        return _desc(epilogue=Epilogue[name])(call) if name in Epilogue.__members__ else call

    return change


def _stretched(layout: Layout) -> Layout:
    return dataclasses.replace(layout, stride=layout.stride + 1) if layout.batch > 1 else layout


_PRODUCT_FAULTS: dict[str, _Change] = {
    "operands exchanged": lambda call: call._replace(a=call.b, b=call.a),
    "alpha ignored": lambda call: call._replace(alpha=1.0) if call.desc.mode == 0 else call,
    "beta ignored": lambda call: call._replace(beta=0.0) if call.desc.mode == 0 else call,
    "stream 0": lambda call: call._replace(stream=0),
    "a stale stream": lambda call: call._replace(stream=call.stream ^ 0x10),
    "a stale bias address": _remembered(lambda call: call.bias, lambda call, was: call._replace(bias=was)),
    "a stale address of D": _remembered(lambda call: call.d, lambda call, was: call._replace(d=was)),
    "the auxiliary leading dimension": lambda call: _desc(aux_leading=call.desc.aux_leading + 128)(call),
    "a workspace beyond its end": lambda call: call._replace(workspace_size=call.workspace_size + 256),
    "no workspace": lambda call: call._replace(workspace=0, workspace_size=0),
    "relu for gelu": _renamed("GELU", "RELU"),
    "no bias": _renamed("BIAS", ""),
    "no bias gradient": _renamed("_BGRAD", ""),
    "a missing transposition": lambda call: _desc(trans_a=1 - call.desc.trans_a)(call),
    "D in the place of A": lambda call: call._replace(d=call.a),
    "TF32 unasked for": lambda call: (
        _desc(compute=ComputeType.COMPUTE_32F_FAST_TF32)(call) if call.a_layout.dtype == 0 else call
    ),
    "a batch's stride": lambda call: call._replace(d_layout=_stretched(call.d_layout)),
    "the leading dimension of D": lambda call: call._replace(
        d_layout=dataclasses.replace(call.d_layout, leading=call.d_layout.leading + 1)
    ),
    "the plan of another alignment": _remembered(
        lambda call: call.algorithm, lambda call, was: call._replace(algorithm=was)
    ),
}  # fmt: skip


@pytest.fixture
def broken(gpu: FakeGpu) -> Iterator[FakeGpu]:
    """Yields the pretended GPU; after the test, removes the planted faults and all waiting work."""
    library, kernels = gpu.library, gpu.kernels
    faults = library.fault, kernels.fault
    yield gpu
    library.fault, kernels.fault = faults
    gpu.streams.abandon()


def _expect_a_failure(gpu: FakeGpu) -> None:
    # The fault shows as ValueError or IndexError if NumPy finds that shapes do not fit.
    # Waiting work may fail only when the block ends.
    with pytest.raises((AssertionError, ValueError, IndexError)):  # noqa: PT012
        _check_everything(gpu)
        gpu.settle()


def test_nothing_fails_without_a_fault(gpu: FakeGpu) -> None:
    _check_everything(gpu)


@pytest.mark.parametrize("name", _PRODUCT_FAULTS)
def test_faults_of_products(broken: FakeGpu, name: str) -> None:
    broken.library.fault = _PRODUCT_FAULTS[name]
    _expect_a_failure(broken)


def _set_dropout(**changes: int) -> Callable[[str, Any], None]:
    def change(_: str, params: Any) -> None:
        if hasattr(params, "dropout"):
            for field, add in changes.items():
                setattr(params.dropout, field, getattr(params.dropout, field) + add)

    return change


def _stale(field: str) -> Callable[[str, Any], None]:
    """Makes a fault: a kernel gets the address that it had at first for the same argument and shape."""
    seen: dict[Any, int] = {}

    def change(name: str, params: Any) -> None:
        holder, _, last = field.rpartition(".")
        owner = getattr(params, holder, None) if holder else params
        value = getattr(owner, last, None)
        if value:
            setattr(owner, last, seen.setdefault((name, params.rows, params.cols), value))

    return change


def _wrong_saved(name: str, params: Any) -> None:
    if name == "epilogue_bwd" and params.saved.data:
        params.saved.data = params.dy.data


def _not_accumulated(name: str, params: Any) -> None:
    if name == "epilogue_bwd":
        params.db.accumulate = 0


def _shared_output(name: str, params: Any) -> None:
    if name == "epilogue_bwd" and params.dz.data:
        params.dz.data = params.dy.data


def _too_few_rows(name: str, params: Any) -> None:
    if name == "epilogue_bwd":
        params.rows -= 1


_KERNEL_FAULTS: dict[str, Callable[[str, Any], None]] = {
    "another layer's mask": _set_dropout(layer=1),
    "another step's mask": _set_dropout(step=1),
    "a mask of another rate": _set_dropout(limit=1 << 20),
    "a stale bias": _stale("bias"),
    "a stale input": _stale("in_.data"),
    "a stale bias gradient": _stale("db.sum"),
    "the wrong saved tensor": _wrong_saved,
    "a bias gradient that is not accumulated": _not_accumulated,
    "dz over dy": _shared_output,
    "a row too few": _too_few_rows,
}


@pytest.mark.parametrize("name", _KERNEL_FAULTS)
def test_faults_of_kernels(broken: FakeGpu, name: str) -> None:
    broken.kernels.fault = _KERNEL_FAULTS[name]
    _expect_a_failure(broken)


@pytest.mark.parametrize("work", ["kernel", "matmul", "memset"])
def test_work_on_the_default_stream(broken: FakeGpu, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    put = broken.streams.put

    def misplaced(stream: int, kind: Any, name: str, *more: Any) -> None:
        put(0 if name == work else stream, kind, name, *more)

    monkeypatch.setattr(broken.streams, "put", misplaced)
    stream = broken.cp.cuda.Stream()

    def check() -> None:
        Product(broken, matmul_case(epilogue=Wanted.DRELU_BGRAD), stream).check()
        Layer(broken, layer_case(), stream).check()
        broken.settle()

    with pytest.raises(AssertionError):
        check()
