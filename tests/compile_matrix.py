"""Every kernel variant that the runtime can ask for, compiled for every architecture; what ptxas says of each.

`python3 -m tests.compile_matrix [FILE]` compiles all of them, writes the table of registers, spills and shared memory,
and fails where the tests would. NVRTC needs no GPU for it.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cuda.bindings import nvrtc

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu import compiler
from lt_runtime.gpu.compiler import Macros
from lt_runtime.kernels import dropout
from lt_runtime.kernels.blocks import SCALAR
from lt_runtime.kernels.cross_entropy import row_macros
from lt_runtime.kernels.epilogue import _BACKWARD_BLOCKS, _FORWARD_BLOCKS, _SAVED, ACTIVATION_NAMES
from lt_runtime.kernels.narrow import _DERIVATIVES, _SHARED_ROWS, MAX_WIDTH, narrow_macros
from lt_runtime.kernels.tiling import access_macros
from lt_runtime.layout import packed
from lt_runtime.paths import kernel_sources
from lt_runtime.plans.strategies import forward_strategies
from lt_runtime.problem import ACTIVATIONS, Activation, Compute, DType, ForwardProblem, Saved, Spec

ARCHITECTURES: Final = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MAIN: Final = "sm_90"
MAX_SHARED: Final = 48 << 10  # bytes a block may have without being granted more
_FEW: Final = 20  # variants of a source
_SAMPLED: Final = 0.04
_SAMPLED_MAIN: Final = 0.2
USAGE_PROPERTY: Final = "usage"
"""Under which a test's report carries a `Usage`, as a tuple."""
TABLE: Final = Path(__file__).parents[1] / "benchmarks" / "results" / "registers.md"


@dataclass(frozen=True)
class Variant:
    """A source with its definitions."""

    source: str
    macros: Macros = ()

    def __str__(self) -> str:
        return "-".join([self.source, *(value.removeprefix("lt::") for _, value in self.macros)])


