"""Groups of processes that torchrun has started: host values go through torchrun's store."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Final

from lt_runtime.distributed.protocols import Engine
from lt_runtime.errors import GroupError, MissingLibraryError

_LONGEST: Final = 1e7
"""Seconds of the longest wait that the store accepts for certain; about four months."""


class StoreWire:
    """Exchanges values over the store of torchrun's rendezvous, see `Wire`."""

    def __init__(self, limit: float) -> None:
        try:
            from torch import distributed
        except ImportError as error:
            raise MissingLibraryError(f"processes of torchrun need PyTorch: pip install torch ({error})") from error
        store, self.rank, self.size = next(distributed.rendezvous("env://"))
        self._store = distributed.PrefixStore("lt_runtime", store)
        self.limit, self._count = limit, 0

    def gather(self, value: bytes, what: str) -> list[bytes]:
        """See `Wire.gather`."""
        keys = [f"{self._count}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], value)
        try:
            self._store.wait(keys, timedelta(seconds=min(self.limit, _LONGEST)))
        except RuntimeError as error:
            absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            reason = f"rank {', '.join(absent)} has not come" if absent else f"the store has failed ({error})"
            self.abort(f"it has waited {self.limit:g} s for {what}, to which {reason}")
        if self._count > 1:  # values of the call before the last can be deleted: all processes have read them
            self._store.delete_key(f"{self._count - 2}/{self.rank}")
        self._count += 1
        return [bytes(self._store.get(key)) for key in keys]

    def host_engine(self) -> Engine:
        """See `Wire.host_engine`."""
        raise GroupError("NumPy arrays travel over MPI, which torchrun does not start; use mpiexec or srun")

    def abort(self, why: str) -> None:
        """See `Wire.abort`. torchrun ends the other processes when it sees the end of this one."""
        sys.stderr.write(f"lt_runtime: rank {self.rank} of {self.size} ends all processes: {why}\n")
        for stream in (sys.stderr, sys.stdout):
            stream.flush()
        os._exit(1)

    def close(self) -> None:
        """See `Wire.close`. The store ends with torchrun."""
