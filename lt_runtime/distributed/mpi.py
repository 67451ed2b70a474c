"""Groups of processes that mpiexec or srun has started: host values and NumPy arrays go through MPI (mpi4py)."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.distributed.protocols import Engine
from lt_runtime.errors import GroupError, MissingLibraryError

_SPINNING: Final = 2e-2
"""Seconds of a wait in which the process only yields its core; afterwards it sleeps between its looks."""
_PAUSE: Final = 2e-4
_BETWEEN_QUESTIONS: Final = 0.1
_GRACE: Final = 1.0
"""Seconds in which a waiting process answers another one's question."""
_TO_PRINT: Final = 0.2
"""Seconds between the message of the end and the end: mpiexec drops what it has not printed by then."""
_QUESTION, _ANSWER, _FAREWELL = 1, 2, 3
_SIZES: Final = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables of MPICH, Open MPI and srun that hold the number of processes."""


class MpiWire:
    """Exchanges values over MPI, see `Wire`; it is also the engine for NumPy arrays, see `Engine`.

    Each wait is a loop that looks at a nonblocking operation. A process that has waited for too long asks all others
    over a separate communicator; those that wait too answer from their loops, and all others are missing. A process
    that ends before `close` tells the others: a process that waits for it later aborts at once, not only at the limit.
    """

    def __init__(self, limit: float) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # a RuntimeError if there is no libmpi
            wanted = "pip install 'lt_runtime[mpi]', and an MPI library such as mpich"
            raise MissingLibraryError(f"processes of mpiexec or srun need mpi4py: {wanted} ({error})") from error
        self.limit, self._mpi = limit, MPI
        # Values of the host have a communicator of their own, so that a process whose order of calls differs waits.
        self._comm, self._values, self._questions = (MPI.COMM_WORLD.Dup() for _ in range(3))
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        self._count = 0  # number of the group's operations in which this process has taken part
        self._farewells = list[Any]()
        self._left = dict[int, int]()  # by rank: in how many operations a process took part before it ended
        atexit.register(self._leave)  # runs before MPI_Finalize, which waits for the other processes
        started = max(int(os.environ.get(name) or 1) for name in _SIZES)
        if started > 1 == self.size:
            found = MPI.Get_library_version().splitlines()[0]
            raise GroupError(f"the launcher has started {started} processes; mpi4py's MPI ({found}) sees only this one")

    def gather(self, value: bytes, what: str) -> list[bytes]:
        """See `Wire.gather`."""
        sizes, own = np.zeros(self.size, np.int64), np.array([len(value)], np.int64)
        self._wait(self._values.Iallgather(own, sizes), what)
        ends = np.cumsum(sizes)
        found = np.empty(int(ends[-1]), np.uint8)
        layout = [found, (sizes, ends - sizes), self._mpi.BYTE]
        self._wait(self._values.Iallgatherv([np.frombuffer(value, np.uint8), self._mpi.BYTE], layout), what)
        return [each.tobytes() for each in np.split(found, ends[:-1])]

    def host_engine(self) -> Engine:
        """The wire itself."""
        return self

    def sum(self, arrays: Sequence[NDArray[Any]], stream: int | None = None) -> None:
        """See `Engine.sum`. Sums of 16-bit numbers are computed in FP32, and rounded once."""
        for array in arrays:
            is_short = array.itemsize == 2
            total = array.astype(np.float32) if is_short else array
            self._wait(self._comm.Iallreduce(self._mpi.IN_PLACE, total), "a sum of arrays")
            if is_short:
                with np.errstate(all="ignore"):
                    array[...] = total.astype(array.dtype)

    def maximum(self, arrays: Sequence[NDArray[Any]], stream: int | None = None) -> None:
        """See `Engine.maximum`."""
        for array in arrays:
            self._wait(self._comm.Iallreduce(self._mpi.IN_PLACE, array, self._mpi.MAX), "a maximum of arrays")

    def reduce(self, arrays: Sequence[NDArray[Any]], owner: int, stream: int | None = None) -> None:
        """See `Engine.reduce`."""
        self.sum(arrays)  # MPI may add up in another order for one process, and the bits would differ from `sum`

    def broadcast(self, arrays: Sequence[NDArray[Any]], root: int, stream: int | None = None) -> None:
        """See `Engine.broadcast`."""
        for array in arrays:
            self._wait(self._comm.Ibcast([array.reshape(-1).view(np.uint8), self._mpi.BYTE], root), "a broadcast")

    def abort(self, why: str) -> None:
        """See `Wire.abort`."""
        sys.stderr.write(f"lt_runtime: rank {self.rank} of {self.size} ends all processes: {why}\n")
        for stream in (sys.stderr, sys.stdout):
            stream.flush()
        time.sleep(_TO_PRINT)
        self._mpi.COMM_WORLD.Abort(1)

    def close(self) -> None:
        """See `Wire.close`. MPI itself ends with the process."""
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Tells the other processes that this one ends, and in how many operations it has taken part."""
        others = [] if self._mpi.Is_finalized() else [rank for rank in range(self.size) if rank != self.rank]
        self._farewells = [self._questions.isend(self._count, rank, tag=_FAREWELL) for rank in others]

    def _wait(self, request: Any, what: str) -> None:
        """Waits for an operation, and answers questions of processes that have waited for too long."""
        self._count += 1
        began = time.monotonic()
        looked = began
        while not request.Test():
            now = time.monotonic()
            time.sleep(0 if now - began < _SPINNING else _PAUSE)
            if now - looked > _BETWEEN_QUESTIONS:
                looked = now
                self._answer(what)
                if now - began > self.limit:
                    self.abort(self._missing(what))

    def _answer(self, what: str) -> None:
        status = self._mpi.Status()
        while self._questions.iprobe(tag=_QUESTION, status=status):
            self._questions.recv(source=status.source, tag=_QUESTION)
            self._questions.send((self._count, what), status.source, tag=_ANSWER)
        while self._questions.iprobe(tag=_FAREWELL, status=status):
            self._left[status.source] = self._questions.recv(source=status.source, tag=_FAREWELL)
        # A process that has ended is missing only if it took part in fewer operations than this one.
        if gone := [rank for rank, count in self._left.items() if count < self._count]:
            self.abort(f"it waits for {what}, and rank {', '.join(map(str, gone))} has ended")

    def _missing(self, what: str) -> str:
        """Says which processes keep this one waiting: those that give no answer, or that wait for something else."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [self._questions.isend(None, rank, tag=_QUESTION) for rank in others]
        answers, end = dict[int, tuple[int, str]](), time.monotonic() + _GRACE
        while time.monotonic() < end and len(answers) < len(others):
            self._answer(what)
            for rank in others:
                if rank not in answers and self._questions.iprobe(source=rank, tag=_ANSWER):
                    answers[rank] = self._questions.recv(source=rank, tag=_ANSWER)
            time.sleep(_PAUSE)
        del sent
        late = f"has waited {self.limit:g} s for {what}"
        if absent := [rank for rank in others if rank not in answers]:
            return f"it {late}, to which rank {', '.join(map(str, absent))} has not come"
        rank, (count, theirs) = min(answers.items(), key=lambda each: (each[1] == (self._count, what), each[1]))
        return f"it {late} (call {self._count}), while rank {rank} waits for {theirs} (call {count})"