def over(source: str, **choices: Iterable[str]) -> list[Variant]:
    """A variant for every combination of the definitions' values."""
    return [
        Variant(source, tuple(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())
    ]


def _swept(bare: Variant, blocks: Mapping[DType, int]) -> list[Variant]:
    """A sweep's fast path, and the one for any layout."""
    (dtype,) = (dtype for dtype, name in SCALAR.items() if ("SCALAR", name) in bare.macros)
    return [replace(bare, macros=(*bare.macros, *access_macros(aligned, blocks[dtype]))) for aligned in (True, False)]


def _epilogue_fwd() -> list[Variant]:
    """A product of y's type, or an FP32 one, whose sum with the bias is rounded only once."""
    return [
        variant
        for keep, scalar in itertools.product((0, 1), SCALAR.values())
        for bare in over(
            "epilogue_fwd.cu",
            SCALAR=[scalar],
            ACTIVATION=ACTIVATION_NAMES.values(),
            DROPOUT="01",
            PRODUCT=sorted({scalar, SCALAR[DType.FLOAT32]}),
            KEEP=[str(keep)],
        )
        for variant in _swept(bare, dict.fromkeys(SCALAR, _FORWARD_BLOCKS - keep))
    ]


def saved_modes(activation: str, dropout: bool) -> set[Saved]:
    """What an activation's derivative may be taken from: all that some strategy of forward keeps.

    Who passes raw pointers, without dropout, keeps the pre-activation of any activation.
    """
    spec = Spec(packed(8, 8))
    problem = ForwardProblem(
        DType.FLOAT32, Compute.FLOAT32, Activation(activation), spec, spec, spec, dropout=dropout, backward=True
    )
    kept = {strategy.saved for strategy in forward_strategies(problem)}
    return kept | ({Saved.PREACTIVATION} if activation != "none" and not dropout else set())


def _epilogue_bwd() -> list[Variant]:
    return [
        variant
        for name, dropout in itertools.product(ACTIVATIONS, (False, True))
        for bare in over(
            "epilogue_bwd.cu",
            SCALAR=SCALAR.values(),
            ACTIVATION=[ACTIVATION_NAMES[name]],
            DROPOUT=[str(int(dropout))],
            SAVED=sorted(str(_SAVED[mode]) for mode in saved_modes(name, dropout)),
            DZ="012",
        )
        for variant in _swept(bare, _BACKWARD_BLOCKS)
    ]


def _matmul_epilogue() -> list[Variant]:
    """D has the type of A and B, or is FP32; the product has D's type, or is FP32."""
    activations = sorted({ACTIVATION_NAMES[epilogue.activation] for epilogue in Epilogue})
    return [
        variant
        for operand in SCALAR
        for scalar in sorted({SCALAR[operand], SCALAR[DType.FLOAT32]})
        for variant in over(
            "matmul_epilogue.cu",
            SCALAR=[scalar],
            PRODUCT=sorted({scalar, SCALAR[DType.FLOAT32]}),
            OPERAND=[SCALAR[operand]],
            ACTIVATION=activations,
        )
    ]


def _narrow() -> list[Variant]:
    """Several rows a thread only where memory is moved in vectors."""
    choices = itertools.product(SCALAR, (1, 2, 4, 8, MAX_WIDTH), (True, False))
    return [
        Variant(source, narrow_macros(dtype, width, aligned, rows, epilogue))
        for dtype, width, aligned in choices
        for source, several, epilogues in (
            ("narrow_n.cu", (1, _SHARED_ROWS), (None,)),
            ("narrow_k.cu", (1, _SHARED_ROWS), (Epilogue.NONE, *_DERIVATIVES)),
            ("narrow_m.cu", (None,), (None,)),
        )
        for rows in several
        if aligned or rows != _SHARED_ROWS
        for epilogue in epilogues
    ]


VARIANTS: Final = (
    *over("adamw.cu", MOMENT=[SCALAR[DType.FLOAT32], SCALAR[DType.BFLOAT16]], AMSGRAD="01", STOCHASTIC="01"),
    *over("gradient_norm.cu"),
    *(
        variant
        for bare in over("dropout.cu", SCALAR=SCALAR.values())
        for variant in _swept(bare, dict.fromkeys(SCALAR, dropout._BLOCKS))
    ),
    *_epilogue_bwd(),
    *_epilogue_fwd(),
    *(
        variant
        for block_rows in (False, True)
        for variant in over(
            "cross_entropy.cu",
            SCALAR=SCALAR.values(),
            **{name: [value] for name, value in row_macros(block_rows=block_rows)},
        )
    ),
    *over("mse.cu", SCALAR=SCALAR.values()),
    *over("tally.cu", SCALAR=SCALAR.values()),
    *over("resize.cu", SCALAR=SCALAR.values()),
    *_matmul_epilogue(),
    *_narrow(),
)
"""All of them, from the runtime's own tables: a new activation or type is among them by itself."""


def sampled(variant: Variant) -> tuple[str, ...]:
    """The architectures that the tests compile a variant for; none for some.

    All of them; but of a source with many variants a few of each, drawn by the variant's name, and the source's first
    ones for one each, so that it meets them all. Everything takes minutes, nearly all of it the compiler's own work:
    that is for the command, which continuous integration runs.
    """
    of_source = [each for each in VARIANTS if each.source == variant.source]
    if len(of_source) <= _FEW:
        return ARCHITECTURES
    draw, index = random.Random(str(variant)), of_source.index(variant)
    return tuple(
        each
        for i, each in enumerate(ARCHITECTURES)
        if draw.random() < (_SAMPLED_MAIN if each == MAIN else _SAMPLED) or i == index
    )


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture: registers a thread, bytes of everything else.

    Attributes:
        spills: stored and loaded. stack: local memory. shared: of a block. parameters: the argument block.
        double: whether there is FP64 arithmetic in it.
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
        """What must not be: values that leave the registers, FP64, more shared memory than any block may have."""
        found = {
            "spills registers": self.spills,
            "has a stack": self.stack,
            "computes in FP64": self.double,
            "takes too much shared memory": self.shared > MAX_SHARED,
        }
        return [
            f"{self.kernel} of {self.variant} for {self.architecture} {name}" for name, is_so in found.items() if is_so
        ]


def usages(variant: Variant, architecture: str) -> list[Usage]:
    """What each kernel of a variant takes under the package's own options."""
    log, ptx = _compile(variant, architecture)
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
            double=".f64" in ptx,  # of the whole file: what a kernel calls without inlining counts as well
        )
        for kernel, said in sections
    ]


