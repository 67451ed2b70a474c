"""Reads and writes the safetensors file of a checkpoint or model: arrays by name, a text, and a digest of both.

The safetensors library's `save_file` is not used: it replaces the path, also a symbolic link, by a new file of mode
0600, and its exceptions hide the system's error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lt_runtime.errors import CheckpointError, DTypeError, FileError, MissingFileError, printable
from lt_runtime.files import AnyPath, file_path, flush, opened, replacing

_TEXT: Final = "lt_runtime"
_DIGEST: Final = "lt_runtime.sha256"
"""`_TEXT` and `_DIGEST` are the keys of the file's safetensors metadata."""

_CODES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32"}
"""The names in safetensors of the NumPy types that a checkpoint may have."""
_NAMES: Final = {code: name for name, code in _CODES.items()}

_LENGTH_BYTES: Final = 8
_HEADER_LIMIT: Final = 4 << 20
"""Limit of a header's bytes: enough for thousands of layers, and parsed within a second. safetensors allows 100 MB."""

_MESSAGE_LIMIT: Final = 200
Arrays: TypeAlias = Mapping[str, NDArray[Any]]
"""NumPy arrays, by name."""

_PIECE: Final = 4 << 20
"""Bytes that are read and hashed at once, a multiple of every type's size."""


def write(path: AnyPath, arrays: Arrays, text: str) -> None:
    """Replaces a file, or the target of a symbolic link, in one step. Returns when the new file is on the disk.

    Raises:
        DTypeError: an array has a type that files cannot hold; see `_CODES`.
        CheckpointError: there are too many arrays.
        FileError: the file cannot be written.
    """
    for name, array in arrays.items():
        if array.dtype.name not in _CODES:
            raise DTypeError(f"{path} is not written: {name} is {array.dtype}; files take {', '.join(_CODES)}")
    # Arrays with larger elements come first, so that every array is aligned to its type.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    by_name = dict(sorted(arrays.items()))
    digest = _digest(text, {name: kind_of(array) for name, array in by_name.items()})
    for array in by_name.values():
        digest.update(_bytes_of(array))
    header = _header(ordered, {_TEXT: text, _DIGEST: digest.hexdigest()})
    if len(header) > _HEADER_LIMIT:
        raise CheckpointError(
            f"{path} would need a header of {len(header)} bytes; at most {_HEADER_LIMIT} are accepted"
        )
    with _replacing_target(path) as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for _, array in ordered:
            file.write(_bytes_of(array))


def check_writable(path: AnyPath) -> None:
    """Raises `FileError` if a file cannot be made at a path; changes no file there."""
    with contextlib.suppress(_AbandonedError), _replacing_target(path):
        raise _AbandonedError


class _AbandonedError(Exception):
    """Ends the block of `_replacing_target` without a new file."""


@contextlib.contextmanager
def _replacing_target(path: AnyPath) -> Iterator[BinaryIO]:
    """Replaces a file as `replacing` does; follows symbolic links to their end, which need not exist."""
    with _file_errors(path):
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        with replacing(target) as file:
            yield file
        flush(target.parent)


