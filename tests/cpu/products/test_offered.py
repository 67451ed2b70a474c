"""Which of the heuristic's algorithms is chosen for a product without measurements; times are µs on an H200."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm, MatmulTile, ReductionScheme
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.layout import packed
from lt_runtime.problem import MatmulProblem, Spec
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.offered import Offered, most_promising
from tests.support.algorithm_library import BOTH, NONE, WORKSPACE, FakeLibrary
from tests.support.product_problems import FP32, TF32, forward, weight_gradient

BIAS, GELU = Epilogue.BIAS, Epilogue.GELU_AUX_BIAS
HOPPER = 66
Entry = tuple[tuple[int, int], float]
"""A tile's rows and columns, and the number of waves of blocks in which the algorithm covers D."""
Nodes = dict[tuple[int, int] | None, list[str]]
"""For each tile, the kinds of the nodes in a launch's graph; tiles without an entry launch one kernel."""


tf32, tf32_gradient = functools.partial(forward, **TF32), functools.partial(weight_gradient, **TF32)


def offers(*entries: Entry) -> list[Offered]:
    return [Offered(HOPPER, tile, 1, waves) for tile, waves in entries]


@pytest.mark.parametrize(
    ("problem", "entries", "best"),
    [
        # With a bias, tiles of more than 64 rows are slow: the entries below take 57.5, 56.0 and 40.5 µs.
        (forward(262144, 104, 64, BIAS), [((104, 256), 7.758), ((104, 128), 15.515), ((56, 512), 7.758)], 2),
        # Measured: the first algorithm takes 13.3 µs, the last 10.8 µs.
        (forward(65536, 80, 56, BIAS), [((80, 256), 1.939), ((80, 128), 3.879), ((48, 512), 1.939)], 2),
        # Measured: the first algorithm takes 66.8 µs, the last 34 µs.
        (forward(131072, 128, 32, GELU), [((128, 128), 7.758), ((64, 256), 7.758), ((64, 512), 3.879)], 2),
        # Larger tiles take fewer waves of blocks: the first algorithm takes 19.2 µs, the second 17.0 µs.
        (forward(262144, 40, 32), [((64, 256), 7.758), ((64, 512), 3.879), ((32, 512), 7.758)], 1),
        # All algorithms take one wave of blocks: the first takes 9.6 µs, the second 9.8 µs.
        (forward(827, 5376, 320, BIAS), [((128, 288), 0.955), ((256, 144), 0.955), ((384, 96), 0.955)], 0),
        # Measured: the first algorithm takes 12.8 µs, the second 16.2 µs.
        (forward(131072, 48, 40), [((48, 512), 1.939), ((48, 256), 3.879), ((48, 128), 7.758)], 0),
        (forward(25, 64, 64), [((8, 64), 0.061), ((64, 8), 0.03)], 0),
        # Both take as long as reading the weight from memory, 111 and 117 µs, although the second reads x less often.
        (forward(24, 28672, 8192, Epilogue.GELU_BIAS), [((128, 24), 1.7), ((256, 24), 0.85)], 0),
    ],
)
def test_the_tiles_that_were_measured_to_be_fast(problem: MatmulProblem, entries: list[Entry], best: int) -> None:
    assert most_promising(problem, offers(*entries)) == best


def test_only_what_was_measured_is_estimated() -> None:
    """Other kernels, split sums, unknown tiles or waves, and epilogues that differentiate have no estimate."""
    problem, slow = forward(262144, 40, 136), Offered(HOPPER, (64, 64), 1, 31.03)
    fast = slow._replace(tile=(64, 512), waves=3.879)
    assert most_promising(problem, [slow, fast]) == 1
    for unknown in ({"algo_id": 21}, {"splitk": 2}, {"tile": None}, {"waves": 0.0}):
        assert most_promising(problem, [slow, fast._replace(**unknown)]) == 0
        assert most_promising(problem, [slow._replace(**unknown), fast]) == 0
    for epilogue in (Epilogue.DGELU, Epilogue.DRELU_BGRAD, Epilogue.BGRADA, Epilogue.BGRADB):
        assert most_promising(forward(262144, 40, 32, epilogue), [slow, fast]) == 0


