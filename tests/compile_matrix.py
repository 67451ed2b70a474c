"""Compiles every kernel variant that the runtime can request for every architecture, and records what ptxas reports.

`python -m tests.compile_matrix [--full]` compiles the kernel families that have changed since they last passed, or all
of them, and writes the table of registers and shared memory if nothing is wrong. NVRTC needs no GPU for it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from lt_runtime import rules
from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels import mlp, tile_matmul
from lt_runtime.kernels.add import _ADD_BLOCKS
from lt_runtime.kernels.cross_entropy import _SPREAD, RowGroup, row_macros
from lt_runtime.kernels.epilogue import _DROPOUT_BLOCKS, _SAVED, ACTIVATION_NAMES, _backward_blocks, _forward_blocks
from lt_runtime.kernels.fp8 import cast_macros, loss_fp8_macros
from lt_runtime.kernels.gated import blocks_of
from lt_runtime.kernels.kernel import SCALAR, define
from lt_runtime.kernels.losses import LOSSES, summed_loss_macros
from lt_runtime.kernels.narrow import _DERIVATIVES, _SHARED_ROWS, MAX_WIDTH, narrow_macros
from lt_runtime.kernels.norm import Norm, Width, norm_macros
from lt_runtime.kernels.optimizer import update_macros
from lt_runtime.kernels.tile_matmul import tile_macros
from lt_runtime.kernels.tiling import Access
from lt_runtime.layout import Order, packed
from lt_runtime.plans.strategies import forward_strategies
from lt_runtime.problem import ACTIVATIONS, Activation, Compute, DType, ForwardProblem, MLPProblem, Saved, Spec
from lt_runtime.reference.fp8 import LARGEST
from tests.support.kernel_digest import compiler_build, family_digest
from tests.support.kernel_families import ENTRIES
from tests.support.kernel_usage import ARCHITECTURES, Usage, Variant, everywhere, faults
from tests.support.register_table import TABLE, Record, read, summary

_TARGETS: Final = [mlp.Target(shared=227 << 10, multiprocessors=132, moves_registers=moves) for moves in (True, False)]
"""An H200, and a GPU that differs from it only in that its warps cannot move registers."""
_MLP_WIDTHS: Final = (16, 32, 64, 128)
_OTHER_MLP_WIDTHS: Final = (48, 80, 96, 112)
_MASK: Final = str(_SAVED[Saved.MASK])
_TWIN: Final = "sm_89"
"""On this architecture all kernels but two need as many registers as on sm_86, so that the tests compile only for
sm_86, and the command for both.
"""
_FROM_TWIN: Final = ("cast_fp8.cu", "loss_fp8.cu", "optimizer_fp8.cu")
"""Sources that need instructions which GPUs below `_TWIN` lack; compiled for older GPUs they contain no code."""


def over(source: str, **choices: Iterable[str]) -> list[Variant]:
    """Returns one variant for each combination of the definitions' values."""
    return [
        Variant(source, tuple(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())
    ]


def _swept(bare: Variant, blocks: Callable[[DType, Access], int]) -> list[Variant]:
    """Variants of a sweep: for aligned rows and for any layout; for epilogues also for flat matrices (Access.FLAT)."""
    macros = dict(bare.macros)
    (dtype,) = (dtype for dtype, name in SCALAR.items() if name == macros["SCALAR"])
    accesses = [Access.ALIGNED, Access.ANY]
    if "ACTIVATION" in macros and macros.get("DZ") != "2" and macros.get("SAVED") != _MASK:
        accesses.append(Access.FLAT)
    return [replace(bare, macros=(*bare.macros, *access.macros(blocks(dtype, access)))) for access in accesses]


def _epilogue_fwd() -> list[Variant]:
    """Variants of the forward epilogue, with and without an addend.

    The product has y's type, or is FP32, so that product plus bias is rounded only once.
    """
    return [
        variant
        for keep, add, scalar in itertools.product((0, 1), (0, 1), SCALAR.values())
        for bare in over(
            "epilogue_fwd.cu",
            SCALAR=[scalar],
            ACTIVATION=ACTIVATION_NAMES.values(),
            DROPOUT="01",
            # A pass that stores the pre-activation also adds the bias, and therefore reads an FP32 product.
            PRODUCT=[SCALAR[DType.FLOAT32]] if keep else sorted({scalar, SCALAR[DType.FLOAT32]}),
            KEEP=[str(keep)],
            ADD=[str(add)],
        )
        for variant in _swept(
            bare, lambda _, access, keep=keep, add=add: _forward_blocks(access, keeps=keep == 1, adds=add == 1)
        )
    ]


def saved_modes(activation: str, dropout: bool) -> set[Saved]:
    """Kinds of saved tensor from which an activation's derivative may be computed: those that some forward strategy
    saves.

    With an addend, and in the raw-pointer interface, the pre-activation is saved for every activation.
    """
    spec = Spec(packed(8, 8))
    problem = ForwardProblem(
        DType.FLOAT32, Compute.FLOAT32, Activation(activation), spec, spec, spec, dropout=dropout, backward=True
    )
    kept = {strategy.saved for strategy in forward_strategies(problem)}
    return kept | ({Saved.PREACTIVATION} if activation != "none" else set())


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
        for variant in _swept(bare, partial(_backward_blocks, dropout=dropout))
    ]


