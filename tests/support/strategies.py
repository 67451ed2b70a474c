"""Hypothesis strategies that draw problems: shapes, layouts, types, activations, bias, dropout, wanted gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import (
    ACTIVATIONS,
    SCALES,
    Activation,
    BackwardProblem,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    MatmulProblem,
    Philox,
    Saved,
    Spec,
)

COMPILING = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""Settings of property tests on the pretended GPU, where an example compiles the kernel variants that it needs."""

TYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
"""Types of layers and losses; plain matrix products have FP64 too."""

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 31, 37, 61, 67, 127, 131, 251, 257)
_EIGHTS = tuple(range(8, 257, 8))
_TILES = (128, 256, 384)

sizes = st.one_of(st.just(1), st.sampled_from(_PRIMES), st.sampled_from(_EIGHTS), st.sampled_from(_TILES))
"""Lengths of an axis: 1, primes, multiples of 8 and of 128, up to a few hundred."""


@dataclass(frozen=True)
class Placement:
    """Placement of a matrix in a larger buffer: order, gap after each row (or column), and number of elements before
    the first.
    """

    column_major: bool = False
    gap: int = 0
    offset: int = 0


placements = st.builds(Placement, st.booleans(), st.sampled_from((0, 0, 1, 3, 8)), st.sampled_from((0, 0, 0, 1, 8)))

activations = st.builds(Activation, st.sampled_from(ACTIVATIONS), st.sampled_from((0.01, 0.25, 1.5)))

COMPUTES = (
    (DType.FLOAT32, "float32"),
    (DType.FLOAT32, "tf32"),
    (DType.FLOAT16, "float32"),
    (DType.BFLOAT16, "float32"),
)
"""The types of a layer's operands, each with a compute type."""
computes = st.sampled_from(COMPUTES)

generators = st.builds(
    Philox, seed=st.integers(0, 2**64 - 1), layer=st.integers(0, 2**32 - 1), step=st.integers(0, 2**32 - 1)
)


@dataclass(frozen=True)
class LinearCase:
    """A test case: the arguments of a linear layer's forward and backward pass.

    Attributes:
        x, w, y, dy, dx, dw: how each matrix lies in its buffer.
        add: how the matrix that is added to y lies in its buffer; None if nothing is added.
        add_over_out: whether y is written over the matrix that is added to it.
        need: whether dx, dw and db are computed.
        keep_z: whether the caller gives a buffer for the pre-activation z.
    """

    m: int
    n: int
    k: int
    dtype: DType
    compute: str
    activation: Activation
    bias: bool
    dropout: float
    rng: Philox
    accumulate: bool
    accumulate_dx: bool
    need: tuple[bool, bool, bool]
    keep_z: bool
    x: Placement
    w: Placement
    y: Placement
    dy: Placement
    dx: Placement
    dw: Placement
    add: Placement | None
    add_over_out: bool
    data_seed: int


@st.composite
def linear_cases(draw: st.DrawFn) -> LinearCase:
    dtype, compute = draw(computes)
    return LinearCase(
        **{name: draw(sizes) for name in "mnk"},
        **{name: draw(placements) for name in ("x", "w", "y", "dy", "dx", "dw")},
        **{name: draw(st.booleans()) for name in ("bias", "accumulate", "accumulate_dx", "keep_z", "add_over_out")},
        add=draw(st.none() | placements),
        dtype=dtype,
        compute=compute,
        activation=draw(activations),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5))),
        rng=draw(generators),
        need=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        data_seed=draw(st.integers(0, 2**32 - 1)),
    )


