"""Counts the calls of cuBLASLt, the driver and NVRTC on a pretended GPU, counts open objects, and makes one call
fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

CLOSED_BY: Final = {
    "cuCtxPushCurrent": "cuCtxPopCurrent",
    "cuEventCreate": "cuEventDestroy",
    "cuGraphInstantiate": "cuGraphExecDestroy",
    "cuMemAlloc": "cuMemFree",
    "cuStreamBeginCapture": "cuStreamEndCapture",
    "cuStreamCreate": "cuStreamDestroy",
    "cuStreamEndCapture": "cuGraphDestroy",
    "cublasLtCreate": "cublasLtDestroy",
    "cublasLtMatmulDescCreate": "cublasLtMatmulDescDestroy",
    "cublasLtMatmulPreferenceCreate": "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatrixLayoutCreate": "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixTransformDescCreate": "cublasLtMatrixTransformDescDestroy",
    "nvrtcCreateProgram": "nvrtcDestroyProgram",
}
"""Calls that close an object, by the calls that open it."""
_CLOSING: Final = frozenset(CLOSED_BY.values())
_TEXT: Final = "cuGetErrorString"


class LibraryCalls:
    """Counts calls that return a status, and makes one fail. Threads may call at the same time.

    A call that fails does nothing, unless it closes an object: the libraries close the object nevertheless, and the
    status reports an earlier failure.

    Attributes:
        names: names of the calls made, in their order.
        fail_at: index of the call that is to fail; None if no call is.
        failed: the name of the call that failed.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.fail_at: int | None = None
        self.failed: str | None = None
        self._made: Counter[str] = Counter()
        self._lock = threading.Lock()

    def begin(self, fail_at: int | None = None) -> None:
        """Starts counting calls at 0 again. Open objects stay counted."""
        with self._lock:
            self.names, self.fail_at, self.failed = [], fail_at, None

    def counted(self, name: str, run: Callable[..., Any], failure: Any, is_good: Callable[[Any], bool]) -> Any:
        """Wraps a function so that its calls are counted.

        Args:
            failure: the result of a call that is made to fail.
            is_good: whether a result reports success.
        """
        if name == _TEXT:
            return run

        def counted(*arguments: Any) -> Any:
            with self._lock:
                fails = len(self.names) == self.fail_at
                self.names.append(name)
                if fails:
                    self.failed = name
            if fails and name not in _CLOSING:
                return failure
            result = run(*arguments)
            succeeded = is_good(result) and not fails
            with self._lock:
                self._made[name] += succeeded or name in _CLOSING
                if name in _CLOSING and name in CLOSED_BY and not succeeded:
                    self._made[CLOSED_BY[name]] += 1  # a capture that fails to end leaves no open graph
            return failure if fails else result

        return counted

    def open(self) -> Counter[str]:
        """The number of open objects, by the call that opened them."""
        with self._lock:
            return Counter({name: self._made[name] - self._made[closes] for name, closes in CLOSED_BY.items()})
