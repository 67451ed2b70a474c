"""Every kernel compiles for every architecture without spilling registers, and takes the struct that ctypes has."""

from __future__ import annotations

import ctypes
import io
import re
from dataclasses import dataclass, replace

import pytest
from cuda.bindings import nvrtc
from cuda.core import Program

from lt_runtime.gpu import compiler, kernels
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.params import SCALAR
from lt_runtime.paths import kernel_sources
from lt_runtime.planning import launches
from lt_runtime.planning.launches import ACTIVATION_NAMES
from lt_runtime.planning.tiling import access_macros

F32, F16, BF16 = "float", "__half", "__nv_bfloat16"
ENTRIES: dict[str, dict[str, type[ctypes.Structure]]] = {}
"""Kernels of a source, with the structs that they take."""
for _entry, (_source, _params) in kernels._SOURCES.items():
    ENTRIES.setdefault(_source, {})[_entry] = _params


@dataclass(frozen=True)
class Variant:
    """A source with its definitions."""

    source: str
    macros: Macros = ()

    def __str__(self) -> str:
        return "-".join([self.source, *(value.removeprefix("lt::") for _, value in self.macros)])


def dropping(kind: str, aligned: bool) -> Variant:
    return Variant("dropout.cu", (("SCALAR", kind), *access_macros(aligned, 6)))


def _epilogue(kind: str, activation: str, dropout: int) -> Macros:
    return (("SCALAR", kind), ("ACTIVATION", ACTIVATION_NAMES[activation]), ("DROPOUT", str(dropout)))


def forward(kind: str, activation: str, dropout: int, keep: int = 0, aligned: bool = True) -> Variant:
    blocks = launches._FORWARD_BLOCKS - keep
    macros = (*_epilogue(kind, activation, dropout), ("KEEP", str(keep)), *access_macros(aligned, blocks))
    return Variant("epilogue_fwd.cu", macros)


def backward(kind: str, activation: str, dropout: int, saved: int, dz: int = 1, aligned: bool = True) -> Variant:
    blocks = {SCALAR[dtype]: blocks for dtype, blocks in launches._BACKWARD_BLOCKS.items()}[kind]
    written = (("SAVED", str(saved)), ("DZ", str(dz)))
    return Variant(
        "epilogue_bwd.cu", (*_epilogue(kind, activation, dropout), *written, *access_macros(aligned, blocks))
    )


def loss(kind: str, label: str) -> Variant:
    return Variant("loss.cu", (("SCALAR", kind), ("LABEL", label)))


def product(kind: str, operand: str, activation: str) -> Variant:
    macros = (("SCALAR", kind), ("OPERAND", operand), ("ACTIVATION", ACTIVATION_NAMES[activation]))
    return Variant("matmul_epilogue.cu", macros)


HEAVIEST = [
    Variant("adamw.cu"),
    dropping(F32, aligned=True),
    loss(BF16, "long long"),
    forward(F32, "gelu_erf", 1, keep=1),
    backward(BF16, "gelu", 1, 1, dz=2),
    product(BF16, F16, "gelu"),
]
"""One of each source."""

OTHERS = [
    dropping(F16, aligned=True),
    dropping(F32, aligned=False),
    dropping(BF16, aligned=False),
    loss(F32, "int"),
    forward(F16, "none", 0),
    forward(BF16, "silu", 0, keep=1),
    forward(BF16, "gelu_erf", 1, keep=1),
    *(forward(kind, "gelu_erf", 1, keep=1, aligned=False) for kind in (F32, BF16)),
    *(forward(F32, name, 1) for name in ("relu", "leaky_relu", "sigmoid", "tanh", "gelu", "silu")),
    backward(F32, "none", 1, 0),
    backward(F16, "none", 0, 0),
    *(backward(F32, name, 1, 1) for name in ("relu", "leaky_relu", "gelu_erf", "silu")),
    *(backward(kind, "gelu_erf", 1, 1, dz) for kind in (F32, F16) for dz in (0, 1, 2)),
    *(backward(kind, "gelu_erf", 1, 1, dz, aligned=False) for kind in (F32, BF16) for dz in (0, 1, 2)),
    *(backward(BF16, name, 0, 2) for name in ("relu", "sigmoid", "tanh")),
    product(F32, F32, "none"),
    product(F32, BF16, "relu"),
]
ON_EVERY_ARCHITECTURE = [
    (variant, architecture) for variant in HEAVIEST for architecture in ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
]
CASES = [*ON_EVERY_ARCHITECTURE, *((variant, "sm_90") for variant in OTHERS)]


def report(variant: Variant, architecture: str) -> str:
    """What ptxas says of a variant under the package's own options."""
    options = replace(compiler._options(variant.source, variant.macros, architecture), ptxas_options=["-v"])
    code, log = (kernel_sources() / variant.source).read_text(), io.StringIO()
    Program(code, "c++", options=options).compile("cubin", logs=log)
    return log.getvalue()


def ptx(variant: Variant) -> str:
    """The intermediate code, for which `Program` would ask the driver's version."""
    options = compiler._options(variant.source, variant.macros, "sm_90").as_bytes("nvrtc")
    code = (kernel_sources() / variant.source).read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(code, variant.source.encode(), 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    assert nvrtc.nvrtcCompileProgram(program, len(options), options)[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text: bytes = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


def test_every_source_is_among_the_variants() -> None:
    files = {file.name for file in kernel_sources().glob("*.cu")}
    assert {variant.source for variant in HEAVIEST} == set(ENTRIES) == files


@pytest.mark.parametrize(("variant", "architecture"), CASES, ids=str)
def test_nothing_spills(variant: Variant, architecture: str) -> None:
    log = report(variant, architecture)
    reported = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", log)
    assert {entry for entry, _ in reported} == set(ENTRIES[variant.source])
    assert {target for _, target in reported} == {architecture}
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) >= len(reported)
    assert set(spills) == {("0", "0")}, log


@pytest.mark.parametrize("variant", HEAVIEST, ids=str)
def test_structs_are_as_large_as_the_kernels_have_them(variant: Variant) -> None:
    sizes = dict(re.findall(r"\.entry (\w+)\(\s*\.param \.align \d+ \.b8 \w+\[(\d+)\]\s*\)", ptx(variant)))
    expected = {entry: str(ctypes.sizeof(params)) for entry, params in ENTRIES[variant.source].items()}
    assert sizes == expected


@pytest.mark.parametrize("shape", [(1, 1), (1, 10**6), (10**6, 1), (7, 300), (300, 7), (65536, 8), (3, 1025)])
def test_tiles_fill_a_block_and_no_more(shape: tuple[int, int]) -> None:
    rows, cols = shape
    x, y = kernels.tile(rows, cols)
    assert x * y <= kernels.THREADS
    assert x & (x - 1) == y & (y - 1) == 0, "powers of two"
    assert (x - 1) * kernels.OCTET < 2 * cols, "no more than twice the threads that the columns need"
    assert y < 2 * rows or y == 1
