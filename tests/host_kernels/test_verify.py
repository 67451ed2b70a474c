"""The tuner's verification kernels: expected results of products in FP64, and comparisons, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from lt_runtime.kernels import verify
from lt_runtime.problem import Activation
from lt_runtime.reference import activate
from tests.host_kernels.arrays import Guarded, assert_close, numbers
from tests.host_kernels.variants import F16, F32


def elements(matrix: Guarded) -> verify.Elements:
    at = matrix.matrix
    return verify.Elements(matrix.address, 0, at.row_stride, at.col_stride, verify.TYPES[str(matrix.array.dtype)])


@pytest.mark.parametrize("shape", [(1, 1, 1), (65, 130, 35)])
def test_expected_results(shape: tuple[int, int, int]) -> None:
    """Runs the kernel `expect`; compares D, the pre-activation and the sums over the rows of each tile with NumPy's."""
    m, n, k = shape
    generator = np.random.default_rng(m)
    a, b, bias = (Guarded(numbers(generator, size, F16)) for size in ((m, k), (k, n), (1, n)))
    d, limits, kept, kept_limits = (Guarded(np.full((m, n), np.nan)) for _ in range(4))
    tiles = -(-m // 64)
    sums = Guarded(np.full((3 * tiles, n), np.nan))
    params = verify.EXPECT.params(elements(a), elements(b), bias=elements(bias), sums=sums.address)
    params.d, params.kept = verify.Results(d.address, limits.address), verify.Results(kept.address, kept_limits.address)
    params.rounding, params.activation = verify.Rounding(2.0**-11, 0.0, np.inf), 2
    params.rows, params.cols, params.depth = shape
    verify.launch_expect(params, 1, 0, 0)

    z = a.array.astype(np.float64) @ b.array.astype(np.float64) + bias.array
    y = activate(z, Activation("gelu"))
    assert_close("kept", kept.values(), z, 1e-12)
    assert_close("d", d.values(), y, 1e-12)
    assert_close("limits", limits.values(), 2.0**-11 * np.abs(y), 1e-12)
    kept_limits.values()
    # The kernel sums each column of the outputs, of the squares of their errors, and of the part of the errors that
    # always has one sign.
    for which, terms in enumerate((y, (2.0**-11 * y) ** 2, 2.0**-20 * np.abs(y))):
        wanted = terms.sum(axis=0)
        assert_close(f"sums {which}", sums.values()[which::3].sum(axis=0), wanted, 1e-10 * np.abs(terms).sum(axis=0))
    for operand in (a, b, bias):
        operand.assert_unchanged()


def test_a_batch_larger_than_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes a batch in several launches: ReLU's derivative by a mask, with C; one B serves every product."""
    monkeypatch.setattr(verify, "MAX_GRID_Z", 2)
    generator, (batch, m, n, k) = np.random.default_rng(0), (5, 3, 16, 4)
    a, b, c = (Guarded(numbers(generator, size, F32)) for size in ((batch * m, k), (k, n), (batch * m, n)))
    mask = Guarded(generator.integers(0, 256, (batch * m, n // 8)).astype(np.uint8))
    d, limits = Guarded(np.full((batch * m, n), np.nan)), Guarded(np.full((batch * m, n), np.nan))
    params = verify.EXPECT.params(elements(a), elements(b), elements(c), d=verify.Results(d.address, limits.address))
    params.aux = verify.elements_of(mask.address, (m * n, n, 1), None)
    params.a.batch_stride, params.c.batch_stride = m * k, m * n
    params.rows, params.cols, params.depth, params.is_derivative = m, n, k, True
    verify.launch_expect(params, batch, 0, 0)

    passed = np.unpackbits(mask.array, axis=1, bitorder="little")
    wanted = (a.array.astype(np.float64) @ b.array.astype(np.float64) + c.array) * passed
    assert_close("d", d.values(), wanted, 1e-12)
    assert not np.isnan(limits.values()).any()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8_number_is_read(name: str) -> None:
    """Multiplied by 1, each of the 256 FP8 numbers, also infinities and NaN, must give itself."""
    codes = np.arange(256, dtype=np.uint8).reshape(256, 1).view(getattr(ml_dtypes, name))
    a, one = Guarded(codes), Guarded(np.ones((1, 1)))
    d, limits = Guarded(np.zeros((256, 1))), Guarded(np.zeros((256, 1)))
    params = verify.EXPECT.params(elements(a), elements(one), d=verify.Results(d.address, limits.address))
    params.rows, params.cols, params.depth = 256, 1, 1
    verify.launch_expect(params, 1, 0, 0)
    limits.values()
    np.testing.assert_array_equal(d.array, codes.astype(np.float64))


def test_comparisons_count_and_find_bad_elements() -> None:
    wanted = Guarded(numbers(np.random.default_rng(0), (40, 67), F32))
    found = Guarded(wanted.array.copy())
    found.array[7, 5], found.array[39, 66] = np.nan, 1e3
    blocks = verify.compare_blocks(found.array.size)
    parts = Guarded(np.zeros((blocks, 4), np.uint64))
    params = verify.COMPARE.params(
        elements(found), elements(wanted), 0, parts.address, 1, *found.array.shape, relative=1e-6
    )
    verify.launch_compare(params, 0, 0)
    parts.values()
    judged = (verify.Comparison * blocks).from_address(parts.address)
    assert sum(each.bad for each in judged) == 2
    assert min(each.first for each in judged) == 7 * 67 + 5