class Kind(NamedTuple):
    """Type and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def kind_of(array: Any) -> Kind:
    """The type and shape of a NumPy or CuPy array."""
    return Kind(array.dtype.name, tuple(array.shape))


Kinds: TypeAlias = Mapping[str, Kind]
"""Types and shapes of arrays, by name."""


class OpenFile:
    """A checkpoint or model file whose header has been read.

    Attributes:
        text: the file's text.
        kinds: types and shapes of the file's arrays, sorted by name.
    """

    def __init__(self, path: AnyPath, file: Any, handle: int, start: int) -> None:
        self._path, self._handle, self._metadata = path, handle, file.metadata()
        if self._metadata is None or self._metadata.keys() != {_TEXT, _DIGEST}:
            raise of_others(path)
        self.text: str = self._metadata[_TEXT]
        self.kinds: Kinds = {name: _kind_in(file, name) for name in sorted(file.keys())}
        # Arrays lie one after another in the file: safetensors refuses gaps.
        self._start, self._order = start, file.offset_keys()

    def load(self, names: Collection[str]) -> dict[str, NDArray[Any]]:
        """Reads the file as `scan` does, and returns the named arrays.

        Raises:
            CheckpointError: see `scan`; or the arrays need more memory than the machine has.
        """
        self.require_memory(sum(size_of(self.kinds[name]) for name in names))
        kept = {name: np.empty(self.kinds[name].shape, np.dtype(self.kinds[name].dtype)) for name in names}

        def keep(name: str, at: int, piece: NDArray[Any]) -> None:
            if name in kept:
                kept[name].reshape(-1)[at : at + piece.size] = piece

        self.scan(keep)
        return kept

    def scan(self, use: Callable[[str, int, NDArray[Any]], None]) -> None:
        """Reads all arrays in pieces of `_PIECE` bytes, in the order of their names, and checks the file's digest.

        Args:
            use: function that is called for each piece with the array's name, the number of elements before the piece,
                and the flat piece.

        Raises:
            CheckpointError: the file is damaged. This is known only after `use` has been called with all pieces.
        """
        sizes = [size_of(self.kinds[name]) for name in self._order]
        starts = dict(zip(self._order, itertools.accumulate(sizes, initial=self._start), strict=False))
        digest = _digest(self.text, self.kinds)
        for name, kind in self.kinds.items():
            dtype = np.dtype(kind.dtype)
            for at in range(0, size_of(kind), _PIECE):
                piece = np.empty(min(_PIECE, size_of(kind) - at), np.uint8)
                if os.preadv(self._handle, [piece.data], starts[name] + at) < piece.size:
                    raise CheckpointError(f"{self._path} is damaged: it became shorter while it was read")
                digest.update(piece.data)
                use(name, at // dtype.itemsize, piece.view(dtype))
        if self._metadata[_DIGEST] != digest.hexdigest():
            raise CheckpointError(f"{self._path} is damaged: its content does not have the digest it was saved with")

    def require_memory(self, needed: int) -> None:
        """Raises `CheckpointError` if `needed` bytes are not free: a sparse file may claim arrays of any size."""
        available = _available_memory()
        if needed > available:
            complaint = f"takes {needed} bytes of memory to be read; this machine has {available} available"
            raise CheckpointError(f"{self._path} {complaint}")


@contextlib.contextmanager
def reading(path: AnyPath) -> Iterator[OpenFile]:
    """Opens a regular file with a header of accepted length, and reads the header.

    Raises:
        CheckpointError: the file is damaged, or is no file of this package.
        FileError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    with _file_errors(path), opened(path) as handle:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CheckpointError(f"{path} is no regular file")
        length = int.from_bytes(os.pread(handle, _LENGTH_BYTES, 0), "little")
        if length > _HEADER_LIMIT:
            found = f"its header would have {length} bytes; at most {_HEADER_LIMIT} are accepted"
            raise CheckpointError(f"{path} is damaged or no safetensors file: {found}")
        try:
            # The handle's path opens the file that was checked, even if the path has been replaced since. The backend
            # "pread" is used, because the library's default maps the file: if another process shortens a mapped file,
            # reading it kills this process.
            with safe_open(f"/proc/self/fd/{handle}", framework="np", backend="pread") as file:
                yield OpenFile(path, file, handle, _LENGTH_BYTES + length)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: {shortened(str(error))}") from error


def check_kinds(path: AnyPath, found: Kinds, like: Kinds) -> None:
    """Raises `CheckpointError` unless a file has exactly the expected arrays."""
    for name, kind in like.items():
        if found.get(name, kind) != kind:
            raise CheckpointError(f"{path}: {name} is {shortened(str(found[name]))}; here it is {kind}")
    for name in sorted(like.keys() ^ found.keys()):
        difference = f"no {name}" if name in like else f"{shortened(name)}, which there is not here"
        raise CheckpointError(f"{path} has {difference}")


def shortened(text: str) -> str:
    """Shortens and escapes a text from a file for an error message."""
    return printable(text, _MESSAGE_LIMIT)


def _header(arrays: Sequence[tuple[str, NDArray[Any]]], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays:
        start, end = end, end + array.nbytes
        described[name] = {"dtype": _CODES[array.dtype.name], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    return text + b" " * (-len(text) % _LENGTH_BYTES)


def _digest(text: str, kinds: Kinds) -> Any:
    """Begins the file's digest: SHA-256 of the text and of all arrays' names, types and shapes.

    The caller then adds the bytes of all arrays to the digest.

    Args:
        kinds: types and shapes of all arrays, sorted by name, the order in which their bytes are added. The digest does
            not depend on their places in the file.
    """
    return hashlib.sha256(json.dumps([text, *((name, *kind) for name, kind in kinds.items())]).encode())


def size_of(kind: Kind) -> int:
    """The number of bytes of an array of a type and shape."""
    return math.prod(kind.shape) * np.dtype(kind.dtype).itemsize


def _available_memory() -> int:
    """Bytes of memory that Linux can give to processes without swapping; caches of files count as available."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def _kind_in(file: Any, name: str) -> Kind:
    part = file.get_slice(name)
    return Kind(_NAMES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def of_others(path: AnyPath) -> CheckpointError:
    """Makes the error for a file that this package has not written."""
    return CheckpointError(f"{path} was not written by lt.save_checkpoint, lt.save_model or lt.save")


@contextlib.contextmanager
def _file_errors(path: AnyPath) -> Iterator[None]:
    file_path(path)
    try:
        yield
    except OSError as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else FileError
        raise kind(error.errno, error.strerror or str(error), os.fspath(path)) from error
