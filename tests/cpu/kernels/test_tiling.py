"""Grids and blocks of elementwise kernels: the matrices of the fast path, and that every element has a thread."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.errors import ShapeError
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.kernels import kernel, tiling
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.kernels.epilogue import DropoutPass
from lt_runtime.kernels.kernel import Struct
from lt_runtime.kernels.tiling import (
    MAX_GRID_Y,
    OCTET,
    THREADS,
    Access,
    Tiling,
    are_aligned,
    moves_vectors,
    reduction,
    square_tiles,
    sweep,
    wave_of,
)
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType, Philox, Spec

WAVE = 528  # blocks that run at once: four on each of 132 multiprocessors
ROW, COLUMN = Order.ROW, Order.COLUMN
LAST_ROW = 2**32 - 4 * MAX_GRID_Y * THREADS

extents = st.one_of(st.integers(1, 70), st.integers(1, 10**5), st.sampled_from((128, 512, 513, 2**20, 2**31)))
waves = st.integers(1, 2000)


def assert_covers(rows: int, cols: int, done: Tiling) -> None:
    """Fails unless the grid covers every column exactly once, with no more rows of blocks than the matrix needs."""
    (columns, parts), (x, y) = done
    assert x & (x - 1) == y & (y - 1) == 0, "sides are powers of two"
    assert x * y <= THREADS
    assert (columns - 1) * x * OCTET < cols <= columns * x * OCTET
    assert 1 <= parts <= MAX_GRID_Y
    assert (parts - 1) * y < rows, "every block has a row"


def assert_octets_begin_alike(rows: int, cols: int, done: Tiling) -> None:
    """Fails unless the rows of a thread of a flat matrix are a multiple of eight apart, and a block has few enough
    rows.
    """
    (_, _), (_, y) = done
    if rows >= OCTET and cols > 2 * OCTET:
        assert y in (OCTET, 2 * OCTET, 4 * OCTET, 8 * OCTET)


@pytest.mark.parametrize(
    ("dtype", "layout", "alignment", "expected"),
    [
        ("float32", Layout(3, 8, ROW, 8), 256, True),
        ("float32", Layout(3, 8, ROW, 12), 16, True),
        ("float16", Layout(3, 8, ROW, 12), 16, False),
        ("bfloat16", Layout(3, 8, ROW, 16), 16, True),
        ("bfloat16", Layout(3, 8, ROW, 16), 8, False),
        ("float32", Layout(3, 8, ROW, 9), 256, False),
        ("float32", Layout(1, 8, ROW, 9), 256, True),
        ("float32", Layout(3, 12, ROW, 12), 256, False),
        ("float32", Layout(8, 8, COLUMN, 8), 256, False),
    ],
)
def test_the_fast_path_takes_rows_of_whole_octets(dtype: str, layout: Layout, alignment: int, expected: bool) -> None:
    kind, good = DType(dtype), Spec(packed(3, 8))
    spec = Spec(layout, alignment)
    assert are_aligned(kind, spec) == expected
    assert are_aligned(kind, good, None, spec) == expected
    assert are_aligned(kind, good, None)


@pytest.mark.parametrize(
    ("layout", "alignment", "expected"),
    [
        (Layout(5, 7, COLUMN, 8), 16, True),
        (Layout(5, 7, COLUMN, 5), 16, False),
        (Layout(5, 1, COLUMN, 5), 16, True),
        (Layout(5, 7, COLUMN, 8), 8, False),
        (Layout(5, 7, ROW, 8), 16, True),
    ],
)
def test_lines_on_16_bytes(layout: Layout, alignment: int, expected: bool) -> None:
    assert moves_vectors(Spec(layout, alignment), DType.FLOAT16) == expected


def test_the_slow_path_takes_what_registers_it_needs() -> None:
    assert dict(Access.ALIGNED.macros(5)) == {"ALIGNED": "1", "BLOCKS": "5"}
    assert dict(Access.FLAT.macros(5)) == {"ALIGNED": "2", "BLOCKS": "5"}
    assert dict(Access.ANY.macros(5)) == {"ALIGNED": "0", "BLOCKS": "1"}


@pytest.mark.parametrize(
    ("layout", "alignment", "expected"),
    [
        (packed(8, 71), 16, Access.FLAT),
        (packed(8, 71), 8, Access.ANY),
        (Layout(8, 71, ROW, 79), 256, Access.ANY),
        (packed(8, 71, order=COLUMN), 256, Access.ANY),
        (packed(7, 71), 256, Access.ANY),
        (packed(8, 17), 256, Access.FLAT),
        (packed(8, 15), 256, Access.ANY),
        (packed(8, (1 << 18) + 1), 256, Access.ANY),
        (packed(8, 72), 256, Access.ALIGNED),
    ],
)
def test_large_matrices_without_gaps_are_flat(layout: Layout, alignment: int, expected: Access) -> None:
    kind, other = DType.BFLOAT16, Spec(packed(*layout.shape))
    assert Access.of((kind, Spec(layout, alignment))) is expected
    assert Access.of((DType.FLOAT32, other), (kind, None), (kind, Spec(layout, alignment))) is expected


def test_a_wave_is_what_all_multiprocessors_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "device_info", lambda _: DeviceInfo(0, "", 90, multiprocessors=132, memory=0))
    assert wave_of(0, 4) == WAVE


@given(rows=extents, cols=extents, wave=st.one_of(st.none(), waves))
def test_a_sweep_covers_the_matrix(rows: int, cols: int, wave: int | None) -> None:
    done = sweep(packed(rows, cols), wave)
    assert_covers(rows, cols, done)
    assert_octets_begin_alike(rows, cols, done)
    (columns, parts), (_, y) = done
    if wave is None:
        stacked = -(-rows // y)
        assert parts == min(-(-stacked // 2), MAX_GRID_Y), "two octets a thread"
    else:
        assert columns * parts <= max(wave, columns)


@given(rows=extents, cols=extents, wave=waves, transposes=st.booleans(), strips=st.booleans())
def test_a_reduction_covers_a_matrix_in_a_wave(rows: int, cols: int, wave: int, transposes: bool, strips: bool) -> None:
    done = reduction(packed(rows, cols), wave, transposes=transposes, strips=strips)
    assert_covers(rows, cols, done)
    if not strips:
        assert_octets_begin_alike(rows, cols, done)
    (columns, parts), (_, y) = done
    assert columns * parts <= max(wave, columns)
    assert not transposes or y >= OCTET
    assert parts == 1 or columns <= MAX_TICKETS, "a counter for each column of blocks"


@given(rows=extents, cols=extents)
def test_square_tiles_that_sum_have_a_counter_for_each_column_and_one_more(rows: int, cols: int) -> None:
    (columns, parts), (x, y) = square_tiles(packed(rows, cols), sums=True)
    assert (columns - 1) * x * OCTET < cols <= columns * x * OCTET
    assert (parts - 1) * y * OCTET < rows, "every block has a row"
    assert parts == 1 or columns < MAX_TICKETS


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (100, 128), (128, 128), (512, 128)])
def test_a_small_matrix_is_summed_in_strips(rows: int, threads: int) -> None:
    assert reduction(packed(rows, 1000), WAVE, transposes=False) == Tiling((63, 1), (2, threads))


@pytest.mark.parametrize(("rows", "cols"), [(513, 1000), (512, 16 * WAVE + 1)])
def test_a_large_one_is_not(rows: int, cols: int) -> None:
    assert reduction(packed(rows, cols), WAVE, transposes=False).block != (2, 128)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((2048, 1024), (8, 32)),
        ((8192, 64), (8, 32)),
        ((2048, 1032), (16, 16)),
        ((8192, 3072), (16, 16)),
        ((8192, 12288), (32, 8)),
        ((1 << 20, 24), (4, 64)),
        ((8, 1 << 20), (32, 8)),
    ],
)
def test_blocks_that_sum_are_the_wider_the_larger_the_matrix(shape: tuple[int, int], block: tuple[int, int]) -> None:
    assert reduction(packed(*shape), WAVE, transposes=False).block == block


@pytest.mark.parametrize(("rows", "wave", "parts"), [(100_000, WAVE, WAVE), (100_000, 10, 10), (600, WAVE, 10)])
def test_rows_are_shared_out_to_a_wave(rows: int, wave: int, parts: int) -> None:
    done = reduction(packed(rows, 24), wave, transposes=False)
    assert done == Tiling((1, parts), (4, 64))


def test_rows_that_32_bits_count_up_to() -> None:
    assert_covers(LAST_ROW, 8, sweep(packed(LAST_ROW, 8), None))
    assert_covers(LAST_ROW, 8, reduction(packed(LAST_ROW, 8), WAVE, transposes=True))
    with pytest.raises(ShapeError, match=f"{LAST_ROW + 1} rows; at most {LAST_ROW}"):
        sweep(packed(LAST_ROW + 1, 8), None)
    with pytest.raises(ShapeError, match=f"{LAST_ROW + 1} rows"):
        reduction(packed(LAST_ROW + 1, 8), WAVE, transposes=False)


@pytest.mark.parametrize(
    ("rows", "cols", "swept"),
    [(1, 2**20, (512, 2048)), (512, 3, (3, 512)), (1, 24, (3, 8)), (7, 13, (1, 91)), (2**20 + 4, 1, (1, 2**20 + 4))],
)
def test_dropout_without_gaps_has_rows_of_many_columns(
    rows: int, cols: int, swept: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows are merged into long ones: a thread handles eight elements, more than such a row has."""
    launched: list[Struct] = []

    def prepare(grid: object, block: object, params: Struct, *_: int) -> Callable[[], None]:
        return lambda: launched.append(params)

    monkeypatch.setattr(kernel, "get_kernel", lambda *_: SimpleNamespace(prepare=prepare))
    spec = Spec(packed(rows, cols))
    call = Call((0, 0), 0, dropouts=(DropoutState(1, Philox(1)), None))
    DropoutPass(DType.FLOAT32, spec, spec, 0).launch(call, SimpleNamespace(stream=0))  # type: ignore[arg-type]
    assert [(params.rows, params.cols) for params in launched] == [swept]
