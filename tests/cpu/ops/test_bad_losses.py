"""Arguments that the losses refuse on NumPy arrays, without writing anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DeviceError, DTypeError, LayoutError, LtError, OverlapError, ShapeError
from tests.support.numpy_cases import SENTINEL, Array, DeviceArray

M, C = 3, 4
LABELS = np.array([0, 3, 1], np.int32)


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


COMMON: list[tuple[dict[str, Any], type[LtError], str]] = [
    ({"out_gradient": ones(C, M)}, ShapeError, r"out_gradient has shape \(4, 3\); it must be \(3, 4\)"),
    ({"out_gradient": ones(M, C, dtype=np.float16)}, DTypeError, "out_gradient is float16 but .* is float32"),
    ({"out_gradient": DeviceArray((M, C))}, DeviceError, "but out_gradient not; all must be on one device"),
    ({"out_loss": ones(1)}, ShapeError, r"out_loss has shape \(1,\); it must be \(\)"),
    ({"out_loss": np.zeros(())}, DTypeError, "out_loss is float64; it must be float32"),
    ({"grad_scale": np.ones(())}, DTypeError, "grad_scale is float64; it must be float32"),
    ({"grad_scale": ones(1, 1)}, ShapeError, r"grad_scale has shape \(1, 1\); accepted are \(\) and \(1,\)"),
    ({"grad_scale": DeviceArray(())}, DeviceError, "but grad_scale not; all must be on one device"),
    ({"row_weights": ones(M, dtype=np.float64)}, DTypeError, "row_weights is float64; it must be float32"),
    ({"row_weights": ones(M, 1)}, ShapeError, r"row_weights has shape \(3, 1\); it must be \(3,\), one a row of "),
    ({"row_weights": ones(2 * M)[::2]}, LayoutError, r"row_weights has strides \(2,\); it must be row-major"),
    ({"row_weights": -ones(M)}, ArgumentError, "row_weights holds -1.0; accepted are numbers that are not negative"),
    ({"row_weights": ones(M) * np.nan}, ArgumentError, "row_weights holds nan; accepted are numbers that are not"),
    ({"row_weights": DeviceArray((M,))}, DeviceError, "but row_weights not; all must be on one device"),
]
CROSS_ENTROPY: list[tuple[dict[str, Any], type[LtError], str]] = [
    *COMMON,
    ({"logits": ones(M, C, dtype=np.float64)}, DTypeError, "logits has type float64; accepted are .*: logits.astype"),
    ({"logits": ones(M)}, ShapeError, r"logits has shape \(3,\); accepted are matrices"),
    ({"logits": ones(M, C, 1)}, ShapeError, r"labels has shape \(3,\); it must be \(3, 4\), one a row of logits"),
    ({"logits": ones(M, 2 * C, 2)[:, :C]}, LayoutError, "logits of shape .*: its leading axes are no rows with one"),
    ({"labels": LABELS[:2]}, ShapeError, r"labels has shape \(2,\); it must be \(3,\), one a row of logits"),
    ({"labels": LABELS[:, None]}, ShapeError, r"labels has shape \(3, 1\)"),
    ({"labels": LABELS.astype(np.uint8)}, DTypeError, "labels has type uint8; accepted are int32 and int64"),
    ({"labels": ones(M)}, DTypeError, "labels has type float32; accepted are int32"),
    ({"labels": np.array([0, 4, 1])}, ArgumentError, "labels holds 4; accepted are 0 to 3"),
    ({"labels": np.array([0, -1, 1])}, ArgumentError, "labels holds -1; accepted are 0 to 3"),
    ({"labels": np.array([0, -100, 1]), "ignore_index": None}, ArgumentError, "labels holds -100"),
    ({"labels": np.array([0, -100, 1]), "ignore_index": -1}, ArgumentError, "labels holds -100"),
    ({"label_smoothing": -0.1}, ArgumentError, "label_smoothing is -0.1; accepted are numbers from 0 to 1"),
    ({"label_smoothing": 1.5}, ArgumentError, "label_smoothing is 1.5"),
    ({"label_smoothing": float("nan")}, ArgumentError, "label_smoothing is nan"),
    ({"ignore_index": 2**63}, ArgumentError, "is 9223372036854775808; accepted are None and integers of 64 bits"),
    ({"class_weights": ones(M)}, ShapeError, r"class_weights has shape \(3,\); it must be \(4,\), one a column of"),
    ({"class_weights": ones(C, dtype=np.int32)}, DTypeError, "class_weights is int32; it must be float32"),
    ({"class_weights": ones(C) * np.nan}, ArgumentError, "class_weights holds nan; accepted"),
    ({"labels": DeviceArray((M,), "<i4")}, DeviceError, "logits, out_gradient, out_loss in host .* but labels not"),
]
MSE: list[tuple[dict[str, Any], type[LtError], str]] = [
    *COMMON,
    ({"prediction": ones(M, C, dtype=np.int32)}, DTypeError, "prediction has type int32; accepted are float32"),
    ({"prediction": ones(M)}, ShapeError, r"prediction has shape \(3,\); accepted are matrices"),
    ({"target": ones(C, M)}, ShapeError, r"target has shape \(4, 3\); it must be \(3, 4\)"),
    ({"target": ones(M, 1)}, ShapeError, r"target has shape \(3, 1\)"),
    ({"target": ones(M, C, dtype=np.float16)}, DTypeError, "target is float16 but prediction is float32"),
    ({"target": DeviceArray((M, C))}, DeviceError, "but target not"),
]


HUBER: list[tuple[dict[str, Any], type[LtError], str]] = [
    ({"delta": 0}, ArgumentError, "delta is 0.0; it must be positive and finite"),
    ({"delta": float("inf")}, ArgumentError, "delta is inf"),
    ({"delta": float("nan")}, ArgumentError, "delta is nan"),
]
BCE: list[tuple[dict[str, Any], type[LtError], str]] = [
    *COMMON,
    ({"logits": ones(M)}, ShapeError, r"logits has shape \(3,\); accepted are matrices"),
    ({"targets": ones(M)}, ShapeError, r"targets has shape \(3,\); it must be \(3, 4\), the shape of logits"),
    ({"targets": LABELS}, ShapeError, r"targets has shape \(3,\)"),
    ({"targets": ones(M, C, dtype=np.int64)}, DTypeError, "targets is int64 but logits is float32; types must be"),
    ({"targets": ones(M, C) * np.nan}, ArgumentError, "targets holds nan; accepted are numbers that are not negative"),
    ({"targets": -ones(M, C)}, ArgumentError, "targets holds -1.0; accepted"),
    ({"pos_weight": -ones(C)}, ArgumentError, "pos_weight holds -1.0; accepted"),
    ({"pos_weight": ones(M)}, ShapeError, r"pos_weight has shape \(3,\); it must be \(4,\), one a column of logits"),
    ({"pos_weight": ones(C, dtype=np.float16)}, DTypeError, "pos_weight is float16; it must be float32"),
]


LAYOUTS: list[tuple[dict[str, Any], type[LtError], str]] = [
    ({"prediction": ones(2 * M, 2 * C)[::2, ::2]}, LayoutError, "prediction of shape .*: neither axis is contiguous"),
    ({"target": np.broadcast_to(ones(C), (M, C))}, LayoutError, "target of shape .*: its rows overlap"),
    ({"out_gradient": ones(M, 2 * C)[:, ::2]}, LayoutError, "out_gradient of shape .*: neither axis is contiguous"),
    ({"out_gradient": np.broadcast_to(ones(C), (M, C))}, LayoutError, "out_gradient of shape .*: its rows overlap"),
]
REFUSED = [
    *(("cross_entropy", ("logits", "labels"), *row) for row in CROSS_ENTROPY),
    *(("mse_loss", ("prediction", "target"), *row) for row in (*MSE, *LAYOUTS)),
    *(("huber_loss", ("prediction", "target"), *row) for row in HUBER),
    *(("bce_with_logits", ("logits", "targets"), *row) for row in BCE),
]


@pytest.mark.parametrize(("loss", "names", "changes", "error", "message"), REFUSED)
def test_refused(loss: str, names: Any, changes: dict[str, Any], error: type[LtError], message: str) -> None:
    target = LABELS if loss == "cross_entropy" else ones(M, C)
    buffers = {"out_gradient": np.full((M, C), SENTINEL, np.float32), "out_loss": np.full((), SENTINEL, np.float32)}
    with pytest.raises(error, match=message):
        getattr(lt, loss)(**{names[0]: ones(M, C), names[1]: target, **buffers, **changes})
    assert all((buffer == SENTINEL).all() for buffer in buffers.values())


def test_labels_with_gaps() -> None:
    with pytest.raises(LayoutError, match=r"labels has strides \(2,\); it must be row-major without gaps"):
        lt.cross_entropy(ones(M, C), np.zeros(2 * M, np.int32)[::2])


def test_labels_without_any_class() -> None:
    with pytest.raises(ArgumentError, match="labels holds 0"):
        lt.cross_entropy(ones(2, 0), np.zeros(2, np.int32))


def test_buffers_over_operands() -> None:
    buffer, target, gradient, labels = ones(M, 2 * C), ones(M, C), ones(M, C), np.zeros(M, np.int32)
    prediction, beside = buffer[:, :C], buffer[:, 1 : C + 1]
    first, scale = gradient[0, :1].reshape(()), gradient[0, :1]
    for other, buffers in (
        ("out_gradient shares memory with prediction", {"out_gradient": beside}),
        ("out_gradient shares memory with target", {"out_gradient": target}),
        ("out_loss shares memory with prediction", {"out_loss": prediction[1, 1:2].reshape(())}),
        ("out_loss shares memory with target", {"out_loss": target[1, 1:2].reshape(())}),
        ("out_loss shares memory with out_gradient", {"out_gradient": gradient, "out_loss": first}),
    ):
        with pytest.raises(OverlapError, match=other):
            lt.mse_loss(prediction, target, **buffers)
    for other, buffers in (
        ("out_gradient shares memory with logits", {"out_gradient": beside}),
        ("out_loss shares memory with labels", {"out_loss": labels.view(np.float32)[:1].reshape(())}),
        ("out_gradient shares memory with grad_scale", {"grad_scale": scale, "out_gradient": gradient}),
        ("out_loss shares memory with grad_scale", {"grad_scale": scale, "out_loss": first}),
    ):
        with pytest.raises(OverlapError, match=other):
            lt.cross_entropy(prediction, labels, **buffers)
    assert all((array == 1).all() for array in (buffer, target, gradient))
