"""Products that are tiny in one dimension, launched by the runtime, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.compiler import Macros
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels import narrow as narrow_pass
from lt_runtime.kernels.kernel import Entry
from lt_runtime.kernels.narrow import NarrowPass, supports
from tests.host_kernels.arrays import FLAT
from tests.host_kernels.cases import EXAMPLES_ALONE, FEW, Shape, axes, orders, seeds, suit_place
from tests.host_kernels.harness import FORWARD, REVERSE, HostKernels, Turns
from tests.host_kernels.products import OPERANDS, Product
from tests.host_kernels.products import on_a_small_gpu as on_a_small_gpu  # a fixture
from tests.host_kernels.variants import F32, NARROW, Narrow
from tests.support.strategies import Placement, placements

_TRANSPOSED = {"narrow_n": (False, True), "narrow_k": (False, False), "narrow_m": (True, False)}
"""Whether A and B are column-major."""
_MOVED = {"narrow_n": ("a", "b"), "narrow_k": ("b", "c", "d", "aux"), "narrow_m": ("b",)}
"""Names of the matrices that a kernel moves in vectors."""
_EPILOGUE = {"narrow_n": Epilogue.BIAS, "narrow_m": Epilogue.BGRADA}


@dataclass(frozen=True)
class NarrowCase:
    """A product.

    Attributes:
        tiny: the dimension that is tiny, counted down from the variant's width.
        long: the two others, in the order M, N, K.
        c: where C is: nowhere, where D is, or apart.
        vector: whether there is a bias, or a bias gradient is wanted, where a kernel is not compiled for one of both.
        busy: the GPU has few threads, and blocks share K early.
    """

    tiny: int
    long: tuple[int, int]
    alpha: float
    beta: float
    c: str
    vector: bool
    busy: bool
    places: tuple[Placement, ...]
    order: int
    seed: int

    def shape(self, variant: Narrow) -> tuple[int, int, int]:
        """M, N and K; if the variant is aligned, the contiguous axis of the matrices that it moves is whole octets."""
        width = max(variant.width - self.tiny, variant.width // 2 + 1)
        first, second = self.long
        if variant.aligned:
            second = -(-second // 8) * 8
        axis = "nkm".index(variant.entry[-1])
        return ((first, width, second), (first, second, width), (width, second, first))[axis]


cases = st.builds(
    NarrowCase,
    tiny=st.integers(0, 7),
    long=st.tuples(st.one_of(axes, st.sampled_from((257, 700))), st.one_of(axes, st.sampled_from((264, 1030)))),
    alpha=st.sampled_from((1.0, 1.0, -0.75)),
    beta=st.sampled_from((1.0, 1.0, 0.0, 0.5)),
    c=st.sampled_from(("nowhere", "in place", "apart")),
    vector=st.booleans(),
    busy=st.booleans(),
    places=st.tuples(*(placements for _ in OPERANDS)),
    order=orders,
    seed=seeds,
)


def made(case: NarrowCase, variant: Narrow) -> Product:
    """The product of a case, whose placements suit the variant's kernel."""
    across = dict(zip("ab", _TRANSPOSED[variant.entry], strict=True))

    def suited(name: str, shape: Shape, place: Placement) -> Placement:
        aligned = variant.aligned and name in _MOVED[variant.entry]
        at = suit_place(place, shape, variant.dtype, aligned=aligned, column_major=across.get(name, False))
        # an odd offset, so that the runtime does not take the fast path by chance
        return replace(at, offset=at.offset | 1) if name == "b" and not aligned else at

    epilogue = variant.epilogue or (_EPILOGUE[variant.entry] if case.vector else Epilogue.NONE)
    return Product(case, variant.dtype, case.shape(variant), epilogue, suited)


def run(product: Product, host: HostKernels, variant: Narrow, case: NarrowCase, order: int) -> None:
    def get(entry: Entry, macros: Macros, device: int) -> Turns:
        assume(variant.matches(entry.name, macros))
        return Turns(host, entry, macros, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "get_kernel", get)
        if case.busy:
            patch.setattr(narrow_pass, "_BUSY_THREADS", 64)
            patch.setattr(narrow_pass, "_LONG", 1)
        own_pass = NarrowPass(product.problem, 0)
    product.run(own_pass)


MANY = NarrowCase(3, (700, 264), 1.0, 1.0, "in place", True, True, (FLAT,) * len(OPERANDS), FORWARD, 0)
"""In this case threads have several rows of D, and blocks share K."""
LONG = replace(MANY, long=(800, 32), c="nowhere")
"""In this case blocks share M, and their threads have several rows."""


@pytest.mark.parametrize("variant", NARROW, ids=str)
@FEW
@example(case=MANY)
@example(case=LONG)
@example(case=replace(LONG, c="in place"))
@example(case=replace(LONG, long=(700, 8)))
@example(case=replace(MANY, busy=False, c="nowhere"))
@example(case=replace(MANY, busy=False, long=(3, 1030)))
@given(case=cases)
def test_products(host: HostKernels, variant: Narrow, case: NarrowCase) -> None:
    product = made(case, variant)
    assert supports(product.problem)
    run(product, host, variant, case, case.order)
    product.check()


@pytest.mark.parametrize("variant", [each for each in NARROW if each.dtype is F32], ids=str)
@EXAMPLES_ALONE
@example(case=MANY)
@example(case=LONG)
@given(case=cases)
def test_the_order_of_execution_does_not_reach_the_bits(host: HostKernels, variant: Narrow, case: NarrowCase) -> None:
    runs = []
    for order in (FORWARD, REVERSE, 2 + case.order):
        product = made(case, variant)
        run(product, host, variant, case, order)
        runs.append(product.results)
    assert runs[0] == runs[1] == runs[2]
