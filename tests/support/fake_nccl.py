"""A stand-in for nccl4py on a pretended GPU, and a wire between pretended processes.

One process takes part in the test. All others hold the same values, so that a sum multiplies by the number of
processes. Like NCCL, a group call is one kernel, and a process alone only copies.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import numpy as np

from tests.support.device_memory import DeviceMemory, matrix_at
from tests.support.fake_streams import KERNEL, MEMCPY, Streams

_TYPES: Final = {
    "UINT8": 1, "INT32": 2, "UINT32": 3, "INT64": 4, "FLOAT16": 6, "FLOAT32": 7, "FLOAT64": 8, "BFLOAT16": 9,
}  # fmt: skip
SUM, MAX = 0, 2
_SUCCESS: Final = 0
SUM_KERNEL: Final = 0
"""The function in the arguments of a graph's node that runs a group call; no function of a kernel has this handle."""


class Gpu(Protocol):
    """The parts of a pretended GPU that NCCL uses."""

    memory: DeviceMemory
    streams: Streams


class Operation(NamedTuple):
    """An operation of a group call, with the function's name and the arguments that follow the type."""

    name: str
    source: int
    target: int
    count: int
    dtype: np.dtype[Any]
    options: tuple[int, ...]


class Communicator:
    """Stands in for `nccl.core.Communicator`.

    Attributes:
        size, rank: as given to `init`.
        config: the options of `NCCLConfig`.
        async_error: the result of `get_async_error`.
        ended: whether `destroy` was called.
    """

    def __init__(self, nccl: FakeNccl, size: int, rank: int, config: dict[str, Any]) -> None:
        self.size, self.rank, self.config, self.async_error, self.ended = size, rank, config, _SUCCESS, False
        nccl.communicators.append(self)
        self.ptr = len(nccl.communicators)

    def get_async_error(self) -> int:
        return self.async_error

    def destroy(self) -> None:
        self.ended = True


class FakeNccl:
    """The modules `nccl.core` and `nccl.bindings`.

    Attributes:
        communicators: all communicators so far.
        calls: the operations of each group call so far, captured or not, with the stream.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._open = gpu, list[tuple[Operation, int, int]]()
        self.communicators: list[Communicator] = []
        self.calls: list[tuple[int, list[Operation]]] = []

    @property
    def modules(self) -> dict[str, ModuleType]:
        """The modules by the names of their imports."""
        made = {name: ModuleType(name) for name in ("nccl", "nccl.core", "nccl.bindings", "nccl.bindings.nccl")}
        core, bindings = made["nccl.core"], made["nccl.bindings.nccl"]
        made["nccl"].core, made["nccl"].bindings = core, made["nccl.bindings"]  # type: ignore[attr-defined]
        made["nccl.bindings"].nccl = bindings  # type: ignore[attr-defined]
        vars(core).update(
            _TYPES,
            SUM=SUM,
            MAX=MAX,
            get_version=lambda: SimpleNamespace(libnccl="pretended"),
            get_unique_id=lambda: b"unique id",
            UniqueId=SimpleNamespace(from_bytes=bytes),
            NCCLConfig=lambda **options: options,
            Communicator=SimpleNamespace(init=lambda size, rank, _, config: Communicator(self, size, rank, config)),
            get_error_string=lambda error: f"error {error}",
            group=self._group,
        )
        vars(bindings).update(
            Comm=int, **{name: self._function(name) for name in ("all_reduce", "broadcast", "reduce")}
        )
        return made

    def _function(self, name: str) -> Any:
        names = {number: each.lower() for each, number in _TYPES.items()}

        def put(source: int, target: int, count: int, kind: int, *more: int) -> None:
            *options, communicator, stream = more
            operation = Operation(name, source, target, count, np.dtype(names[kind]), tuple(options))
            self._open.append((operation, communicator, stream))

        return put

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """Puts the operations of a group call on their stream at its end."""
        yield
        operations, self._open = [each for each, *_ in self._open], self._open
        (communicator,), (stream,) = ({each[i] for each in self._open} for i in (1, 2))
        self._open = []
        self.calls.append((stream, operations))
        size = self.communicators[communicator - 1].size
        if size == 1:
            for each in operations:
                if each.source != each.target:
                    self._put(stream, MEMCPY, "copy", [each], size)
        else:
            self._put(stream, KERNEL, operations[0].name, operations, size)

    def _put(self, stream: int, kind: Any, name: str, operations: list[Operation], size: int) -> None:
        memory, works = self._gpu.memory, []
        touches = []
        for each in operations:
            shape, strides = (each.count,), (1,)
            ends = [matrix_at(memory, at, each.dtype, shape, strides, "an array") for at in (each.source, each.target)]
            works.append((each, *ends))
            touches += memory.touched_by(ends[0], "its array", writes=False)
            touches += memory.touched_by(ends[1], "its result", writes=True)

        def run() -> None:
            for each, source, target in works:
                sums = each.name != "broadcast" and each.options[0] == SUM
                target[...] = source * source.dtype.type(size) if sums else source

        self._gpu.streams.put(stream, kind, name, run, lambda: touches)
        capture = self._gpu.streams.captures.get(stream)
        if capture is not None and kind == KERNEL:
            capture.nodes[-1].arguments = SUM_KERNEL, ctypes.create_string_buffer(8)


class MirrorWire:
    """A wire on which all other processes give the values of this one, except for what `replies` has.

    Attributes:
        replies: by the purpose of a call, the values of the processes from 0 to this one's and beyond.
        told: the reason with which a process has ended all.
    """

    limit = 60.0

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank, self.told = size, rank, ""
        self.replies = {"the GPUs of all processes": [bytes([each]) for each in range(size)]}

    def gather(self, value: bytes, what: str) -> list[bytes]:
        return self.replies.get(what, [value] * self.size)

    def host_engine(self) -> NoReturn:
        raise AssertionError("the test has no arrays of the host")

    def abort(self, why: str) -> None:
        self.told = why

    def close(self) -> None:
        pass
