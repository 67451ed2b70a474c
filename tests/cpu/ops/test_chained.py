"""`linear_bwd(through=...)` on NumPy arrays, compared with backward layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.problem import ACTIVATIONS
from tests.support.numpy_cases import Array, numbers

M, K, N, OUT = 6, 5, 7, 4


def a_block(activation: str = "gelu", dropout: float = 0.0, above: str = "tanh") -> tuple[Any, Any, Array]:
    """Makes the contexts of two layers in a row, and the gradient of the second layer's output."""
    x, w1, b1, w2, b2, dy = (
        numbers(seed, shape, "float32") for seed, shape in enumerate(((M, K), (N, K), (N,), (OUT, N), (OUT,), (M, OUT)))
    )
    y, below = lt.linear_fwd(x, w1, b1, activation=activation, dropout=dropout, rng=lt.Philox(3, 2, 1))
    _, context = lt.linear_fwd(y, w2, b2, activation=above)
    return below, context, dy


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_equals_layer_by_layer(activation: str, dropout: float) -> None:
    below, above, dy = a_block(activation, dropout)
    apart = lt.linear_bwd(dy, above)
    dz = np.zeros((M, N), np.float32)
    expected = lt.linear_bwd(apart.dx, below, out_dz=dz)
    chained = lt.linear_bwd(dy, above, through=below)
    gradients = lt.linear_bwd(chained.dz_below, below, before_activation=True, need_db=False)
    assert gradients.db is None
    made = (chained.dw, chained.db, chained.dz_below, chained.db_below, gradients.dx, gradients.dw)
    wanted = (apart.dw, apart.db, dz, expected.db, expected.dx, expected.dw)
    for one, other in zip(made, wanted, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=2e-6, atol=2e-6
        )  # with `through`, dx is not rounded before it is multiplied by the activation's derivative


def test_buffers_are_used_and_added_to() -> None:
    below, above, dy = a_block()
    plain = lt.linear_bwd(dy, above, through=below)
    dw, db, db_below = (np.ones_like(array) for array in (plain.dw, plain.db, plain.db_below))
    dz = np.full_like(plain.dz_below, np.nan)
    added = lt.linear_bwd(
        dy, above, through=below, accumulate=True, out_dx=dz, out_dw=dw, out_db=db, out_db_below=db_below
    )
    assert added.dz_below is dz
    assert added.db_below is db_below
    np.testing.assert_array_equal(dz, plain.dz_below)
    for ours, theirs in ((dw, plain.dw), (db, plain.db), (db_below, plain.db_below)):
        np.testing.assert_allclose(ours, theirs + 1, rtol=1e-6, atol=1e-6)


def test_what_is_not_asked_for_is_not_made() -> None:
    below, above, dy = a_block()
    chained = lt.linear_bwd(dy, above, through=below, need_dw=False, need_db=False, need_db_below=False)
    assert chained.dz_below is not None
    assert chained[1:] == (None, None, None)


def test_the_layer_below_has_made_x() -> None:
    below, above, dy = a_block()
    y, w = below.y, above.w
    for same in (y[:], y.T.T, y.reshape(1, M, N)[0]):
        _, context = lt.linear_fwd(same, w, activation="tanh")
        np.testing.assert_array_equal(lt.linear_bwd(dy, context, through=below).dw, lt.linear_bwd(dy, context).dw)
    for other in (y + 1, y.copy(), np.asfortranarray(y)):  # in a residual network x is y plus another array
        _, context = lt.linear_fwd(other, w, activation="tanh")
        with pytest.raises(ArgumentError, match=r"whose y is not the x of ctx.*pass require_same=False"):
            lt.linear_bwd(dy, context, through=below)
        lt.linear_bwd(dy, context, through=below, require_same=False)


def test_leading_axes_are_rows_in_both_layers() -> None:
    below, above, dy = a_block(dropout=0.4)
    plain = lt.linear_bwd(dy, above, through=below)
    x = below.x.reshape(2, 3, K)
    y, context = lt.linear_fwd(x, below.w, numbers(2, (N,), "float32"), activation="gelu", dropout=0.4, rng=below.rng)
    for axes in ((2, 3), (M,)):  # the second layer may also read y in another shape
        _, then = lt.linear_fwd(y.reshape(*axes, N), above.w, numbers(4, (OUT,), "float32"), activation="tanh")
        made = lt.linear_bwd(dy.reshape(*axes, OUT), then, through=context)
        assert made.dz_below.shape == (*axes, N)
        for one, other in zip(made, plain, strict=True):
            np.testing.assert_array_equal(one.reshape(other.shape), other)


def test_refused_before_anything_is_written() -> None:
    below, above, dy = a_block()
    with pytest.raises(ArgumentError, match="need_dx is False, but through asks"):
        lt.linear_bwd(dy, above, through=below, need_dx=False)
    with pytest.raises(ShapeError, match=r"through is a layer with y of shape \(6, 4\); it must be \(6, 7\)"):
        lt.linear_bwd(dy, above, through=above)
    dw, db, dx = np.zeros((OUT, N), np.float32), np.zeros(OUT, np.float32), np.zeros((M, N), np.float32)
    with pytest.raises(ArgumentError, match=r"accumulate_dx is True and through is given: .*or no through"):
        lt.linear_bwd(dy, above, through=below, accumulate_dx=True, out_dx=dx)
    with pytest.raises(ArgumentError, match="accumulate_dx=True needs out_dx, to add to"):
        lt.linear_bwd(dy, above, accumulate_dx=True)
    with pytest.raises(ArgumentError, match="accumulate=True needs out_db_below, to add to"):
        lt.linear_bwd(dy, above, through=below, accumulate=True, out_dw=dw, out_db=db)
    with pytest.raises(ShapeError, match="out_db_below has shape"):
        lt.linear_bwd(dy, above, through=below, out_db_below=np.zeros(OUT, np.float32))
    assert not dw.any()
    assert not dx.any()