def _total(pattern: str, said: str) -> int:
    return sum(map(int, re.findall(pattern, said)))


def _compile(variant: Variant, architecture: str) -> tuple[str, str]:
    """The log of ptxas, and the intermediate code."""
    options = compiler._options(variant.source, variant.macros, architecture)
    # Where there is a driver NVRTC has a cache of its own, and ptxas says nothing of what is found there.
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


def everywhere(variants: Sequence[Variant], architectures: Sequence[str] = ARCHITECTURES) -> list[Usage]:
    """Usage of all kernels of some variants; NVRTC compiles in several threads at once."""
    jobs = list(itertools.product(variants, architectures))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [usage for found in pool.map(lambda job: usages(*job), jobs) for usage in found]


def summary(found: Iterable[Usage]) -> str:
    """The most registers of any variant, by kernel and architecture; in bold where something spills."""
    most: dict[tuple[str, str], int] = {}
    spilled = set()
    for usage in found:
        place = usage.kernel, usage.architecture
        most[place] = max(most.get(place, 0), usage.registers)
        if usage.spills:
            spilled.add(place)
    kernels = sorted({kernel for kernel, _ in most})

    def cell(kernel: str, architecture: str) -> str:
        place = kernel, architecture
        return f"**{most[place]}**" if place in spilled else str(most.get(place, "-"))

    return markdown(
        ["kernel", *ARCHITECTURES], [[name, *(cell(name, each) for each in ARCHITECTURES)] for name in kernels]
    )


def details(found: Iterable[Usage]) -> str:
    """A row for each kernel of each variant: registers by architecture, the most spills and shared memory of any."""
    rows: dict[tuple[str, str], dict[str, Usage]] = {}
    for usage in found:
        rows.setdefault((usage.kernel, usage.variant), {})[usage.architecture] = usage
    return markdown(
        ["kernel", "variant", *ARCHITECTURES, "spills", "shared"],
        [
            [
                kernel,
                variant,
                *(str(by_architecture[each].registers) for each in ARCHITECTURES),
                str(max(usage.spills for usage in by_architecture.values())),
                str(max(usage.shared for usage in by_architecture.values())),
            ]
            for (kernel, variant), by_architecture in sorted(rows.items())
        ],
    )


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as what is in them, so that it reads well unrendered too."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = [heading, ["-" * width for width in widths], *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def document(found: Sequence[Usage]) -> str:
    """The table that is kept among the results."""
    _, major, minor = nvrtc.nvrtcVersion()
    sources = len({variant.source for variant in VARIANTS})
    return (
        "# Registers, spills and shared memory\n\n"
        f"Written by `python3 -m tests.compile_matrix` with NVRTC {major}.{minor}: "
        f"{len(VARIANTS)} variants of {sources} files.\n\n"
        "## The most registers a thread of any variant takes\n\n"
        f"{summary(found)}\n"
        "## Every variant\n\n"
        "Registers a thread; the most bytes spilled, and of shared memory a block, on any architecture.\n\n"
        f"{details(found)}"
    )


def main(file: Path) -> int:
    """Compiles everything, writes the table, prints its summary and what is wrong; returns the exit status."""
    found = everywhere(VARIANTS)
    file.write_text(document(found))
    print(f"{summary(found)}{len(found)} kernels in {file}")
    faults = [fault for usage in found for fault in usage.faults]
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE))