def test_a_little_does_not_count() -> None:
    """If two tiles take equally many waves, the smaller one saves only some loads, less than a tenth of the time."""
    larger, smaller = offers(((64, 128), 2.0), ((64, 64), 2.0))
    assert most_promising(forward(65536, 24, 16), [larger, smaller]) == 0
    assert most_promising(forward(8192, 24, 4096), [larger, smaller]) == 1


def test_tiles_as_large_are_kept_where_the_tensor_cores_are_busy() -> None:
    large = forward(4096, 14336, 4096)
    assert most_promising(large, offers(((128, 256), 13.6), ((256, 128), 13.6), ((192, 128), 18.1))) == 0


OLDER = (64, 64)


def test_a_short_sum_is_not_split() -> None:
    """The product 3904x24x21 takes 10.4 µs by algorithm 23, which splits K, 2.9 by 24, which does not, 47.8 by 42."""
    split, slow, whole = (Offered(*each) for each in ((23, OLDER, 8, 0.7), (42, OLDER, 1, 0.5), (24, OLDER, 1, 0.1)))
    for epilogue in (Epilogue.NONE, BIAS, Epilogue.DGELU):
        assert most_promising(forward(3904, 24, 21, epilogue), [split, slow, whole, whole]) == 2
    assert most_promising(forward(3904, 24, 128), [split, whole]) == 1
    assert most_promising(forward(3904, 24, 129), [split, whole]) == 0
    assert most_promising(forward(3904, 24, 21), [split, slow]) == 0, "nothing better is offered"


def test_in_full_fp32_no_kernel_is_passed_over() -> None:
    """The product 48x64x2112 takes 9.5 µs by the algorithm with id 20, and 38.8 µs by the next algorithm."""
    problem = forward(48, 64, 2112, **FP32)
    assert most_promising(problem, [Offered(20, OLDER, 33, 0.5), Offered(55, OLDER, 1, 0.5)]) == 0


@pytest.mark.parametrize("seldom_fast", [20, 41, 42])
def test_kernels_that_are_hardly_ever_the_fastest_come_last(seldom_fast: int) -> None:
    """The input gradient 1078x2049x31 in TF32 takes 12.1 µs by the first algorithm (id 20), and 9.2 µs by the next."""
    slow, usual = Offered(seldom_fast, OLDER, 1, 0.5), Offered(23, OLDER, 1, 0.5)
    for problem in (tf32(1071, 2053, 640), tf32(541, 619, 23), forward(3904, 24, 21)):
        assert most_promising(problem, [slow, slow, usual, usual]) == 2
        assert most_promising(problem, [slow, slow]) == 0, "there is no other"


def test_large_tf32_products_are_left_to_hoppers_own_kernels() -> None:
    """By the first and the second algorithm, 7456x2840x464 takes 150 and 84 µs, and 13830x224x48 17.7 and 18.5 µs."""
    offered = [Offered(21, (128, 128), 1, 1.7), Offered(43, (128, 128), 1, 1.0)]
    assert most_promising(tf32(7456, 2840, 464), offered) == 1
    assert most_promising(tf32(13830, 224, 48), offered) == 0
    assert most_promising(tf32(7456, 2840, 464, Epilogue.DGELU), offered) == 0
    assert most_promising(tf32(7456, 2840, 464), offered[:1]) == 0
    assert most_promising(forward(7456, 2840, 464), offered) == 0


HOPPERS, OLDERS = 43, 21  # ids of cuBLASLt's kernels for TF32


