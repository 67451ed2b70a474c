"""Products of 16-bit matrices with ragged rows, launched by the runtime, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels import tile_matmul
from lt_runtime.kernels.tile_matmul import TileMatmulPass, supports
from tests.host_kernels.arrays import FLAT
from tests.host_kernels.cases import EXAMPLES_ALONE, FEW, orders, seeds
from tests.host_kernels.harness import FORWARD, REVERSE, HostKernels
from tests.host_kernels.products import OPERANDS, Product, launching
from tests.host_kernels.products import on_a_small_gpu as on_a_small_gpu  # a fixture
from tests.host_kernels.variants import TILE, Tile
from tests.support.strategies import Placement, placements

extents = st.one_of(st.integers(1, 40), st.sampled_from((63, 64, 65, 100, 129, 150)))


@dataclass(frozen=True)
class TileCase:
    """A product.

    Attributes:
        shape: M, N and K.
        c: where C is: nowhere, where D is, or apart.
        bias: whether there is one, where the epilogue may have one.
        sums: whether a bias gradient is wanted, where the epilogue may make one.
        keeps: whether the auxiliary matrix is written, where the epilogue may write one.
        together: parts of K up to which a block adds up all of them.
    """

    shape: tuple[int, int, int]
    alpha: float
    beta: float
    c: str
    bias: bool
    sums: bool
    keeps: bool
    together: int
    places: tuple[Placement, ...]
    order: int
    seed: int


cases = st.builds(
    TileCase,
    shape=st.tuples(extents, extents, st.one_of(extents, st.sampled_from((300, 700)))),
    alpha=st.sampled_from((1.0, 1.0, -0.75)),
    beta=st.sampled_from((1.0, 0.0, 0.5)),
    c=st.sampled_from(("nowhere", "in place", "apart")),
    bias=st.booleans(),
    sums=st.booleans(),
    keeps=st.booleans(),
    together=st.sampled_from((1, 2, 16)),
    places=st.tuples(*(placements for _ in OPERANDS)),
    order=orders,
    seed=seeds,
)


def epilogue_of(case: TileCase, variant: Tile) -> Epilogue:
    """The epilogue of a case, as the variant's kernel supports it."""
    name = variant.activation
    if variant.derivative:
        return Epilogue(f"d{name}{'_bgrad' if case.sums else ''}")
    if name == "none":
        sums = case.sums and not variant.b_along_k
        return Epilogue.BGRADA if sums else Epilogue.BIAS if case.bias else Epilogue.NONE
    aux = "_aux" if case.keeps and name == "gelu" else ""
    return Epilogue(f"{name}{aux}{'_bias' if case.bias else ''}")


def made(case: TileCase, variant: Tile) -> Product:
    """The product of a case, by the variant's kernel."""
    across = {"a": not variant.a_along_k, "b": variant.b_along_k}
    return Product(
        case,
        variant.dtype,
        case.shape,
        epilogue_of(case, variant),
        lambda name, _, place: replace(place, column_major=across.get(name, False)),
    )


def run(product: Product, host: HostKernels, variant: Tile, case: TileCase, order: int) -> None:
    """Runs the product. Skips cases for which the runtime chooses another variant: a single row or column is both
    row-major and column-major.
    """
    assume(supports(product.problem))
    with launching(host, variant.macros, order) as patch:
        patch.setattr(tile_matmul, "_ONE_GROUP", case.together)
        own_pass = TileMatmulPass(product.problem, 0)
    product.run(own_pass)


LONG = TileCase((70, 67, 700), 1.0, 1.0, "in place", True, True, True, 2, (FLAT,) * len(OPERANDS), FORWARD, 0)
"""In this case D has four tiles, and blocks that make the same tile share K."""
SHARED = replace(LONG, shape=(30, 21, 700))
TALL = replace(LONG, shape=(700, 65, 21), c="nowhere")
"""In this case tiles share the sums of columns."""


@pytest.mark.parametrize("variant", TILE, ids=str)
@FEW
@example(case=LONG)
@example(case=SHARED)
@example(case=replace(SHARED, together=16, c="apart"))
@example(case=TALL)
@example(case=replace(TALL, shape=(129, 64, 64), bias=False, keeps=False))
@given(case=cases)
def test_products(host: HostKernels, variant: Tile, case: TileCase) -> None:
    product = made(case, variant)
    run(product, host, variant, case, case.order)
    product.check()


@pytest.mark.parametrize("variant", TILE[:3], ids=str)
@EXAMPLES_ALONE
@example(case=LONG)
@example(case=SHARED)
@example(case=TALL)
@given(case=cases)
def test_the_order_of_execution_does_not_reach_the_bits(host: HostKernels, variant: Tile, case: TileCase) -> None:
    runs = []
    for order in (FORWARD, REVERSE, 2 + case.order):
        product = made(case, variant)
        run(product, host, variant, case, order)
        runs.append(product.results)
    assert runs[0] == runs[1] == runs[2]
