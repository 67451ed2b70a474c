"""The device of a model: the host or one GPU."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lt_runtime.arrays.libraries import cupy
from lt_runtime.arrays.operand import HOST, Operand, on_host, read
from lt_runtime.errors import CaptureError, DeviceError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle

_PATIENCE_S: Final = 2.0
_CAPTURING: Final = 900  # the number of cudaErrorStreamCaptureUnsupported


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """The host (`ordinal` None, NumPy) or a GPU (CuPy)."""

    ordinal: int | None

    @property
    def type(self) -> str:
        """The kind of device as in `torch.device`: "cpu" or "cuda"."""
        return "cpu" if self.ordinal is None else "cuda"

    @property
    def index(self) -> int | None:
        """The GPU's ordinal, None for the host, as `torch.device.index`."""
        return self.ordinal

    @property
    def name(self) -> str:
        """The device as a string, such as "cpu" or "cuda:0"."""
        return "cpu" if self.ordinal is None else f"cuda:{self.ordinal}"

    @property
    def description(self) -> str:
        """The name with the GPU's model, such as "cpu" or "cuda:0 (NVIDIA H200)"."""
        return self.name if self.ordinal is None else f"{self.name} ({device_info(self.ordinal).name})"

    def current(self) -> AbstractContextManager[Any]:
        """Context manager that makes this device CuPy's current one; does nothing on the host."""
        return contextlib.nullcontext() if self.ordinal is None else cupy().cuda.Device(self.ordinal)

    def asarray(self, array: np.ndarray[Any, Any]) -> Any:
        """Copies a NumPy array to this device, and waits for the copy; on the host returns the array itself."""
        if self.ordinal is None:
            return array
        with self.current():
            copy = cupy().asarray(array)
            # waits for the copy, because work on any stream may read it
            call("cuStreamSynchronize", stream_handle(None, self.ordinal))
            return copy

    def read(self, name: str, array: Any, stream: int) -> Operand:
        """Reads an array as an operand; raises `DeviceError`, with a remedy, if it is not on this device."""
        if self.ordinal is None:
            # raises for arrays on a GPU, even on a machine without a driver
            on_host({"the model": np.empty(0), name: array})
        operand = read(name, array, stream)
        if operand.device == (HOST if self.ordinal is None else self.ordinal):
            return operand
        if operand.device == HOST:
            found = f"{name} is a NumPy array, the model is on {self.description}"
            raise DeviceError(f"{found}; cupy.asarray({name}) copies it there, and lt.prefetch does so for batches")
        found = f"{name} is {operand.place}, the model on {self.description}"
        raise DeviceError(
            f"{found}; within `with cupy.cuda.Device({self.ordinal}):` cupy.array({name}) copies it there"
        )

    def synchronize(self) -> None:
        """Waits for all work on the device.

        CUDA cannot wait for a device while a thread captures a graph: the wait is tried again for up to 2 s.

        Raises:
            CaptureError: a capture lasts longer than 2 s. Each attempt has invalidated the captures in progress.
        """
        if self.ordinal is None:
            return
        cuda, end = cupy().cuda, time.monotonic() + _PATIENCE_S
        while True:
            try:
                cuda.Device(self.ordinal).synchronize()
                return
            except cuda.runtime.CUDARuntimeError as error:
                if error.status != _CAPTURING:
                    raise
                if time.monotonic() > end:
                    raise CaptureError(f"a stream of {self.description} is being captured: {error}") from error
            time.sleep(1e-3)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Returns an array of this device as a NumPy array; waits until a GPU has computed it."""
        host: np.ndarray[Any, Any] = array if self.ordinal is None else cupy().asnumpy(array)
        return host