@pytest.mark.parametrize(
    ("problem", "entries", "best"),
    [
        # Measured: 64 tiles take 37.1 µs, and 32 tiles with K split in four 19.7 µs; with rows and columns exchanged,
        # 33.4 and 19.9 µs.
        (tf32_gradient(512, 1024, 2048), [(HOPPERS, (128, 64), 1, 0.485), (OLDERS, (128, 128), 4, 0.97)], 1),
        (tf32_gradient(1024, 512, 2048), [(HOPPERS, (64, 128), -1, 0.606), (OLDERS, (128, 128), 4, 0.97)], 1),
        # Measured: 64 tiles take 25.8 µs, 128 tiles of half the size 17.7 µs.
        (tf32_gradient(1024, 1024, 1024), [(HOPPERS, (128, 128), -1, 0.485), (OLDERS, (128, 64), 1, 0.97)], 1),
        # Measured: 72 tiles take 285 µs; 144 tiles of half the size, which 132 blocks share evenly, 194 µs.
        (tf32_gradient(768, 3072, 8192), [(HOPPERS, (128, 256), -1, 0.545), (HOPPERS, (128, 128), -1, 1.0)], 1),
        (tf32_gradient(3072, 768, 8192), [(HOPPERS, (128, 128), -1, 1.0), (HOPPERS, (128, 256), -1, 0.545)], 0),
        # The first algorithm takes 80 µs, the second 115 µs: larger tiles save loads, but the tensor cores are busy.
        (tf32_gradient(14336, 4096, 64), [(HOPPERS, (128, 128), 1, 1.0), (OLDERS, (128, 256), 1, 13.576)], 0),
        # With K whole the product takes 4.8 µs, with K split in four 5.2 µs.
        (tf32_gradient(256, 256, 256), [(OLDERS, (64, 64), 1, 0.061), (OLDERS, (64, 64), 4, 0.242)], 0),
    ],
)
def test_tf32_gradients_are_left_to_the_tiles_that_were_measured_to_be_fast(
    problem: MatmulProblem, entries: list[tuple[int, tuple[int, int], int, float]], best: int
) -> None:
    offered = [Offered(*each) for each in entries]
    assert most_promising(problem, offered) == best
    forward_pass = tf32(problem.m, problem.n, problem.k)
    first_of_hopper = next((i for i, each in enumerate(offered) if each.algo_id == HOPPERS), 0)
    assert most_promising(forward_pass, offered) == first_of_hopper, "that of a forward pass is the heuristic's"
    summed = replace(problem, epilogue=Epilogue.BGRADA)
    assert most_promising(summed, offered) == 0, "sums beside it take a time of their own"
    unknown = [each._replace(tile=None) for each in offered]
    assert most_promising(problem, unknown) == first_of_hopper


def test_short_tf32_sums_of_ragged_rows_are_left_to_small_kernels() -> None:
    """By the first and the second algorithm, 541x619x23 takes 6.9 and 3.5 µs, and 625x77x13 3.3 and 2.5 µs."""
    offered = [Offered(23, OLDER, 1, 0.7), Offered(55, OLDER, 1, 0.1)]
    assert most_promising(tf32(541, 619, 23), offered) == 1
    assert most_promising(tf32(541, 619, 128), offered) == 1
    assert most_promising(tf32(541, 619, 129), offered) == 0
    assert most_promising(tf32(544, 624, 24), offered) == 0, "rows that are whole vectors"
    # Measured: 531x453x24 takes 4.5 µs by the first algorithm, 3.1 µs by the second.
    for terms, best in ((23, 1), (39, 0)):
        assert most_promising(replace(tf32(541, 619, terms), b=Spec(packed(terms, 619))), offered) == best
    assert most_promising(tf32(541, 619, 23), offered[:1]) == 0
    assert most_promising(forward(541, 619, 23), offered) == 0