def lattice(generator: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> NDArray[np.generic]:
    """Random multiples of 1/8 in [-1/2, 1/2].

    Products and sums of such numbers are exact in FP32, and the numbers themselves in TF32, FP16 and BF16. So a
    pre-activation has the same sign, or is zero, in every precision: no rounding moves it across an activation's kink.
    """
    values: NDArray[np.generic] = (generator.integers(-4, 5, shape) / 8.0).astype(dtype.numpy)
    return values


matmul_types = st.sampled_from(
    (
        (DType.FLOAT32, "float32", DType.FLOAT32),
        (DType.FLOAT32, "tf32", DType.FLOAT32),
        (DType.FLOAT16, "float32", DType.FLOAT16),
        (DType.FLOAT16, "float32", DType.FLOAT32),
        (DType.BFLOAT16, "float32", DType.BFLOAT16),
        (DType.BFLOAT16, "float32", DType.FLOAT32),
        (DType.FLOAT64, "float32", DType.FLOAT64),
    )
)
"""The tested combinations: type of the operands, compute type, type of the result."""


@dataclass(frozen=True)
class MatmulCase:
    """A test case: the arguments of a matrix product.

    Attributes:
        batches: numbers of matrices in a, b and c; None for a single matrix.
        a, b, c, d: how each matrix lies in its buffer.
        with_c, in_place: whether there is a C, and whether it is D's memory.
        device_scalars: whether α and β are arrays on the device.
        bias_offset: number of elements before the bias in its buffer.
    """

    m: int
    n: int
    k: int
    batches: tuple[int | None, int | None, int | None]
    dtype: DType
    compute: str
    d_dtype: DType
    epilogue: Epilogue
    alpha: float
    beta: float
    with_c: bool
    in_place: bool
    device_scalars: bool
    a: Placement
    b: Placement
    c: Placement
    d: Placement
    bias_offset: int
    data_seed: int


_batches = st.sampled_from(
    ((None, None, None), (None, None, None), (3, 3, 3), (2, None, 2), (None, 2, 2), (1, 3, 3), (3, 1, 3), (1, 1, 1))
)


@st.composite
def matmul_cases(draw: st.DrawFn) -> MatmulCase:
    dtype, compute, d_dtype = draw(matmul_types)
    with_c = draw(st.booleans())
    c, d = draw(placements), draw(placements)
    epilogue = Epilogue.NONE if dtype is DType.FLOAT64 else draw(st.sampled_from(Epilogue))
    alike = dtype is DType.FLOAT64 or epilogue.sums_operand
    return MatmulCase(
        **{name: draw(sizes) for name in "mnk"},
        **{name: draw(placements) for name in "ab"},
        batches=draw(_batches),
        dtype=dtype,
        compute=compute,
        d_dtype=d_dtype,
        epilogue=epilogue,
        alpha=draw(st.sampled_from((1.0, 1.0, -0.5, 2.0, 0.75))),
        beta=draw(st.sampled_from((0.0, 1.0, -0.5))) if with_c else 0.0,
        with_c=with_c,
        in_place=draw(st.booleans()),
        device_scalars=draw(st.sampled_from((False, False, True))),
        c=d if alike else c,
        d=d,
        bias_offset=draw(st.sampled_from((0, 0, 1, 3))),
        data_seed=draw(st.integers(0, 2**32 - 1)),
    )


_counts = st.integers(0, 2**16)
_alignments = st.sampled_from((1, 2, 4, 8, 16, 256))
_layouts = st.builds(Layout, _counts, _counts, st.sampled_from(Order), st.integers(2**16, 2**31))
_specs = st.builds(Spec, _layouts, _alignments, _counts)
_slopes = st.floats(-1e30, 1e30)
_of_fields: dict[str, st.SearchStrategy[Any]] = {
    "Activation": st.builds(Activation, st.sampled_from(ACTIVATIONS), _slopes),
    "Compute": st.sampled_from(Compute),
    "DType": st.sampled_from(DType),
    "DType | None": st.none() | st.sampled_from(DType),
    "Epilogue": st.sampled_from(Epilogue),
    "Saved": st.sampled_from(Saved),
    "Spec": _specs,
    "Spec | None": st.none() | _specs,
    "bool": st.booleans(),
    "int": _counts,
    "int | None": st.none() | _alignments,
    "tuple[str, ...]": st.lists(st.sampled_from(SCALES), unique=True).map(tuple),
    "bias_alignment": _alignments,
}
"""Hypothesis strategies that draw a problem's fields, by the fields' annotations or names."""


def _any(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Draws a dataclass, each of its fields by its name or else by its annotation."""
    return st.builds(
        kind, **{each.name: _of_fields.get(each.name, _of_fields.get(str(each.type))) for each in fields(kind)}
    )


_of_fields["Derivative"] = _any(Derivative)
_of_fields["Derivative | None"] = st.none() | _of_fields["Derivative"]
problems = st.one_of(*map(_any, (MatmulProblem, ForwardProblem, BackwardProblem)))
"""Hypothesis strategy of problems as data (for keys and files), most of which could not run."""
