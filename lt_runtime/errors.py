"""The exceptions of lt_runtime.

::

    LtError
    ├── ArgumentError (ValueError)      a scalar option is not one of the accepted values
    │   └── KindError (TypeError)       it is of another type than the accepted values
    ├── FixedError (AttributeError)     an attribute was set that cannot be changed
    ├── OperandError (ValueError)       an array or pointer cannot be used as it is
    │   ├── ShapeError                  its shape does not fit the others
    │   ├── DTypeError                  its type is unsupported or differs from the others'
    │   ├── LayoutError                 neither axis has unit stride, or rows overlap
    │   ├── AlignmentError              its address is not a multiple of what its type needs
    │   ├── DeviceError                 it is on another device than the others
    │   └── OverlapError                an output shares memory with an input
    ├── CheckpointError (ValueError)    a file is damaged, or is a checkpoint of another model
    ├── FileError (OSError)             a file cannot be read or written
    │   └── MissingFileError (FileNotFoundError)    there is none
    ├── MissingLibraryError (ImportError)   a library that this call needs is not installed
    ├── GroupError (RuntimeError)       the processes of a group differ, or one of them is missing
    ├── CaptureError (RuntimeError)     the call cannot be made while a stream is being captured
    └── GpuError (RuntimeError)         the driver, the compiler or cuBLASLt reported a failure
        ├── DriverError                 a CUDA driver call failed
        ├── CompileError                NVRTC rejected a kernel
        ├── CublasLtError               a cuBLASLt call failed
        ├── CuptiError                  CUPTI cannot look at the GPU, or one of its calls failed
        └── PlanError                   cuBLASLt has no algorithm for a matrix product

Everything except `GpuError` and `FileError` is raised before anything is launched or written. A `FileError` leaves the
file as it was.
"""

from __future__ import annotations

from typing import ClassVar


def printable(text: str, limit: int = 8000) -> str:
    """Shortens and escapes a text for people, because it may quote a file, a driver or a caller.

    Characters that are not printable, such as ESC and halves of surrogate pairs, become escapes; ends of lines stay.

    Args:
        limit: characters beyond which the middle of the text is left out.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]} … {text[-limit // 2 :]}"
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


class LtError(Exception):
    """The base of every exception that lt_runtime raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ArgumentError(LtError, ValueError):
    """A scalar option is not one of the accepted values."""


class KindError(ArgumentError, TypeError):
    """An argument is of another type than what is accepted: a string for a number, an array for a parameter."""


class FixedError(LtError, AttributeError):
    """An attribute was set that cannot be changed once its object is made, or that the object does not have."""


class OperandError(LtError, ValueError):
    """An array or pointer cannot be used as it is."""


class ShapeError(OperandError):
    """An operand's shape does not fit the others."""


class DTypeError(OperandError):
    """An operand's type is unsupported, or differs from the others'."""


class LayoutError(OperandError):
    """Neither axis of an operand has unit stride, or its rows overlap."""


class AlignmentError(OperandError):
    """An address is not a multiple of what its type needs."""


class DeviceError(OperandError):
    """An operand is on another device than the others."""


class OverlapError(OperandError):
    """An output shares memory with an input, or with another output."""


class CheckpointError(LtError, ValueError):
    """A file is damaged, or is no checkpoint of this model and optimizer; or a state cannot be saved."""


class FileError(LtError, OSError):
    """A file cannot be read or written; `errno`, `strerror` and `filename` say why, and which."""


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file or directory."""


class MissingLibraryError(LtError, ImportError):
    """A library that this call needs is not installed; the message says what to install."""


class GroupError(LtError, RuntimeError):
    """The processes of a group differ in a value that must be equal, or cannot work together."""


class CaptureError(LtError, RuntimeError):
    """The call cannot be made while a stream is being captured."""


class GpuError(LtError, RuntimeError):
    """The driver, the compiler or cuBLASLt reported a failure.

    Attributes:
        aftermath: end of the messages of `DriverError` and `CublasLtError`; empty until the CUDA context is lost.
    """

    aftermath: ClassVar[str] = ""


class DriverError(GpuError):
    """A CUDA driver call failed; `status` is its `CUresult` as an int, and `name` that status's name."""

    def __init__(self, call: str, status: int, name: str, explanation: str) -> None:
        super().__init__(f"{call} failed with {name} ({status}): {explanation}{self.aftermath}")
        self.call, self.status, self.name = call, status, name


class CompileError(GpuError):
    """NVRTC rejected a kernel; `log` is the compiler's output."""

    def __init__(self, kernel: str, log: str) -> None:
        super().__init__(f"NVRTC could not compile {kernel}:\n{log}")
        self.kernel, self.log = kernel, log


class CublasLtError(GpuError):
    """A cuBLASLt call failed; `status` is its `cublasStatus_t` as an int, and `name` that status's name."""

    def __init__(self, call: str, status: int, name: str, explanation: str) -> None:
        super().__init__(f"{call} returned {name} ({status}): {explanation}{self.aftermath}")
        self.call, self.status, self.name = call, status, name


class CuptiError(GpuError):
    """CUPTI, which profiles, cannot be used here, or a call of it failed; nothing but the profile is lost."""


class PlanError(GpuError):
    """cuBLASLt offers no usable algorithm for a matrix product."""
