"""What the property tests draw: shapes, tilings, dropout, orders of execution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.gpu.kernels import OCTET
from lt_runtime.gpu.params import Dropout
from lt_runtime.layout import packed
from lt_runtime.planning.launches import DropoutState, grid_for
from lt_runtime.problem import Philox, keep_threshold
from lt_runtime.reference import dropout_scale
from tests.host_kernels.build import SANITIZER, Sanitizer
from tests.strategies import generators

Shape = tuple[int, int]
Pair = tuple[int, int]

# ThreadSanitizer starts a thread for each of a block's: explicit examples are all that there is time for.
_PHASES = (Phase.explicit,) if SANITIZER is Sanitizer.THREAD else tuple(Phase)
FEW: Final = settings(max_examples=30, deadline=None, phases=_PHASES)
MORE: Final = settings(max_examples=30 if SANITIZER is Sanitizer.ADDRESS else 100, deadline=None, phases=_PHASES)

NO_DROPOUT: Final = Dropout(threshold=65536, scale=1.0)

axes = st.one_of(st.just(1), st.integers(1, 40), st.sampled_from((8, 16, 64, 65, 96, 131)))
shapes = st.tuples(axes, st.one_of(axes, st.sampled_from((257, 264))))
orders = st.integers(0, 5)
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Tiling:
    """A block's threads in x and y, and the grid's blocks in y; None leaves all of it to the runtime."""

    block: Pair
    blocks_y: int

    def grid(self, shape: Shape) -> tuple[Pair, Pair]:
        """Grid and block that cover a matrix."""
        return (columns_of_blocks(shape[1], self.block), self.blocks_y), self.block


blocks = st.sampled_from(((1, 1), (1, 7), (3, 5), (32, 8), (2, 128), (16, 16), (256, 1), (5, 51)))
tilings = st.one_of(st.none(), st.builds(Tiling, blocks, st.integers(1, 4)))


def columns_of_blocks(cols: int, block: Pair) -> int:
    return -(-cols // (OCTET * block[0]))


def launch_shape(shape: Shape, tiling: Tiling | None) -> tuple[Pair, Pair]:
    """Grid and block."""
    return grid_for(packed(*shape)) if tiling is None else tiling.grid(shape)


@dataclass(frozen=True)
class Drops:
    """Dropout, its step passed as a value or through memory."""

    p: float
    philox: Philox
    step_in_memory: bool

    def state(self) -> tuple[DropoutState, NDArray[np.uint32]]:
        """What a launch needs, and the step's memory, to be kept until then."""
        step = np.array([self.philox.step], np.uint32)
        address = step.ctypes.data if self.step_in_memory else 0
        return DropoutState(keep_threshold(self.p), self.philox, address), step

    def factors(self, shape: Shape) -> NDArray[np.float64]:
        return dropout_scale(shape, self.p, self.philox)


drops = st.builds(Drops, st.sampled_from((0.1, 0.5, 0.0, 0.93)), generators, st.booleans())
