"""`lt.prefetch` takes what a `torch.utils.data.DataLoader` yields: on the CPU, and with a pretended GPU."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import lt_runtime as lt
from lt_runtime.errors import OperandError
from lt_runtime.gpu.driver import call
from tests.cpu.conftest import gpu as gpu  # imported because it is a pytest fixture
from tests.cpu.conftest import session_gpu as session_gpu
from tests.support.fake_gpu import FakeGpu
from tests.support.host_memory import host_memory as host_memory  # a pytest fixture too
from tests.support.placed import host_of

Pair = namedtuple("Pair", "x label")
DTYPES = torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int32, torch.complex64


def samples(count: int = 9) -> list[dict[str, Any]]:
    """Samples whose collated batches have tensors of many types in dicts, named tuples and tuples."""
    made = []
    for i in range(count):
        values = [torch.full((3, 2), float(i)).to(dtype) for dtype in DTYPES]
        made.append({"pair": Pair(torch.full((4,), float(i)), i), "many": tuple(values), "array": np.full(2, i)})
    return made


def loader() -> Any:
    return torch.utils.data.DataLoader(samples(), batch_size=4)


def check_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert type(found["pair"]) is Pair


def test_a_loader_s_batches_come_as_they_are() -> None:
    for batch, wanted in zip(lt.prefetch(loader(), 2, "cpu"), loader(), strict=True):
        check_same(batch, wanted)


def in_one_tensor() -> Iterator[Any]:
    x = torch.zeros(4, 3, requires_grad=True)
    for i in range(5):
        x.detach().fill_(i)
        yield [x, x[:, ::2], x[0, 0], x[:0]]


def test_an_iterable_may_fill_the_same_tensors_again() -> None:
    batches = [*lt.prefetch(in_one_tensor(), 3, "cpu")]
    assert [[each.sum().item() for each in batch] for batch in batches] == [[12.0 * i, 8.0 * i, i, 0] for i in range(5)]
    assert not any(each.requires_grad for batch in batches for each in batch)


def test_tensors_for_a_gpu_go_through_its_buffers(
    request: pytest.FixtureRequest,
) -> None:
    """PyTorch gets the bytes of each buffer by DLPack, and its current stream is the one that waits."""
    try:
        gpu: FakeGpu = request.getfixturevalue("gpu")
    except ImportError:  # raised when the pretended GPU imports a copy of the package without cuBLASLt installed
        pytest.skip("the pretended GPU needs cuBLASLt's library")
    given: list[Any] = []

    def from_dlpack(array: Any) -> Any:
        given.append(array)
        return torch.from_numpy(host_of(gpu, array))  # no copy: the tensor lies in the pretended GPU's memory

    streams: list[int] = []
    seen = []
    # This patch is undone before the fixture `gpu` ends, which has put a pretended torch into `sys.modules` as well.
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "torch", torch)
        patched.setattr(torch, "from_dlpack", from_dlpack)
        current = lambda _: streams.append(1) or gpu.stream.ptr  # noqa: E731
        patched.setattr(torch._C, "_cuda_getCurrentRawStream", current, raising=False)
        for batch in gpu.lt.prefetch((batch[:3] for batch in in_one_tensor()), 2, 0):
            call("cuStreamSynchronize", gpu.stream.ptr)
            seen.append([each.clone() for each in batch])
    wanted = [[each.detach().clone() for each in batch[:3]] for batch in in_one_tensor()]
    gpu.synchronize_all()
    torch.testing.assert_close(seen, wanted, rtol=0, atol=0)
    assert streams
    assert {array.dtype for array in given} == {np.dtype(np.uint8)}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.eye(2).to_sparse()},
            r"the batch\['x'\] is a tensor of layout torch.sparse_coo; accepted are dense",
        ),
        ([torch.ones(2, device="meta")], r"the batch\[0\] is a tensor on meta; accepted are tensors on the CPU"),
        ((torch.ones(2), ["text"]), r"the batch\[1\]\[0\] is a str; accepted are NumPy arrays, PyTorch tensors on"),
    ],
)
def test_batches_of_something_else(batch: Any, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        next(lt.prefetch([batch], device="cpu"))
