"""Resources that ptxas reports for a kernel variant on an architecture, and limits that no kernel may exceed."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from cuda.bindings import nvrtc

from lt_runtime.gpu import compiler
from lt_runtime.gpu.compiler import Macros
from lt_runtime.paths import kernel_sources

ARCHITECTURES: Final = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MAX_SHARED: Final = 48 << 10  # bytes of shared memory that a block may have by default


@dataclass(frozen=True)
class Variant:
    """A source file and the macros that it is compiled with."""

    source: str
    macros: Macros = ()

    def __str__(self) -> str:
        return "-".join([self.source, *(value.removeprefix("lt::") for _, value in self.macros)])


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel on one architecture, in bytes, registers apart.

    Attributes:
        registers: of a thread.
        spills: bytes of registers stored to and loaded from local memory.
        stack: local memory of a thread.
        shared: static shared memory of a block.
        parameters: size of the argument block.
        double: whether the kernel has FP64 arithmetic.
    """

    variant: str
    kernel: str
    architecture: str
    registers: int
    spills: int
    stack: int
    shared: int
    parameters: int
    double: bool

    @property
    def faults(self) -> list[str]:
        """Lists violations: spilled registers, FP64 arithmetic, more shared memory than every block may have."""
        found = {
            "spills registers": self.spills,
            "has a stack": self.stack,
            "computes in FP64": self.double,
            "takes too much shared memory": self.shared > MAX_SHARED,
        }
        return [
            f"{self.kernel} of {self.variant} for {self.architecture} {name}" for name, is_so in found.items() if is_so
        ]


Structs = Mapping[str, type[ctypes.Structure]]
"""The argument block's type of each kernel of a source, by the kernel's name."""


def faults(
    variants: Sequence[Variant], architectures: Sequence[str], structs: Structs, found: Sequence[Usage]
) -> list[str]:
    """Messages about kernels of one source that exceed limits; `found` must be all kernels that were compiled."""
    wanted = set(itertools.product(map(str, variants), structs, architectures))
    compiled = {(usage.variant, usage.kernel, usage.architecture): usage for usage in found}
    missing = [f"{kernel} of {variant} for {each} is missing" for variant, kernel, each in wanted - set(compiled)]
    unknown = [f"{kernel} of {variant} is not known to the runtime" for variant, kernel, _ in set(compiled) - wanted]
    sizes = {kernel: ctypes.sizeof(struct) for kernel, struct in structs.items()}
    other_size = [
        f"{kernel} of {variant} takes {usage.parameters} bytes; its struct in Python has {sizes[kernel]}"
        for (variant, kernel, _), usage in compiled.items()
        if kernel in sizes and usage.parameters != sizes[kernel]
    ]
    return [*missing, *unknown, *other_size, *(fault for usage in found for fault in usage.faults)]


def everywhere(variants: Sequence[Variant], architectures: Sequence[str]) -> list[Usage]:
    """Compiles the variants, in several threads at once; returns the usages of all of their kernels."""
    jobs = list(itertools.product(variants, architectures))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [usage for found in pool.map(lambda job: usages(*job), jobs) for usage in found]


def usages(variant: Variant, architecture: str) -> list[Usage]:
    """Compiles a variant with the package's own options; returns the usages of its kernels."""
    log, ptx = compile_to_ptx(variant, architecture)
    parameters = dict(re.findall(r"\.entry (\w+)\(\s*\.param \.align \d+ \.b8 \w+\[(\d+)\]\s*\)", ptx))
    sections = re.findall(r"entry function '(\w+)' for '\w+'\n(.*?)(?=entry function|\Z)", log, re.DOTALL)
    return [
        Usage(
            str(variant),
            kernel,
            architecture,
            registers=_total(r"Used (\d+) registers", said),
            spills=_total(r"(\d+) bytes spill", said),
            stack=_total(r"(\d+) bytes stack frame", said),
            shared=_total(r"(\d+) bytes smem", said),
            parameters=int(parameters.get(kernel, 0)),
            # Compiles the whole file to PTX, so that functions which a kernel calls without inlining count too.
            double=".f64" in ptx,
        )
        for kernel, said in sections
    ]


def _total(pattern: str, said: str) -> int:
    return sum(map(int, re.findall(pattern, said)))


def compile_to_ptx(variant: Variant, architecture: str) -> tuple[str, str]:
    """Returns the log of ptxas, and the PTX code."""
    options = compiler._options(variant.source, variant.macros, architecture)
    # With a driver, NVRTC keeps a cache, and there is no log of ptxas for a kernel that is found in it.
    flags = [*options, *compiler._include_paths(), b"--ptxas-options=-v", b"--no-cache"]
    code = (kernel_sources() / variant.source).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(code, variant.source.encode(), 0, [], []))
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, f"{variant} for {architecture}:\n{log.decode()}"
    ptx = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
    _checked(nvrtc.nvrtcGetPTX(program, ptx))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return log.decode(), ptx.decode()


def _checked(answer: tuple[object, ...]) -> object:
    status, *result = answer
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    return result[0] if result else None
