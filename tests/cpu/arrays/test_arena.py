"""Arrays of an arena are aligned, do not overlap and fill one allocation; models and optimizers use arenas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.arrays.transfer import arena_size, arena_views, host_zeros
from tests.support.numpy_cases import DTYPES, Array

SHAPES = [(3, 5), (7,), (), (0, 4), (64, 64), (1,)]


def place(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def in_one_piece(arrays: list[Array]) -> bool:
    """Whether the arrays follow each other in memory, with no gaps except for alignment."""
    ends = [place(array) + array.nbytes for array in arrays]
    gaps = [place(array) - end for array, end in zip(arrays[1:], ends, strict=False)]
    return all(0 <= gap < 256 for gap in gaps) and all(place(array) % 256 == 0 for array in arrays)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views(dtype: str) -> None:
    kind = DTYPES[dtype]
    flat = host_zeros(arena_size(SHAPES, kind.itemsize), kind)
    views = arena_views(flat, SHAPES)
    assert [view.shape for view in views] == SHAPES
    assert all(view.dtype == kind and np.shares_memory(view, flat) for view in views if view.size)
    assert in_one_piece([view for view in views if view.size])
    for number, view in enumerate(views):
        view[...] = number + 1
    assert all((view == number + 1).all() for number, view in enumerate(views))
    assert (flat != 0).sum() == sum(view.size for view in views)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_models_arrays_lie_in_arenas(dtype: str) -> None:
    model = lt.MLP([5, 7, 3], dtype=dtype, device="cpu")
    parts: dict[str, list[Any]] = {
        part: [getattr(parameter, part) for parameter in model.parameters()] for part in ("data", "grad", "master")
    }
    assert in_one_piece(parts["data"])
    assert in_one_piece(parts["grad"])
    assert all(array is None for array in parts["master"]) if dtype == "float32" else in_one_piece(parts["master"])


@pytest.mark.parametrize(("options", "each"), [({}, 2), ({"amsgrad": True, "moments": "bfloat16"}, 3)])
def test_moments_lie_in_an_arena(options: dict[str, Any], each: int) -> None:
    model = lt.MLP([5, 7, 3], device="cpu")
    moments = lt.AdamW(model.parameters(), **options).moments
    assert [len(of_one) for of_one in moments] == [each] * 4
    assert in_one_piece([array for of_one in moments for array in of_one])
    shapes = [[array.shape for array in of_one] for of_one in moments]
    assert shapes == [[parameter.data.shape] * each for parameter in model.parameters()]
