"""Hypothesis strategies for property tests of kernels.

The strategies draw shapes, placements of matrices that suit a kernel, tilings, dropout, and orders in which a kernel's
blocks and threads are executed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.kernel import Dropout
from lt_runtime.kernels.tiling import OCTET, Access, Tiling
from lt_runtime.problem import DType, Philox, keep_threshold
from lt_runtime.reference import dropout_scale
from tests.host_kernels.build import SANITIZER, Sanitizer
from tests.support.strategies import Placement, generators

Shape = tuple[int, int]
Pair = tuple[int, int]

# Under ThreadSanitizer only the explicit examples run, because races do not depend on the drawn numbers.
_PHASES = (Phase.explicit,) if SANITIZER is Sanitizer.THREAD else settings().phases
FEW: Final = settings(max_examples=12, deadline=None, phases=_PHASES)
EXAMPLES_ALONE: Final = settings(phases=(Phase.explicit,), deadline=None)

NO_DROPOUT: Final = Dropout()
VECTOR_BYTES: Final = 16

axes = st.one_of(st.just(1), st.integers(1, 40), st.sampled_from((8, 16, 64, 65, 96, 131)))
shapes = st.one_of(
    st.tuples(axes, st.one_of(axes, st.sampled_from((257, 264)))),
    # Long matrices, which backward kernels split into parts of some rows, and wide ones, for which kernels launch more
    # blocks than run at a time.
    st.tuples(st.sampled_from((100, 333, 700)), st.sampled_from((1, 10, 33))),
    st.tuples(st.integers(1, 9), st.sampled_from((1600, 2000))),
)
orders = st.integers(0, 5)
seeds = st.integers(0, 2**32 - 1)


def suit_shape(shape: Shape, *, aligned: bool, flat: bool = False) -> Shape:
    """Changes a shape so that a kernel supports it: the number of columns becomes a multiple of eight if `aligned`, and
    more than 16 but no multiple of eight if `flat`."""
    rows, cols = shape
    if flat:
        cols = cols if cols > 2 * OCTET else cols + 2 * OCTET
        return max(rows, OCTET), cols + (cols % OCTET == 0)
    return (rows, -(-cols // OCTET) * OCTET) if aligned else shape


def suit_place(
    place: Placement, shape: Shape, dtype: DType, *, aligned: bool, column_major: bool | None = None
) -> Placement:
    """Changes where a matrix lies in its buffer (order, gap between rows, offset) so that a kernel supports it.

    Args:
        aligned: whether each row (of a column-major matrix each column) must begin at a multiple of 16 bytes.
        column_major: the wanted order; if None, an aligned matrix is row-major and any other keeps its order.
    """
    order = place.column_major and not aligned if column_major is None else column_major
    if not aligned:
        return Placement(order, place.gap, place.offset)
    step, width = VECTOR_BYTES // dtype.itemsize, shape[0] if order else shape[1]
    return Placement(order, -width % step + step * place.gap, step * place.offset)


def suit_places(
    access: Access, shape: Shape, *places: tuple[Placement, DType], odd: int = 0, others_aligned: bool = False
) -> list[Placement]:
    """Draws placements of matrices of one shape for which a pass chooses `access` (aligned, flat or any layout), with
    types.

    Args:
        odd: index of the matrix that is misaligned (not at a multiple of 16 bytes) if the access is `ANY`.
        others_aligned: whether all other matrices are aligned in that case.
    """
    if access is Access.FLAT:
        return [Placement(column_major=False, gap=0, offset=OCTET * place.offset) for place, _ in places]
    aligned = [access is Access.ALIGNED or (others_aligned and i != odd) for i in range(len(places))]
    suited = [
        suit_place(place, shape, dtype, aligned=each) for (place, dtype), each in zip(places, aligned, strict=True)
    ]
    if access is Access.ANY:
        suited[odd] = replace(suited[odd], offset=suited[odd].offset | 1)
    return suited


@dataclass(frozen=True)
class Blocks:
    """A launch's blocks: a block's threads in x and y, both powers of two, and the grid's blocks in y."""

    block: Pair
    blocks_y: int

    def tiling(self, shape: Shape) -> Tiling:
        """Returns grid and block that cover a matrix."""
        return Tiling((-(-shape[1] // (OCTET * self.block[0])), self.blocks_y), self.block)

    def suit(self, access: Access) -> bool:
        """Whether a pass that moves octets by `access` can be launched with these blocks."""
        return access is not Access.FLAT or OCTET <= self.block[1] <= 8 * OCTET


_TALL = ((1, 8), (2, 128), (4, 16), (8, 32), (16, 16), (32, 8), (1, 256))
tall_blocks = st.builds(Blocks, st.sampled_from(_TALL), st.integers(1, 5))
"""Strategy of blocks for kernels that transpose, which need at least eight rows of threads."""
blocks = st.one_of(
    tall_blocks, st.builds(Blocks, st.sampled_from(((1, 1), (8, 1), (2, 4), (64, 2), (256, 1))), st.integers(1, 5))
)


@dataclass(frozen=True)
class Drops:
    """The dropout of a test case; its step is passed to the kernel as a value or by an address."""

    p: float
    philox: Philox
    step_in_memory: bool

    def state(self) -> tuple[DropoutState, NDArray[np.uint32]]:
        """Returns a launch's dropout argument, and the array of the step's number, which must live until the launch."""
        step = np.array([self.philox.step], np.uint32)
        if not self.step_in_memory:
            return DropoutState(keep_threshold(self.p), self.philox), step
        # The step in the argument is not that in memory: a kernel that reads it draws another mask.
        elsewhere = Philox(self.philox.seed, self.philox.layer)
        return DropoutState(keep_threshold(self.p), elsewhere, step.ctypes.data), step

    def factors(self, shape: Shape) -> NDArray[np.float64]:
        return dropout_scale(shape, self.p, self.philox)


drops = st.builds(Drops, st.sampled_from((0.1, 0.5, 0.0, 0.93)), generators, st.booleans())


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Base of the test cases of all elementwise kernels: the fields that they share.

    Attributes:
        in_place: whether the result overwrites an operand.
        slope: slope of a leaky ReLU.
        blocks: the launch's blocks; None if the runtime chooses them.
    """

    shape: Shape
    in_place: bool = False
    slope: float = 0.25
    drops: Drops
    blocks: Blocks | None
    order: int = 0
    seed: int = 0


LAUNCH: Final[dict[str, Any]] = {
    "shape": shapes,
    "in_place": st.booleans(),
    "slope": st.sampled_from((0.01, 0.25, 1.5, -0.5)),
    "drops": drops,
    "blocks": st.one_of(st.none(), blocks),
    "order": orders,
    "seed": seeds,
}
"""Hypothesis strategies that draw the fields of `Launch`, by name."""
