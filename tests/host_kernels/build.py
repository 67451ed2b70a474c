"""Builds kernel files into shared libraries for the CPU with g++; a library is built again only after a change."""

from __future__ import annotations

import enum
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lt_runtime.gpu.compiler import Macros, runtime_headers
from lt_runtime.paths import kernel_sources

HERE: Final = Path(__file__).resolve().parent
SHIM: Final = HERE / "shim"
_ROOT: Final = HERE.parents[1]
COMPILER: Final = os.environ.get("CXX", "g++")

_FLAGS: Final = (
    *("-std=c++17", "-Og", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    # G++ must not warn of `#pragma unroll`, which it does not know.
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
)
_ENTRY: Final = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\((\w+)[\w:, ]*\) )?(\w+)\(')
_MAX_THREADS: Final = 1024


class BuildError(Exception):
    """Raised when g++ refuses a kernel."""


class Sanitizer(enum.Enum):
    """A sanitizer of g++, which a library is built with."""

    NONE = "none"
    ADDRESS = "address"
    THREAD = "thread"

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options of the sanitizer."""
        return {
            # The shim's fibers.cpp reports a misaligned access. Code that cannot go on after it is compiled faster.
            Sanitizer.NONE: ("-fsanitize=alignment", "-fno-sanitize-recover=alignment"),
            Sanitizer.ADDRESS: (
                *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
                "-fsanitize-sections=shared_memory",
            ),
            Sanitizer.THREAD: ("-fsanitize=thread", "-DLT_SANITIZE_THREAD"),
        }[self]

    @property
    def runtime_library(self) -> str:
        """The runtime library that a program must load before a library with this sanitizer."""
        name = {Sanitizer.ADDRESS: "libasan.so", Sanitizer.THREAD: "libtsan.so"}[self]
        return _output_of(f"-print-file-name={name}").strip()


BUILD_DIRECTORY: Final = "LT_HOST_BUILD_DIRECTORY"
"""Environment variable that names the directory of the built libraries; by default it is in pytest's cache."""

SANITIZER: Final = Sanitizer(os.environ.get("LT_HOST_SANITIZER", "none"))
"""The sanitizer that this process's kernels are built with, from LT_HOST_SANITIZER: "address" or "thread"."""


@dataclass(frozen=True)
class Variant:
    """A kernel file with the macros with which it is compiled.

    Attributes:
        source: a file of `cuda_src` or of this directory's `kernels`.
    """

    source: str
    macros: Macros = ()

    @property
    def path(self) -> Path:
        ours = kernel_sources() / self.source
        return ours if ours.is_file() else HERE / "kernels" / self.source

    @property
    def entries(self) -> list[str]:
        """Names of the file's kernels."""
        return [entry for _, entry in self._found]

    @property
    def _found(self) -> list[tuple[str, str]]:
        return _ENTRY.findall(self.path.read_text())

    @property
    def max_threads(self) -> dict[str, int]:
        """Threads that a block of each of the file's kernels may have, by `__launch_bounds__`."""
        macros = dict(self.macros)
        return {entry: int(macros.get(bound, bound) or _MAX_THREADS) for bound, entry in self._found}


class Builder:
    """Builds shared libraries in one directory, which other processes may share."""

    def __init__(self, directory: Path, sanitizer: Sanitizer = SANITIZER) -> None:
        self._directory = directory
        self._sanitizer = sanitizer

    def library(self, variant: Variant) -> Path:
        """Builds the shared library with the kernels of `variant`, unless it exists; returns its path."""
        arguments = ["-shared", *self._included(variant), "-nodefaultlibs", "-Wl,--no-as-needed,-rpath,$ORIGIN"]
        arguments += [f"-L{self._directory}", f"-l:{self._needed.name}"]
        return self._build(f"{variant.path.stem}.so", arguments, [variant.path], [SHIM / "entry.cpp", *self._runtime])

    def check(self, variant: Variant) -> None:
        """Compiles the kernels of `variant` as far as their static assertions, and writes nothing.

        Raises:
            BuildError: the compiler's messages.
        """
        _run([*self._command, "-fsyntax-only", *self._included(variant), str(SHIM / "entry.cpp")])

    def _included(self, variant: Variant) -> list[str]:
        """Options that include the precompiled header and the macros of a variant."""
        macros = {**dict(variant.macros), "KERNEL_FILE": f'"{variant.path.name}"'}
        macros["ENTRIES"] = " ".join(f"EXPORT({entry})" for entry in variant.entries)
        # g++ refuses a precompiled header whose text uses a name that is a macro on the command line, such as WIDTH in
        # libstdc++.
        defined = self._written("macros.h", "".join(f"#define {name} {value}\n" for name, value in macros.items()))
        return ["-Winvalid-pch", "-include", str(self._header.with_suffix("")), "-include", str(defined)]

    def _written(self, name: str, text: str) -> Path:
        """Writes a text to a file whose name is the text's digest; returns the file."""
        file = self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{name}"
        partial = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        partial.write_text(text)
        return partial.replace(file)

    @functools.cached_property
    def _header(self) -> Path:
        """Compiles the header that every library includes."""
        return self._build("precompiled.h.gch", ["-x", "c++-header"], [], [SHIM / "precompiled.h"])

    @functools.cached_property
    def _needed(self) -> Path:
        """Builds an empty library that needs the libraries which g++ links by default.

        The kernels' libraries need this one alone, because the linker takes a fifth of a build to read libstdc++.
        """
        return self._build("needed.so", ["-shared", "-x", "c++", "/dev/null", "-Wl,--no-as-needed"], [], [])

    @functools.cached_property
    def _runtime(self) -> list[Path]:
        """Builds the object file that every library is linked with."""
        files = [SHIM / "launch.cpp", SHIM / "warp.cpp", SHIM / "fibers.cpp"]
        # The shim's runtime tells ThreadSanitizer how threads are ordered; it is not itself instrumented.
        options = ["-c", "-O2", "-fno-sanitize=thread,alignment"]
        return [self._build(f"{file.stem}.o", options, [], [file]) for file in files]

    def _build(self, name: str, arguments: Sequence[str], included: Sequence[Path], inputs: Sequence[Path]) -> Path:
        command = [*self._command, *arguments]
        read = [*inputs, *included, *sorted(SHIM.glob("*.h")), *sorted(kernel_sources().glob("*.cuh"))]
        places = (str(self._directory), runtime_headers(), str(_ROOT))
        key = _digest(
            [functools.reduce(lambda text, place: text.replace(place, ""), places, argument) for argument in command],
            read,
        )
        return _once(self._directory / f"{key}-{name}", [*command, *map(str, inputs)])

    @property
    def _command(self) -> list[str]:
        """The command line of the compiler with the options of every build."""
        headers = (SHIM, HERE / "kernels", kernel_sources())
        found = [*(f"-I{path}" for path in headers), "-isystem", runtime_headers()]
        # Libraries do not contain the path of the checkout or of the toolkit, so that copies of the checkout share
        # them.
        return [COMPILER, *_FLAGS, *self._sanitizer.options, *found, f"-ffile-prefix-map={_ROOT}=."]


def _digest(command: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((compiler_version(), command)).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compiler_version() -> str:
    """The text by which the compiler describes its version."""
    return _output_of("--version")


@functools.cache
def _output_of(option: str) -> str:
    return subprocess.run([COMPILER, option], check=True, capture_output=True, text=True, env=_own_environment()).stdout


def _own_environment() -> dict[str, str]:
    """The environment without LD_PRELOAD: some compilers crash under a preloaded sanitizer."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def _once(target: Path, command: Sequence[str]) -> Path:
    """Runs the command that writes `target`, unless the file exists. The lock excludes other threads and processes."""
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(f"{target.suffix}.partial")
            _run([*command, "-o", str(partial)])
            partial.rename(target)
    return target


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_own_environment())
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