def _cast_fp8() -> list[Variant]:
    """Variants of the cast to FP8: alone, after an activation, after a gate, and after their derivatives."""
    plain = itertools.product(SCALAR, LARGEST, (False, True), range(3))
    made = [cast_macros(scalar, dtype, aligned=aligned, vectors=vectors) for scalar, dtype, aligned, vectors in plain]
    scalar = DType.BFLOAT16
    for function, dropout in itertools.product(map(Activation, ACTIVATIONS), (False, True)):
        is_identity = function.name == "none"
        if dropout or not is_identity:
            made.append(cast_macros(scalar, "float8_e4m3fn", function, dropout=dropout))
        options = {"dropout": dropout, "backward": True, "saved": not is_identity}
        made += [cast_macros(scalar, dtype, function, **options) for dtype in LARGEST]
        gated: dict[str, Any] = {"dropout": dropout, "gated": True}
        made.append(cast_macros(scalar, "float8_e4m3fn", function, **gated))
        made += [cast_macros(scalar, dtype, function, **gated, backward=True, saved=True) for dtype in LARGEST]
    return [Variant("cast_fp8.cu", macros) for macros in made]


def _gated() -> list[Variant]:
    return [
        replace(bare, macros=(*bare.macros, *access.macros(blocks_of(dtype, remakes=remakes))))
        for dtype, remakes in itertools.product(SCALAR, (False, True))
        for bare in over(
            "gated.cu",
            SCALAR=[SCALAR[dtype]],
            ACTIVATION=ACTIVATION_NAMES.values(),
            DROPOUT="01",
            REMAKES=[str(int(remakes))],
        )
        for access in (Access.ALIGNED, Access.ANY)
    ]


def _matmul_epilogue() -> list[Variant]:
    """Variants of the pass for cuBLASLt's epilogues.

    D has the type of A and B, or is FP32; the product has D's type, or is FP32.
    """
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
    """Variants of the narrow kernels. Only in aligned variants a thread may compute several rows."""
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


def _tile() -> list[Variant]:
    """Variants of the tile kernel: row-major and column-major operands, with every activation that an epilogue has."""
    ways = itertools.product(tile_matmul.TYPES, Order, Order, tile_matmul.EPILOGUES)
    taken = dict.fromkeys(tile_macros(*each) for each in ways if tile_matmul.lies_right(*each[2:]))
    return [Variant("tile_matmul.cu", macros) for macros in taken]


def _norm() -> list[Variant]:
    """Variants of the norms; weights have the matrices' type, or are FP32."""
    norms = [Norm(dtype, each, mean) for dtype in SCALAR for each in {dtype, DType.FLOAT32} for mean in (False, True)]
    choices = itertools.product(norms, (True, False), Width)
    return sorted(
        (Variant("norm.cu", norm_macros(norm, aligned=aligned, width=width)) for norm, aligned, width in choices),
        key=str,
    )


