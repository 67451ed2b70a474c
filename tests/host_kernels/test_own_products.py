"""Our own product kernels against float64: products with one tiny dimension, or of matrices with ragged 16-bit rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels import narrow, tile_matmul
from lt_runtime.kernels.tile_matmul import TileMatmulPass
from tests.host_kernels.build import Variant
from tests.host_kernels.cases import EXAMPLES_ALONE, FEW, Shape, axes, suit_place
from tests.host_kernels.harness import FORWARD, REVERSE, HostKernels
from tests.host_kernels.products import CASE, Case, Product, launching
from tests.host_kernels.variants import F32, NARROW, TILE, Narrow, Tile
from tests.support.strategies import Placement

_TRANSPOSED = {"narrow_n": (False, True), "narrow_k": (False, False), "narrow_m": (True, False)}
"""For each kernel of products with a tiny dimension, whether A and B are column-major."""
_MOVED = {"narrow_n": ("a", "b"), "narrow_k": ("b", "c", "d", "aux"), "narrow_m": ("b",)}
"""Names of the matrices that a kernel loads or stores as vectors, by kernel."""
_EPILOGUE = {"narrow_n": Epilogue.BIAS, "narrow_m": Epilogue.BGRADA}


@dataclass(frozen=True, kw_only=True)
class NarrowCase(Case):
    """A test case: a product that is tiny in one dimension.

    Attributes:
        tiny: by how much the tiny dimension is smaller than the kernel variant's width.
        long: the other two dimensions, in the order M, N, K.
        vector: whether there is a bias, or a bias gradient is wanted, for kernels that decide this at run time.
        busy: whether 64 threads count as enough to fill a multiprocessor, and blocks share K even if K is short.
    """

    tiny: int
    long: tuple[int, int]
    vector: bool
    busy: bool

    def shape(self, variant: Narrow) -> tuple[int, int, int]:
        """M, N and K; if the variant is aligned, the contiguous axis of the matrices that it moves is whole octets."""
        width = max(variant.width - self.tiny, variant.width // 2 + 1)
        first, second = self.long
        if variant.aligned:
            second = -(-second // 8) * 8
        axis = "nkm".index(variant.entry[-1])
        return ((first, width, second), (first, second, width), (width, second, first))[axis]


@dataclass(frozen=True, kw_only=True)
class TileCase(Case):
    """A test case: a product of matrices with ragged rows, which are no multiple of 16 bytes.

    Attributes:
        shape: M, N and K.
        bias: whether there is a bias, if the variant's epilogue may have one.
        sums: whether a bias gradient is computed, if the variant's epilogue may have one.
        keeps: whether the auxiliary matrix is written, if the variant's epilogue may write one.
        together: the largest number of parts of K whose partial sums a single block adds up.
    """

    shape: tuple[int, int, int]
    bias: bool = True
    sums: bool = True
    keeps: bool = True
    together: int = 2

    def epilogue(self, variant: Tile) -> Epilogue:
        """The epilogue of the case, as the variant's kernel supports it."""
        name = variant.activation
        if variant.derivative:
            return Epilogue(f"d{name}{'_bgrad' if self.sums else ''}")
        if name == "none":
            sums = self.sums and not variant.b_along_k
            return Epilogue.BGRADA if sums else Epilogue.BIAS if self.bias else Epilogue.NONE
        aux = "_aux" if self.keeps and name == "gelu" else ""
        return Epilogue(f"{name}{aux}{'_bias' if self.bias else ''}")


narrow_cases = st.builds(
    NarrowCase,
    tiny=st.integers(0, 7),
    long=st.tuples(st.one_of(axes, st.sampled_from((257, 700))), st.one_of(axes, st.sampled_from((264, 1030)))),
    vector=st.booleans(),
    busy=st.booleans(),
    **CASE,
)
extents = st.one_of(st.integers(1, 40), st.sampled_from((63, 64, 65, 100, 129, 150)))
tile_cases = st.builds(
    TileCase,
    shape=st.tuples(extents, extents, st.one_of(extents, st.sampled_from((300, 700)))),
    bias=st.booleans(),
    sums=st.booleans(),
    keeps=st.booleans(),
    together=st.sampled_from((1, 2, 16)),
    **CASE,
)


