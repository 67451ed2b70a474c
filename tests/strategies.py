"""What property tests draw: shapes, layouts, types, activations, bias, dropout, wanted gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.problem import ACTIVATIONS, Activation, DType, Philox

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 31, 37, 61, 67, 127, 131, 251, 257)
_EIGHTS = tuple(range(8, 257, 8))
_TILES = (128, 256, 384)

sizes = st.one_of(st.just(1), st.sampled_from(_PRIMES), st.sampled_from(_EIGHTS), st.sampled_from(_TILES))
"""One axis: 1, primes, multiples of 8 and of 128, up to a few hundred."""


@dataclass(frozen=True)
class Placement:
    """How a matrix is laid into a buffer: order, gap after each row (column), and elements before the first."""

    column_major: bool
    gap: int
    offset: int


placements = st.builds(Placement, st.booleans(), st.sampled_from((0, 0, 1, 3, 8)), st.sampled_from((0, 0, 0, 1, 8)))

activations = st.builds(Activation, st.sampled_from(ACTIVATIONS), st.sampled_from((0.01, 0.25, 1.5)))

computes = st.sampled_from(
    (
        (DType.FLOAT32, "float32"),
        (DType.FLOAT32, "tf32"),
        (DType.FLOAT16, "float32"),
        (DType.BFLOAT16, "float32"),
    )
)

generators = st.builds(
    Philox,
    seed=st.integers(0, 2**64 - 1),
    layer=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**32 - 1),
)


@dataclass(frozen=True)
class LinearCase:
    """One linear layer, forward and backward."""

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
    need: tuple[bool, bool, bool]
    keep_z: bool
    x: Placement
    w: Placement
    y: Placement
    dy: Placement
    dx: Placement
    dw: Placement
    data_seed: int


@st.composite
def linear_cases(draw: st.DrawFn) -> LinearCase:
    dtype, compute = draw(computes)
    return LinearCase(
        m=draw(sizes),
        n=draw(sizes),
        k=draw(sizes),
        dtype=dtype,
        compute=compute,
        activation=draw(activations),
        bias=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5))),
        rng=draw(generators),
        accumulate=draw(st.booleans()),
        need=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        keep_z=draw(st.booleans()),
        x=draw(placements),
        w=draw(placements),
        y=draw(placements),
        dy=draw(placements),
        dx=draw(placements),
        dw=draw(placements),
        data_seed=draw(st.integers(0, 2**32 - 1)),
    )


def lattice(generator: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> NDArray[np.generic]:
    """Multiples of 1/8 in [-1/2, 1/2].

    Products and sums of them are exact in FP32 and their factors exact in TF32, FP16 and BF16, so that a
    pre-activation has the same sign, or is zero, in every precision: no kink is crossed by rounding.
    """
    values: NDArray[np.generic] = (generator.integers(-4, 5, shape) / 8.0).astype(dtype.numpy)
    return values