def _mlp() -> list[Variant]:
    return [
        *(
            Variant("mlp_fwd.cu", mlp.forward_macros(*each))
            for each in (
                *itertools.product(mlp.TYPES, ACTIVATIONS, _MLP_WIDTHS),
                *itertools.product((DType.BFLOAT16,), ("relu", "gelu"), _OTHER_MLP_WIDTHS),
            )
        ),
        *dict.fromkeys(_mlp_bwd()),
        *(Variant("mlp_gradients.cu", define(SCALAR=dtype)) for dtype in mlp.TYPES),
    ]


def _mlp_bwd() -> Iterator[Variant]:
    """Variants of the kernels that train a whole narrow MLP: every type, activation, width and loss.

    Widths that are no power of two are compiled for two activations in BF16 only.
    Of the models whose kernels have the same shapes of thread blocks, only the deepest is compiled.
    """
    for dtype, name, width in itertools.product(mlp.TYPES, ACTIVATIONS, _MLP_WIDTHS):
        for hidden in (1, 2) if width == _MLP_WIDTHS[-1] else (2,):
            yield from _backward_variants(_narrow_model(width, hidden, name, dtype))
    for loss, name, width in itertools.product(LOSSES, ("relu", "gelu_erf"), _MLP_WIDTHS):
        yield from _backward_variants(_narrow_model(width, 1, name), loss)
    kinds = (("relu", "gelu_erf"), _MLP_WIDTHS), (("relu", "gelu"), _OTHER_MLP_WIDTHS)
    for name, width in (each for kind in kinds for each in itertools.product(*kind)):
        deepest = {}
        for hidden, rows in itertools.product(range(1, mlp.MAX_LAYERS), (1, 1 << 20)):
            problem = _narrow_model(width, hidden, name, rows=rows)
            deepest[*(part.block for target in _TARGETS for part in mlp.fitting_parts(problem, target))] = problem
        for problem in deepest.values():
            yield from _backward_variants(problem, "bce_with_logits")


def _narrow_model(
    width: int, hidden: int, activation: str, dtype: DType = DType.BFLOAT16, rows: int = 1 << 20
) -> MLPProblem:
    dims = (*[width] * (hidden + 1), 3)
    return MLPProblem(dtype, rows, dims, (True,) * (hidden + 1), Activation(activation), backward=True)


def _backward_variants(problem: MLPProblem, loss: str | None = None) -> Iterator[Variant]:
    parts = (part for target in _TARGETS for part in mlp.fitting_parts(problem, target))
    yield from dict.fromkeys(Variant("mlp_bwd.cu", mlp.backward_macros(problem, part, loss)) for part in parts)


