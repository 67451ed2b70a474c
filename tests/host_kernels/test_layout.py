"""The structs of `cuda_src` lie in memory as `lt_runtime.kernels.kernel` reads their declarations."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from lt_runtime.gpu.compiler import Macros
from lt_runtime.kernels import kernel, mlp
from lt_runtime.kernels.kernel import Struct
from lt_runtime.paths import kernel_sources
from lt_runtime.problem import Activation, DType, MLPProblem
from tests.host_kernels.build import Builder, BuildError, Variant
from tests.support.kernel_digest import included
from tests.support.kernel_families import ENTRIES

TABLES = {kernel.struct(name) for name in ("OptimizerChunk", "GradientChunk", "EmaChunk")}
STRUCTS = TABLES | {entry.params for entry in ENTRIES.values()} | set(kernel._structs.values())
"""The C++ structs whose layout is tested.

These are the argument structs of all kernels, the structs within them, and the rows of tables on the device.
"""
ON = (
    "WEIGHTED DROPOUT KEEP SAVED ALIGNED BLOCKS AUX SUMS STOCHASTIC ROWS HIDDEN ROW_WARPS "
    "ROW_TILES SUM_WARPS LAST A_ALONG_K B_ALONG_K MEAN LONG REMAKES BACKWARD E5M2 GATED GRADIENT"
)
OTHERS = (
    "SCALAR=float LOSS=lt::Huber WEIGHTS=2 LABEL=int ACTIVATION=lt::Relu PRODUCT=float DZ=2 OPERAND=float "
    "RULE=lt::AmsGrad MOMENT=float ROW_THREADS=320 ROW_LANES=32 ROW_BLOCKS=2 ROW_KEPT=3 WIDTH=16 INPUTS=16 "
    "OUTPUTS=16 FIRST=0 THREADS=512 DERIVATIVE=0 WEIGHT=float FORWARD_THREADS=256 BACKWARD_THREADS=256 VECTORS=0 "
    "ROW_REGISTERS=0 SUM_REGISTERS=0"
)
MACROS = dict.fromkeys(ON.split(), "1") | dict(each.split("=") for each in OTHERS.split())
"""A valid value of each macro that some kernel file needs to be compiled."""
TEMPLATES = ("ColumnSum",)
TILES = "mma.cuh"
"""Kernels that include this header multiply 16-bit numbers, so that they are compiled for FP16 and BF16 alone."""


def defining_file(struct: type[Struct]) -> str:
    """Returns the first kernel file that defines the struct, itself or in a header that it includes."""
    return next(file for file, defined in defined_structs().items() if struct.__name__ in defined)


@functools.cache
def defined_structs() -> dict[str, set[str]]:
    """Names of the structs that each kernel file defines, itself or in headers that it includes."""
    files = sorted(file.name for file in kernel_sources().glob("*.cu"))
    definition = re.compile(r"struct (?:alignas\(\d+\) )?(\w+) {")
    return {file: {name for each in included(file) for name in definition.findall(each.read_text())} for file in files}


def members_of(struct: type[Struct]) -> dict[str, int]:
    """Returns C++ expressions for the struct's size and each field's offset, with Python's values of them."""
    name = f"lt::{struct.__name__}{'<SCALAR>' if struct.__name__ in TEMPLATES else ''}"
    fields = [field for field, *_ in struct._fields_]
    offsets = {f"offsetof({name}, {field.rstrip('_')})": getattr(struct, field).offset for field in fields}
    return {f"sizeof({name})": ctypes.sizeof(struct), **offsets}


@pytest.fixture
def builder(build_directory: Path) -> Builder:
    return Builder(build_directory)


def check(builder: Builder, source: str, macros: Macros, expected: Mapping[str, int]) -> None:
    """Compiles a kernel file, which fails unless the C++ expressions have the expected values."""
    asserted = (f'static_assert({expression} == {value}, "{expression}");' for expression, value in expected.items())
    builder.check(Variant(source, (*macros, ("ASSERTIONS", " ".join(asserted)))))


@pytest.mark.parametrize("source", sorted({defining_file(struct) for struct in STRUCTS}))
def test_structs_agree(builder: Builder, source: str) -> None:
    structs = [struct for struct in STRUCTS if defining_file(struct) == source]
    expected = {member: value for struct in structs for member, value in members_of(struct).items()}
    macros = MACROS | ({"SCALAR": "__half"} if TILES in {each.name for each in included(source)} else {})
    text = (kernel_sources() / source).read_text()
    check(builder, source, tuple(each for each in macros.items() if f"#define {each[0]} " not in text), expected)


def test_a_wrong_offset_is_refused(builder: Builder) -> None:
    with pytest.raises(BuildError, match=r"static assertion failed: sizeof\(lt::EmaChunk\)"):
        check(builder, "ema.cu", (), {"sizeof(lt::EmaChunk)": ctypes.sizeof(kernel.struct("EmaChunk")) + 1})


def test_every_kernel_is_known_to_the_runtime() -> None:
    files = {file.name: Variant(file.name).entries for file in kernel_sources().glob("*.cu")}
    assert {(entry, file) for file, entries in files.items() for entry in entries} == {
        (entry.name, entry.source) for entry in ENTRIES.values()
    }


def test_sums_of_a_narrow_mlp_lie_as_the_header_says(builder: Builder) -> None:
    dims = (17, 40, 33, 5)
    problem = MLPProblem(DType.BFLOAT16, 100, dims, (True,) * 3, Activation("relu"), backward=True)
    padded = ((48, 32), (48, 48), (16, 48))  # numbers of outputs and inputs of the layers, padded as in the kernels
    expressions = [f"lt::sums_of_layer({outputs}, {inputs})" for outputs, inputs in padded]
    expected = [*mlp._sums(problem), mlp._FRAGMENT, mlp._LOSS_PLACES, mlp.MAX_LAYERS]
    expressions += ["lt::kFragment", "lt::kLossPlaces", "lt::kMaxLayers"]
    check(builder, "mlp_gradients.cu", (("SCALAR", "__half"),), dict(zip(expressions, expected, strict=True)))
