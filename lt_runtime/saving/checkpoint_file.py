"""The file of a checkpoint or of a model: arrays by name and a text, in the safetensors format, with a digest of both.

The library's own `save_file` is not used: it replaces the path, also a symbolic link, by a new file of mode 0600, and
its exceptions hide the system's error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lt_runtime.errors import CheckpointError, FileError, MissingFileError, printable
from lt_runtime.files import flush, opened, replacing

_TEXT: Final = "lt_runtime"
_DIGEST: Final = "lt_runtime.sha256"
"""`_TEXT` and `_DIGEST` are keys of the metadata. Earlier versions wrote only the text."""

_CODES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32"}
"""The names in safetensors of the NumPy types that a checkpoint may have."""
_NAMES: Final = {code: name for name, code in _CODES.items()}

_LENGTH_BYTES: Final = 8
_HEADER_LIMIT: Final = 4 << 20
"""Limit of a header's bytes: enough for thousands of layers, and parsed within a second. safetensors allows 100 MB."""

_MESSAGE_LIMIT: Final = 200


def write(path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]], text: str) -> None:
    """Replaces a file, or the target of a symbolic link, in one step. Returns when the new file is on the disk.

    Raises:
        CheckpointError: there are too many arrays.
        FileError: the file cannot be written.
    """
    # Arrays with larger elements come first, so that every array is aligned to its type.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    by_name = dict(sorted(arrays.items()))
    digest = _digest(text, {name: kind_of(array) for name, array in by_name.items()}, by_name.values())
    header = _header(ordered, {_TEXT: text, _DIGEST: digest})
    if len(header) > _HEADER_LIMIT:
        raise CheckpointError(
            f"{path} would need a header of {len(header)} bytes; at most {_HEADER_LIMIT} are accepted"
        )
    with _file_errors(path):
        target = Path(os.path.realpath(path))  # at the end of symbolic links; it need not exist
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        with replacing(target) as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for _, array in ordered:
                file.write(_bytes_of(array))
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
    """A file whose header has been read.

    Attributes:
        text: the file's text.
        kinds: types and shapes of its arrays, sorted by name.
    """

    def __init__(self, path: str | os.PathLike[str], file: Any) -> None:
        self._path, self._file, self._metadata = path, file, file.metadata()
        # Another key may be a damaged form of one of the two names.
        if self._metadata is None or self._metadata.keys() not in ({_TEXT}, {_TEXT, _DIGEST}):
            raise of_others(path)
        self.text: str = self._metadata[_TEXT]
        self.kinds: Kinds = {name: _kind_in(file, name) for name in sorted(file.keys())}

    def load(self, names: Collection[str]) -> dict[str, NDArray[Any]]:
        """Reads all arrays, one at a time, checks the file's digest, and returns the named arrays.

        A file of an earlier version has no digest: a warning is given at the line that called the public function.

        Raises:
            CheckpointError: the file is damaged, or its arrays need more memory than the machine has.
        """
        wanted, kept = set(names), dict[str, NDArray[Any]]()
        _check_memory(self._path, self.kinds, wanted)

        def arrays() -> Iterator[NDArray[Any]]:
            for name in self.kinds:
                array = self._file.get_tensor(name)
                if name in wanted:
                    kept[name] = array
                yield array

        digest = _digest(self.text, self.kinds, arrays())
        if _DIGEST not in self._metadata:
            found = f"{self._path} is of an earlier version, which saved no digest: damage goes unnoticed"
            warnings.warn(found, stacklevel=3)
        elif self._metadata[_DIGEST] != digest:
            raise CheckpointError(f"{self._path} is damaged: its content does not have the digest it was saved with")
        return kept


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[OpenFile]:
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
                yield OpenFile(path, file)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: {shortened(str(error))}") from error


def check_kinds(path: str | os.PathLike[str], found: Kinds, like: Kinds) -> None:
    """Raises `CheckpointError` unless a file has exactly the expected arrays."""
    for name in sorted(like.keys() ^ found.keys()):
        difference = f"no {name}" if name in like else f"{shortened(name)}, which there is not here"
        raise CheckpointError(f"{path} has {difference}")
    for name, kind in like.items():
        if found[name] != kind:
            raise CheckpointError(f"{path}: {name} is {shortened(str(found[name]))}; here it is {kind}")


def shortened(text: str) -> str:
    """Text from a file, for a message."""
    return printable(text, _MESSAGE_LIMIT)


def _header(arrays: Sequence[tuple[str, NDArray[Any]]], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays:
        start, end = end, end + array.nbytes
        described[name] = {"dtype": _CODES[array.dtype.name], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    return text + b" " * (-len(text) % _LENGTH_BYTES)


def _digest(text: str, kinds: Kinds, arrays: Iterable[NDArray[Any]]) -> str:
    """SHA-256 of the text and of all arrays' names, types, shapes and bytes, independent of their places in the file.

    Args:
        kinds: types and shapes of all arrays, sorted by name.
        arrays: the arrays in the same order.
    """
    digest = hashlib.sha256(json.dumps([text, *((name, *kind) for name, kind in kinds.items())]).encode())
    for array in arrays:
        digest.update(_bytes_of(array))
    return digest.hexdigest()


def _check_memory(path: str | os.PathLike[str], kinds: Kinds, names: Collection[str]) -> None:
    """Raises `CheckpointError` if the arrays need more than the available memory. A sparse file may claim any size."""
    sizes = {name: math.prod(kind.shape) * np.dtype(kind.dtype).itemsize for name, kind in kinds.items()}
    needed = sum(sizes[name] for name in names) + max(sizes.values(), default=0)
    memory = _available_memory()
    if needed > memory:
        raise CheckpointError(f"{path} takes {needed} bytes of memory to be read; this machine has {memory} available")


def _available_memory() -> int:
    """Bytes that Linux can give to processes without swapping; caches of files count as available."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def _kind_in(file: Any, name: str) -> Kind:
    part = file.get_slice(name)
    return Kind(_NAMES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def of_others(path: str | os.PathLike[str]) -> CheckpointError:
    """The error for a file that this package has not written."""
    return CheckpointError(f"{path} was not written by lt.save_checkpoint or lt.save_model")


@contextlib.contextmanager
def _file_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    name = os.fspath(path)
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise FileError(errno.EINVAL, "a path has no NUL and only characters of the file system's encoding", name)
    try:
        yield
    except OSError as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else FileError
        raise kind(error.errno, error.strerror or str(error), os.fspath(path)) from error