VARIANTS: Final = (
    *(
        Variant(source, update_macros(rule, moments, stochastic=stochastic))
        for source in ("optimizer.cu", "optimizer_fp8.cu")
        for rule in (rules.SGD(), rules.SGD(momentum=0.9), rules.Lion(), rules.AdamW(), rules.AMSGrad())
        for moments in ((DType.FLOAT32, DType.BFLOAT16) if rule.moments else (DType.FLOAT32,))
        for stochastic in (False, True)
    ),
    *over("gradient_norm.cu"),
    *over("ema.cu"),
    *(
        variant
        for source, blocks in (("add.cu", _ADD_BLOCKS), ("dropout.cu", _DROPOUT_BLOCKS))
        for bare in over(source, SCALAR=SCALAR.values())
        for variant in _swept(bare, lambda *_, blocks=blocks: blocks)
    ),
    *_epilogue_bwd(),
    *_epilogue_fwd(),
    *_gated(),
    *(
        variant
        for row_group, weights, writes in itertools.product(RowGroup, (0, 1, 2), (True, False))
        if writes or row_group is not RowGroup.MULTIPROCESSOR
        for kept in ({0, row_group.kept} if writes and weights != _SPREAD else {0})
        for variant in over(
            "cross_entropy.cu",
            SCALAR=SCALAR.values(),
            **{name: [value] for name, value in row_macros(row_group, kept, weights, writes=writes)},
        )
    ),
    *over("class_chunk.cu", SCALAR=SCALAR.values()),
    *over("elementwise_loss.cu", SCALAR=SCALAR.values(), LOSS=LOSSES.values(), WEIGHTED="01"),
    *(
        Variant("summed_loss.cu", summed_loss_macros(dtype, loss, access))
        for dtype, loss, access in itertools.product(SCALAR, LOSSES, (Access.ANY, Access.ALIGNED))
    ),
    *(Variant("loss_fp8.cu", loss_fp8_macros(dtype, loss)) for dtype, loss in itertools.product(LARGEST, LOSSES)),
    *over("tally.cu", SCALAR=SCALAR.values()),
    *over("resize.cu", SCALAR=SCALAR.values()),
    *over("copy_rows.cu"),
    *_cast_fp8(),
    *over("fp8_scales.cu"),
    *over("scale.cu", SCALAR=SCALAR.values()),
    *over("verify.cu"),
    *_matmul_epilogue(),
    *_narrow(),
    *_tile(),
    *_norm(),
    *_mlp(),
)
"""All kernel families. They are built from the runtime's own tables, so that new activations and types are included."""

SOURCES: Final = sorted({variant.source for variant in VARIANTS})
STRUCTS: Final[Mapping[str, dict[str, type[ctypes.Structure]]]] = {
    source: {each.name: each.params for each in ENTRIES.values() if each.source == source} for source in SOURCES
}
"""The kernels of each source, with the structs that they take as arguments."""


def variants_of(source: str) -> list[Variant]:
    return [variant for variant in VARIANTS if variant.source == source]


def compiled(variants: Sequence[Variant], architectures: Sequence[str]) -> list[Usage]:
    """What ptxas reports of the variants' kernels. FP64 arithmetic is ignored in verify.cu, which runs only during
    tuning.
    """
    found = everywhere(variants, architectures)
    return [replace(each, double=each.double and each.variant != "verify.cu") for each in found]


def digest_of(source: str) -> str:
    """Digest of everything on which the result of compiling a source's variants depends."""
    return family_digest(variants_of(source), ARCHITECTURES, STRUCTS[source])


def recorded() -> Record:
    """The stored records of the sources that have passed; sources that no longer exist are left out."""
    record = read(TABLE.read_text() if TABLE.exists() else "")
    digests = {source: digest for source, digest in record.digests.items() if source in SOURCES}
    return Record(tuple(usage for source in SOURCES for usage in record.of(source)), digests, record.compiler)


def architectures_to_compile(source: str, record: Record, *, full: bool) -> tuple[str, ...]:
    """The architectures for which the tests compile a source: an empty tuple if it has not changed since it passed."""
    if full:
        return ARCHITECTURES
    if record.digests.get(source) == digest_of(source):
        return ()
    return tuple(each for each in ARCHITECTURES if each != _TWIN or source in _FROM_TWIN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the families, records those that pass, and prints the faults of the others; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.compile_matrix", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all families, changed or not")
    full = parser.parse_args(arguments).full
    record, failed = recorded(), False
    sources = [source for source in SOURCES if full or record.digests.get(source) != digest_of(source)]
    print(f"compiling {len(sources)} of {len(SOURCES)} families: {', '.join(sources) or 'no other'}", flush=True)
    for source in sorted(sources, key=lambda each: len(variants_of(each))):
        digest, variants = digest_of(source), variants_of(source)
        found = compiled(variants, ARCHITECTURES)
        wrong = faults(variants, ARCHITECTURES, STRUCTS[source], found)
        print("\n".join([summary(found), *wrong]), flush=True)
        failed = failed or bool(wrong)
        if not wrong:
            record = record.with_family(source, found, digest, compiler_build()[-1])
            TABLE.write_text(record.document())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
