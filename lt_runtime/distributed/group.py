"""`Group`: the processes that train one model together."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from lt_runtime.arguments import Fixed, check_instance, number, shown
from lt_runtime.arrays.checks import check_device
from lt_runtime.arrays.operand import HOST, device_of, read
from lt_runtime.distributed.protocols import Engine, Wire
from lt_runtime.environment import local_rank
from lt_runtime.errors import (
    ArgumentError,
    DTypeError,
    GroupError,
    KindError,
    MissingLibraryError,
    OperandError,
    printable,
)

_END: Final = b"\0"  # ends the purpose of a call, which precedes the value of each process
_SUMMED: Final = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32", "uint64")
_MPI: Final = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_ELASTIC: Final = "TORCHELASTIC_RUN_ID"
_KEPT: Final = 20  # the number of equal characters that an error shows before the first difference of two texts
_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Alone:
    """Wire and engine of a process that no launcher has started: nothing has to be exchanged."""

    rank, size = 0, 1

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def gather(self, value: bytes, what: str) -> list[bytes]:
        """Returns the value of this process, the only one of the group."""
        return [value]

    def host_engine(self) -> Engine:
        """Returns this object, which is also an engine."""
        return self

    def nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing, in place of the other methods of `Wire` and `Engine`."""

    sum = maximum = reduce = broadcast = close = nothing
    abort = nothing  # the caller's exception ends the process


class Group(Fixed):
    """The processes that train one model together, each with the whole model on a device of its own.

    `lt.group` makes it. Its methods are collective: all processes call the same methods in the same order. A process
    that waits longer than the group's timeout for another one prints which processes are missing, and ends all.

    Attributes:
        rank: number of this process, from 0 to size - 1.
        size: the number of processes.
        local_rank: number of this process on its machine.
        timeout: seconds that a process waits for another one.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._engines = wire, dict[int, Engine]()
        # Lists of shapes and types on which the processes have agreed, so that later sums need no comparison.
        self._summed = set[str]()
        self.rank: Final = wire.rank
        self.size: Final = wire.size
        self.local_rank: Final = local_rank()
        self.timeout: Final = wire.limit
        self._is_made = True

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, timeout={self.timeout:g})"

    def engine(self, device: int | None) -> Engine:
        """The engine for arrays on a device, an ordinal or None for the host; processes make the first call together.

        Raises:
            GroupError: two processes have the same GPU, or nothing carries arrays of this kind.
            MissingLibraryError: NCCL is not installed, which a process that no launcher has started does not need.
        """
        key = HOST if device is None else device
        if key not in self._engines:
            self._engines[key] = self._wire.host_engine() if device is None else self._gpu_engine(device)
        return self._engines[key]

    def _gpu_engine(self, device: int) -> Engine:
        from lt_runtime.distributed.nccl import NcclEngine  # imported late, because only GPUs need it

        try:
            return NcclEngine(self._wire, device, self.timeout)
        except MissingLibraryError:
            if not isinstance(self._wire, Alone):
                raise
            return self._wire

    def sum(self, first: Any, *others: Any, stream: int | None = None) -> None:
        """Adds up each array over all processes, in place.

        Args:
            first, others: NumPy arrays, or arrays on one GPU, row-major (in C order) without gaps, of a floating-point
                type or 32- or 64-bit integers; their shapes and types are the same in all processes.
            stream: handle of the stream for arrays on a GPU.

        Raises:
            OperandError: an array is on another device, read-only, or has gaps or a type that cannot be summed.
            GroupError: shapes or types differ between processes. The processes compare each list of shapes and types
                only once.
        """
        device = device_of("arrays[0]", first)
        operands = [read(f"arrays[{i}]", each, stream or 0) for i, each in enumerate((first, *others))]
        check_device(*operands)
        for each in operands:
            each.check_packed()
            if each.dtype not in _SUMMED:
                raise DTypeError(f"{each.name} is {each.dtype}; accepted are {', '.join(_SUMMED)}")
            if isinstance(each.array, np.ndarray) and not each.array.flags.writeable:
                raise OperandError(f"{each.name} is read-only; it must be writeable")
        kinds = [(each.shape, each.dtype) for each in operands]
        if str(kinds) not in self._summed:
            self.agree(kinds, "the shapes and types of a sum")
            self._summed.add(str(kinds))
        self.engine(None if device == HOST else device).sum([first, *others], stream)

    def gather(self, value: bytes, what: str) -> list[bytes]:
        """Returns the values that all processes have given, in the order of their ranks.

        Args:
            what: the purpose of the call, for errors; the same in all processes.

        Raises:
            GroupError: another process has called this for another purpose.
        """
        check_instance("value", value, bytes, "bytes")
        check_instance("what", what, str, "a string")
        given = [each.partition(_END) for each in self._wire.gather(what.encode() + _END + value, what)]
        for rank, (purpose, *_) in enumerate(given):
            if purpose != given[0][0]:
                theirs, first = (printable(each.decode(errors="replace"), 200) for each in (purpose, given[0][0]))
                raise GroupError(f"rank {rank} waits for {theirs}, but rank 0 for {first}: all must make equal calls")
        return [each for *_, each in given]

    def from_first(self, value: bytes, what: str) -> bytes:
        """The bytes that process 0 gives; the bytes of the other processes are ignored."""
        return self.gather(value if self.rank == 0 else b"", what)[0]

    def barrier(self, what: str = "a barrier") -> None:
        """Waits until all processes have called this."""
        self.gather(b"", what)

    def agree(self, value: Any, what: str) -> None:
        """Checks that all processes give the same value.

        Args:
            value: of types that JSON has. Of mappings, errors show only the entries that differ.
            what: the meaning of the value, for errors.

        Raises:
            KindError: the value has a type that JSON lacks.
            GroupError: the values differ. All processes raise it; it names the first one that differs from most others.
        """
        try:
            own = json.dumps(value, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise KindError(f"value is {shown(value)}; it must be of types that JSON has ({error})") from None
        texts = [each.decode() for each in self.gather(own.encode(), what)]
        usual = Counter(texts).most_common(1)[0][0]
        others = [rank for rank, text in enumerate(texts) if text != usual]
        if others:
            theirs, ours = _difference(json.loads(texts[others[0]]), json.loads(usual))
            named, like = f"rank {others[0]}", texts.index(usual)
            more = f" (and {len(others) - 1} other ranks differ)" if len(others) > 1 else ""
            raise GroupError(f"{named} differs from rank {like} in {what}: {theirs} on {named}, {ours} there{more}")

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Within a `with` block, calls wait for other processes without a limit of time."""
        self._wire.limit, before = math.inf, self._wire.limit
        try:
            yield
        finally:
            self._wire.limit = before

    def abort(self, why: str) -> None:
        """Ends all processes of the group, this one included.

        Args:
            why: the reason, which is printed with this process's rank.
        """
        self._wire.abort(why)

    def close(self) -> None:
        """Frees the communicators. All processes call it, after steps that use the group have been deleted."""
        while self._engines:
            self._engines.popitem()[1].close()
        self._wire.close()