def narrow_product(host: HostKernels, variant: Narrow, case: NarrowCase, order: int) -> Product:
    """Runs the product of a case with placements that the variant's kernel supports."""
    across = dict(zip("ab", _TRANSPOSED[variant.entry], strict=True))

    def suited(name: str, shape: Shape, place: Placement) -> Placement:
        aligned = variant.aligned and name in _MOVED[variant.entry]
        at = suit_place(place, shape, variant.dtype, aligned=aligned, column_major=across.get(name, False))
        # an odd offset keeps the runtime from choosing the kernel for aligned rows by chance
        return replace(at, offset=at.offset | 1) if name == "b" and not aligned else at

    epilogue = variant.epilogue or (_EPILOGUE[variant.entry] if case.vector else Epilogue.NONE)
    product = Product(case, variant.dtype, case.shape(variant), epilogue, suited)
    assert narrow.supports(product.problem)
    with launching(host, variant.variants, order) as patch:
        if case.busy:
            patch.setattr(narrow, "_BUSY_THREADS", 64)
            patch.setattr(narrow, "_LONG", 1)
        own_pass = narrow.NarrowPass(product.problem, 0)
    product.run(own_pass)
    return product


def tile_product(host: HostKernels, variant: Tile, case: TileCase, order: int) -> Product:
    """Runs the product of a case. Skips cases for which the runtime chooses another variant: a single row or column is
    both row-major and column-major.
    """
    across = {"a": not variant.a_along_k, "b": variant.b_along_k}

    def placed(name: str, _: Shape, place: Placement) -> Placement:
        return replace(place, column_major=across.get(name, False))

    product = Product(case, variant.dtype, case.shape, case.epilogue(variant), placed)
    assume(tile_matmul.supports(product.problem))
    with launching(host, {Variant("tile_matmul.cu", variant.macros)}, order) as patch:
        patch.setattr(tile_matmul, "_ONE_GROUP", case.together)
        own_pass = TileMatmulPass(product.problem, 0)
    product.run(own_pass)
    return product


MANY = NarrowCase(tiny=3, long=(700, 264), c="in place", vector=True, busy=True)
"""A test case in which threads have several rows of D, and blocks share K."""
MANY_ROWS = replace(MANY, long=(800, 32), c="nowhere")
"""A test case in which blocks share M, and their threads have several rows."""
LONG = TileCase(shape=(70, 67, 700), c="in place")
"""A test case in which D has four tiles, and blocks that make the same tile share K."""
SHARED = replace(LONG, shape=(30, 21, 700))
TALL = replace(LONG, shape=(700, 65, 21), c="nowhere")
"""A test case in which several tiles of D lie in one column, and share its sums."""


@pytest.mark.parametrize("variant", NARROW, ids=str)
@FEW
@example(case=MANY)
@example(case=MANY_ROWS)
@example(case=replace(MANY_ROWS, c="in place"))
@example(case=replace(MANY_ROWS, long=(700, 8)))
@example(case=replace(MANY, busy=False, c="nowhere"))
@example(case=replace(MANY, busy=False, long=(3, 1030)))
@given(case=narrow_cases)
def test_narrow(host: HostKernels, variant: Narrow, case: NarrowCase) -> None:
    narrow_product(host, variant, case, case.order).check()


@pytest.mark.parametrize("variant", TILE, ids=str)
@FEW
@example(case=LONG)
@example(case=SHARED)
@example(case=replace(SHARED, together=16, c="apart"))
@example(case=TALL)
@example(case=replace(TALL, shape=(129, 64, 64), bias=False, keeps=False))
@given(case=tile_cases)
def test_tiles(host: HostKernels, variant: Tile, case: TileCase) -> None:
    tile_product(host, variant, case, case.order).check()


@pytest.mark.parametrize("variant", [each for each in NARROW if each.dtype is F32], ids=str)
@EXAMPLES_ALONE
@example(case=MANY)
@example(case=MANY_ROWS)
@given(case=narrow_cases)
def test_order_reaches_no_bit_of_narrow_products(host: HostKernels, variant: Narrow, case: NarrowCase) -> None:
    first, *others = (narrow_product(host, variant, case, order).results for order in (FORWARD, REVERSE, 2))
    assert others == [first, first]


@pytest.mark.parametrize("variant", TILE[:3], ids=str)
@EXAMPLES_ALONE
@example(case=LONG)
@example(case=SHARED)
@example(case=TALL)
@given(case=tile_cases)
def test_order_reaches_no_bit_of_tiles(host: HostKernels, variant: Tile, case: TileCase) -> None:
    first, *others = (tile_product(host, variant, case, order).results for order in (FORWARD, REVERSE, 2))
    assert others == [first, first]