def test_tf32_sums_are_not_split_into_parts_of_few_terms() -> None:
    """The product 21x24x3904 takes 11.7 µs if K is split into 132 parts, and 7.6 µs with 32 parts.

    The product 48x221x13830 takes 16.2 µs if K is split into 66 parts, and 17.8 µs with 58 parts.
    """
    offered = [Offered(23, OLDER, parts, 0.7) for parts in (132, 66, 32, 16)]
    assert most_promising(tf32(21, 24, 3904), offered) == 2
    assert most_promising(tf32(48, 221, 13830), offered) == 0
    assert most_promising(tf32(21, 24, 640), offered) == 0, "all parts have few terms"
    assert most_promising(forward(21, 24, 3904), offered) == 0
    full_fp32 = forward(25, 128, 192, **FP32)  # takes 10.2 µs with K split into 132 parts, 5.6 µs with K whole
    assert most_promising(full_fp32, offered) == 3


@given(
    st.lists(
        st.builds(
            Offered,
            st.sampled_from([HOPPER, 21]),
            st.none() | st.tuples(st.integers(8, 512), st.integers(8, 512)),
            st.integers(0, 4),
            st.floats(0.0, 100.0),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([*Epilogue]),
)
def test_the_choice_is_one_of_the_offers_and_does_not_change(entries: list[Offered], epilogue: Epilogue) -> None:
    problem = forward(4096, 256, 512, epilogue)
    chosen = most_promising(problem, entries)
    assert 0 <= chosen < len(entries)
    assert chosen == most_promising(problem, entries), "of equal ones the heuristic's first"
    assert not chosen or (entries[chosen].algo_id, entries[chosen].splitk <= 1) == (HOPPER, True)


_Shown = tuple[MatmulTile, float, int]


class Offering(FakeLibrary):
    """A fake cuBLASLt whose heuristic offers Hopper kernels with given tiles, waves and parts of K.

    A query that excludes split K is offered the algorithms in `whole`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, entries: list[_Shown], whole: Sequence[_Shown] = ()) -> None:
        super().__init__(monkeypatch)
        self.entries = {(WORKSPACE, BOTH): entries, (WORKSPACE, NONE): whole}
        self.offered = {asked: [HOPPER] * len(each) for asked, each in self.entries.items() if each}

    def _query(self, *arguments: Any) -> int:
        status = super()._query(*arguments)
        for result, (tile, waves, parts) in zip(arguments[8]._obj, self.entries[self.asked[-1]], strict=False):
            algorithm = Algorithm(HOPPER.to_bytes(8, "little") + bytes(56)).set(AlgoConfigAttribute.TILE_ID, tile)
            algorithm = algorithm.set(AlgoConfigAttribute.STAGES_ID, 35).set(AlgoConfigAttribute.SPLITK_NUM, parts)
            result.algo[:] = struct.unpack("8Q", algorithm.blob)
            result.waves_count = waves
        return status


TALL = [(MatmulTile.TILE_104x256, 7.758, 1), (MatmulTile.TILE_104x128, 15.515, 1), (MatmulTile.TILE_56x512, 7.758, 1)]


def tile_of(problem: MatmulProblem, **options: Any) -> tuple[int, int] | None:
    algorithm = MatmulPlan(problem, 0, **options).algorithm
    assert algorithm is not None
    return algorithm.tile


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found: Nodes = {}
    monkeypatch.setattr(MatmulPlan, "nodes", lambda _, algorithm: found.get(algorithm.tile, ["KERNEL"]))
    return found


def test_a_plan_takes_the_most_promising_algorithm(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    library = Offering(monkeypatch, TALL)
    assert tile_of(forward(262144, 104, 64, BIAS)) == (56, 512)
    assert tile_of(forward(262144, 104, 64, BIAS), rank=0) == (104, 256), "the very first, where it is asked for"
    assert tile_of(forward(262144, 104, 64)) == (104, 256)
    assert [*library.asked] == [(WORKSPACE, BOTH)] * 3, "one query each"


def test_without_a_lean_launch_the_first_that_has_one_is_taken(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    Offering(monkeypatch, TALL)
    nodes[56, 512] = []  # an algorithm without nodes is one whose launch the fake library refuses
    assert tile_of(forward(262144, 104, 64, BIAS)) == (104, 256)
    nodes[104, 256] = ["KERNEL", "KERNEL", "KERNEL"]
    assert tile_of(forward(262144, 104, 64, BIAS)) == (104, 128)
    nodes[104, 128] = []
    with pytest.raises(PlanError, match="none of cuBLASLt's 3 algorithms is lean enough"):
        tile_of(forward(262144, 104, 64, BIAS))


def test_a_plain_product_takes_no_other_that_cannot_be_launched(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    Offering(monkeypatch, [(MatmulTile.TILE_64x256, 7.758, 1), (MatmulTile.TILE_64x512, 3.879, 1)])
    assert tile_of(forward(262144, 40, 32)) == (64, 512)
    nodes[64, 512] = []
    assert tile_of(forward(262144, 40, 32)) == (64, 256)


def test_what_is_known_to_be_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    """The last algorithm has a known fault: it drops the tail of 776 = 12·64 + 8 terms.

    An algorithm with a known fault is not chosen, wherever the heuristic ranks it.
    """
    Offering(monkeypatch, [(MatmulTile.TILE_64x64, 31.03, 1), (MatmulTile.TILE_64x512, 3.879, 12)])
    monkeypatch.setattr("lt_runtime.products.offered.most_promising", lambda _, found: len(found) - 1)
    assert tile_of(forward(262144, 40, 768, BIAS)) == (64, 512)
    assert tile_of(forward(262144, 40, 776, BIAS)) == (64, 64)


def test_a_product_that_nobody_makes_unsplit_is_split(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    library = Offering(monkeypatch, [(MatmulTile.TILE_64x64, 0.1, 4)])
    unsplit = replace(forward(8, 8, 512), no_split_k=True)
    plan = MatmulPlan(unsplit, 0)
    assert plan.algorithm is not None
    assert plan.algorithm.get(AlgoConfigAttribute.SPLITK_NUM) == 4
    assert [reductions for _, reductions in library.asked] == [ReductionScheme.NONE, BOTH]


def test_short_sums_are_asked_for_unsplit(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    split, whole = (MatmulTile.TILE_64x64, 0.1, 4), (MatmulTile.TILE_64x128, 0.1, 1)
    library = Offering(monkeypatch, [split], [whole])
    assert tile_of(forward(640, 8, 72)) == (64, 128)
    assert tile_of(forward(640, 8, 72), rank=0) == (64, 64), "the very first, where it is asked for"
    assert tile_of(forward(640, 8, 512)) == (64, 64)
    assert library.asked == [(WORKSPACE, each) for each in (BOTH, NONE, BOTH, BOTH)]
    library = Offering(monkeypatch, [])
    with pytest.raises(PlanError, match="offers 0 sound algorithms"):
        tile_of(forward(640, 8, 72))
    assert library.asked == [(WORKSPACE, BOTH)], "nothing is asked for again where nothing was offered"


def test_tiles_that_waste_little_are_taken_for_tall_tf32_products_with_short_sums() -> None:
    """In tiles of 256x64, 262144x40x32 takes 68.4 µs, in 64x128 26.8; 262144x24x72 57.2 in 128x128, else 35.5."""
    for n, k, slow, fast in ((40, 32, (21, (256, 64)), (21, (64, 128))), (24, 72, (21, (128, 128)), (43, (64, 128)))):
        waves = [-(-(1 << 18) // tile[1]) / 132 for _, tile in (slow, fast)]
        offers = [Offered(algo, tile, 1, each) for (algo, tile), each in zip((slow, fast), waves, strict=True)]
        assert most_promising(tf32(1 << 18, n, k), offers) == 1


def test_a_memset_matters_to_a_small_product(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    Offering(monkeypatch, [(MatmulTile.TILE_128x256, 1.0, 1), (MatmulTile.TILE_256x128, 1.0, 1)])
    nodes[128, 256] = ["MEMSET", "KERNEL"]
    assert tile_of(forward(512, 512, 512)) == (256, 128)
    assert tile_of(forward(4096, 1024, 512)) == (128, 256)