def _difference(theirs: Any, ours: Any) -> tuple[str, str]:
    """Two values that differ, as an error shows them: the first differing entry of mappings, and the end of texts."""
    if isinstance(theirs, str) and isinstance(ours, str):
        pairs_of_characters = enumerate(zip(theirs, ours, strict=False))
        first = next((i for i, (one, other) in pairs_of_characters if one != other), min(len(theirs), len(ours)))
        start = max(0, first - _KEPT)
        theirs, ours = ("..." * (start > 0) + each[start:] for each in (theirs, ours))
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return shown(theirs), shown(ours)
    pairs = {key: (theirs.get(key, "missing"), ours.get(key, "missing")) for key in {**theirs, **ours}}
    # as JSON, in which also 1 and 1.0 differ
    key, pair = next(each for each in pairs.items() if len({*map(json.dumps, each[1])}) > 1)
    their, our = _difference(*pair)
    return f"{key} = {their}", f"{key} = {our}"


def group(*, timeout: float = 60.0) -> Group:
    """The group of all processes that mpiexec, srun or torchrun has started; of this process alone without a launcher.

    From then on, an exception that nothing catches in one process ends all of them.

    Args:
        timeout: seconds that a process waits for another one. Tuning and the first capture of a step do not count.

    Raises:
        ArgumentError: the timeout is not positive.
        MissingLibraryError: mpi4py or, for torchrun, PyTorch is not installed.
    """
    timeout = number("timeout", timeout)
    if not timeout > 0:
        raise ArgumentError(f"timeout is {shown(timeout)}; it must be positive")
    made = Group(_wire(timeout))
    if made.size > 1:
        _abort_after_exceptions(made)
    return made


def _wire(limit: float) -> Wire:
    # torchrun itself may have been started by srun or mpiexec
    if _ELASTIC not in os.environ and any(name in os.environ for name in _MPI):
        from lt_runtime.distributed.mpi import MpiWire

        return MpiWire(limit)
    if all(name in os.environ for name in _TORCHRUN):
        from lt_runtime.distributed.torchrun import StoreWire

        return StoreWire(limit)
    return Alone(limit)


def _abort_after_exceptions(made: Group) -> None:
    """Makes an exception that nothing catches end all processes, after Python has printed it.

    Without this, the other processes would wait for this one, and MPI_Finalize in this process would wait for them.
    """
    print_exception = sys.excepthook

    def end_all(kind: Any, value: Any, trace: Any) -> None:
        print_exception(kind, value, trace)
        made.abort(f"an exception: {kind.__name__}")

    sys.excepthook = end_all


def check_group(value: object) -> None:
    """Raises `KindError` unless an argument is None or a `Group`."""
    check_instance("group", value, (Group, type(None)), "None or what lt.group() returns")


@contextlib.contextmanager
def first_alone(group: Group | None, what: str) -> Iterator[bool]:
    """Context manager for work that process 0 alone does, while the others wait without a limit of time.

    Yields:
        Whether this process is to do the work: True in process 0, and without a group.

    Raises:
        GroupError: process 0 has failed. Process 0 itself raises its own error.
    """
    failure = None
    try:
        yield group is None or group.rank == 0
    except Exception as error:
        failure = error
    if group is not None:
        with group.patience():
            # `what` may name a different file in each process: only process 0 writes its file
            told = "" if failure is None else str(failure) or type(failure).__name__
            text = group.from_first(told.encode(), "the writing of a file").decode()
        if text and failure is None:
            raise GroupError(f"{what} has failed in process 0: {text}")
    if failure is not None:
        raise failure
