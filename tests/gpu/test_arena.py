"""A model's arrays on the GPU lie in arenas: aligned for every plan, gradients and moments in one piece each."""

from __future__ import annotations

from typing import Any

import pytest

import lt_runtime as lt


def _in_one_piece(arrays: list[Any]) -> bool:
    ends = [array.data.ptr + array.nbytes for array in arrays]
    gaps = [array.data.ptr - end for array, end in zip(arrays[1:], ends, strict=False)]
    return all(0 <= gap < 256 for gap in gaps) and all(array.data.ptr % 256 == 0 for array in arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arenas(dtype: str) -> None:
    model = lt.MLP([65, 33, 7], dtype=dtype, device="cuda")
    optimizer = lt.AdamW(model.parameters(), amsgrad=True, moments="bfloat16")
    parts = ["data", "grad", *(["master"] if dtype == "bfloat16" else [])]
    for part in parts:
        assert _in_one_piece([getattr(parameter, part) for parameter in model.parameters()]), part
    assert _in_one_piece([array for moments in optimizer.moments for array in moments])
    assert all(float(abs(array.astype("float32")).max()) == 0 for moments in optimizer.moments for array in moments)
