"""The tables by which AdamW's kernels find their tensors cover every element exactly once, for tensors of any size."""

from __future__ import annotations

import pytest

from lt_runtime.kernels.optimizer import UPDATE_CHUNK, Tensor, norm_table, update_table
from lt_runtime.problem import DType

F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
BASE = 1 << 46  # an address as high as those of GPU memory
SIZES = [1, UPDATE_CHUNK - 1, UPDATE_CHUNK, UPDATE_CHUNK + 1, 100_000, (1 << 31) + 5, (1 << 33) + 1]


def tensor(size: int, **addresses: int) -> Tensor:
    """The arrays of a parameter with a master copy, at addresses far apart."""
    at = {name: (i << 40) + BASE for i, name in enumerate(("value", "copy", "gradient", "m", "v"))} | addresses
    types = {"value": F32, "copy": F16, "gradient": BF16, "m": F32, "v": BF16}
    return Tensor(size, {name: (at[name], dtype) for name, dtype in types.items()})


@pytest.mark.parametrize("size", SIZES)
def test_update_rows_cover_a_tensor(size: int) -> None:
    given = tensor(size)
    rows = update_table([tensor(3), given])[1:]
    assert len(rows) == -(-size // UPDATE_CHUNK)
    assert (rows["count"][:-1] == UPDATE_CHUNK).all()
    assert int(rows["count"].sum(dtype="uint64")) == size
    starts = (rows["octet"] * 8).tolist()
    assert starts == list(range(0, size, UPDATE_CHUNK))
    for name, (address, dtype) in given.arrays.items():
        last = rows[-1]
        assert int(last[name]) == address + starts[-1] * dtype.itemsize
        assert int(rows[0][name]) == address
    assert set(rows["tensor"].tolist()) == {1}
    row = rows[0]
    assert (row["v_max"], row["aligned"]) == (0, 1)
    assert (row["value_type"], row["copy_type"], row["gradient_type"]) == (0, 1, 2)


@pytest.mark.parametrize("size", SIZES)
def test_norm_rows_cover_a_gradient(size: int) -> None:
    rows = norm_table([tensor(size)])
    assert int(rows["count"].sum(dtype="uint64")) == size
    assert len(rows) <= 8192
    expected = rows["count"].astype("uint64").cumsum() - rows["count"]
    address, dtype = tensor(size).arrays["gradient"]
    assert ((rows["data"] - address) // dtype.itemsize == expected).all()
    assert set(rows["type"].tolist()) == {2}


@pytest.mark.parametrize("name", ["value", "copy", "gradient", "m", "v"])
@pytest.mark.parametrize("shift", [2, 4, 8])
def test_one_array_that_is_not_aligned_concerns_its_own_tensor(name: str, shift: int) -> None:
    tensors = [tensor(5000), tensor(5000, **{name: BASE + shift}), tensor(5000)]
    rows = -(-5000 // UPDATE_CHUNK)
    assert update_table(tensors)["aligned"].tolist() == [1] * rows + [0] * rows + [1] * rows
    assert norm_table(tensors)["aligned"].tolist() == [1, int(name != "gradient"), 1]


def test_empty_tensors_have_no_rows_but_a_table_has_one() -> None:
    for table in (update_table, norm_table):
        assert len(table([tensor(0), tensor(7), tensor(0)])) == 1
        (row,) = table([tensor(0), tensor(0)])
        assert row["count"] == 0


def test_thousands_of_tensors() -> None:
    rows = update_table([tensor(i % 3) for i in range(5000)])
    assert rows["tensor"].tolist() == [i for i in range(5000) if i % 3]
