"""What the losses refuse on NumPy arrays, and that nothing is written when they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    LayoutError,
    LtError,
    OperandError,
    OverlapError,
    ShapeError,
)
from tests.support.numpy_cases import SENTINEL, Array, DeviceArray

M, C = 3, 4
LABELS = np.array([0, 3, 1], np.int32)


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


COMMON: list[tuple[dict[str, Any], type[LtError], str]] = [
    ({"out_gradient": ones(C, M)}, ShapeError, r"out_gradient has shape \(4, 3\); it must be \(3, 4\)"),
    (
        {"out_gradient": ones(M, C, dtype=np.float16)},
        DTypeError,
        "out_gradient is float16 but .* is float32",
    ),
    ({"out_gradient": [[0.0]]}, OperandError, "out_gradient is a list"),
    ({"out_gradient": DeviceArray((M, C))}, DeviceError, "but out_gradient not; all must be on one device"),
    ({"out_loss": ones(1)}, ShapeError, r"out_loss has shape \(1,\); it must be \(\)"),
    ({"out_loss": np.zeros(())}, DTypeError, "out_loss is float64; it must be float32"),
    ({"out_loss": 0.0}, OperandError, "out_loss is a float"),
    ({"grad_scale": np.ones(())}, DTypeError, "grad_scale is float64; it must be float32"),
    ({"grad_scale": ones(1, 1)}, ShapeError, r"grad_scale has shape \(1, 1\); accepted are \(\) and \(1,\)"),
    ({"grad_scale": DeviceArray(())}, DeviceError, "but grad_scale not; all must be on one device"),
    ({"grad_scale": "2"}, OperandError, "grad_scale is a str"),
    ({"row_weights": ones(M, dtype=np.float64)}, DTypeError, "row_weights is float64; it must be float32"),
    ({"row_weights": ones(M, 1)}, ShapeError, r"row_weights has shape \(3, 1\); it must be \(3,\), one a row of "),
    ({"row_weights": ones(2 * M)[::2]}, LayoutError, r"row_weights has strides \(2,\); it must be row-major"),
    ({"row_weights": -ones(M)}, ArgumentError, "row_weights holds -1.0; accepted are numbers that are not negative"),
    ({"row_weights": ones(M) * np.nan}, ArgumentError, "row_weights holds nan; accepted are numbers that are not"),
    ({"row_weights": [1.0, 1.0, 1.0]}, OperandError, "row_weights is a list"),
    ({"row_weights": DeviceArray((M,))}, DeviceError, "but row_weights not; all must be on one device"),
]
CROSS_ENTROPY: list[tuple[dict[str, Any], type[LtError], str]] = [
    *COMMON,
    ({"logits": ones(M, C, dtype=np.float64)}, DTypeError, "logits has type float64; accepted are .*: logits.astype"),
    ({"logits": ones(M)}, ShapeError, r"logits has shape \(3,\); accepted are matrices"),
    ({"logits": ones(M, C, 1)}, ShapeError, r"logits has shape \(3, 4, 1\); accepted are matrices"),
    ({"labels": LABELS[:2]}, ShapeError, r"labels has shape \(2,\); it must be \(3,\), one a row of logits"),
    ({"labels": LABELS[:, None]}, ShapeError, r"labels has shape \(3, 1\)"),
    ({"labels": LABELS.astype(np.uint8)}, DTypeError, "labels has type uint8; accepted are int32 and int64"),
    ({"labels": ones(M)}, DTypeError, "labels has type float32; accepted are int32"),
    ({"labels": np.array([0, 4, 1])}, ArgumentError, "labels holds 4; accepted are 0 to 3"),
    ({"labels": np.array([0, -1, 1])}, ArgumentError, "labels holds -1; accepted are 0 to 3"),
    ({"labels": np.array([0, -100, 1]), "ignore_index": None}, ArgumentError, "labels holds -100"),
    ({"labels": np.array([0, -100, 1]), "ignore_index": -1}, ArgumentError, "labels holds -100"),
    ({"labels": [0, 3, 1]}, OperandError, "labels is a list"),
    ({"label_smoothing": -0.1}, ArgumentError, "label_smoothing is -0.1; accepted are numbers from 0 to 1"),
    ({"label_smoothing": 1.5}, ArgumentError, "label_smoothing is 1.5"),
    ({"label_smoothing": float("nan")}, ArgumentError, "label_smoothing is nan"),
    ({"label_smoothing": "0"}, ArgumentError, "label_smoothing is '0'"),
    ({"ignore_index": 1.0}, ArgumentError, "ignore_index is 1.0; it must be an integer"),
    (
        {"ignore_index": 2**63},
        ArgumentError,
        "ignore_index is 9223372036854775808; accepted are None and integers of 64 bits",
    ),
    ({"ignore_index": True}, ArgumentError, "ignore_index is True"),
    (
        {"class_weights": ones(M)},
        ShapeError,
        r"class_weights has shape \(3,\); it must be \(4,\), one a column of logits",
    ),
    ({"class_weights": ones(C, dtype=np.int32)}, DTypeError, "class_weights is int32; it must be float32"),
    ({"class_weights": ones(C) * np.nan}, ArgumentError, "class_weights holds nan; accepted"),
    ({"class_weights": 2.0}, OperandError, "class_weights is a float"),
    ({"labels": DeviceArray((M,), "<i4")}, DeviceError, "logits, out_gradient, out_loss in host .* but labels not"),
]
MSE: list[tuple[dict[str, Any], type[LtError], str]] = [
    *COMMON,
    ({"prediction": ones(M, C, dtype=np.int32)}, DTypeError, "prediction has type int32; accepted are float32"),
    ({"prediction": ones(M)}, ShapeError, r"prediction has shape \(3,\); accepted are matrices"),
    ({"target": ones(C, M)}, ShapeError, r"target has shape \(4, 3\); it must be \(3, 4\)"),
    ({"target": ones(M, 1)}, ShapeError, r"target has shape \(3, 1\)"),
    ({"target": ones(M, C, dtype=np.float16)}, DTypeError, "target is float16 but prediction is float32"),
    ({"target": None}, OperandError, "target is a NoneType"),
    ({"target": DeviceArray((M, C))}, DeviceError, "but target not"),
]


HUBER: list[tuple[dict[str, Any], type[LtError], str]] = [
    *MSE,
    ({"delta": 0}, ArgumentError, "delta is 0.0; it must be positive and finite"),
    ({"delta": float("inf")}, ArgumentError, "delta is inf"),
    ({"delta": float("nan")}, ArgumentError, "delta is nan"),
    ({"delta": "1"}, ArgumentError, "delta is '1'; it must be a number"),
]
BCE: list[tuple[dict[str, Any], type[LtError], str]] = [
    *COMMON,
    ({"logits": ones(M)}, ShapeError, r"logits has shape \(3,\); accepted are matrices"),
    ({"targets": ones(M)}, ShapeError, r"targets has shape \(3,\); it must be \(3, 4\), the shape of logits"),
    ({"targets": LABELS}, ShapeError, r"targets has shape \(3,\)"),
    (
        {"targets": ones(M, C, dtype=np.int64)},
        DTypeError,
        "targets is int64 but logits is float32; types must be equal",
    ),
    ({"targets": ones(M, C) * np.nan}, ArgumentError, "targets holds nan; accepted are numbers that are not negative"),
    ({"targets": -ones(M, C)}, ArgumentError, "targets holds -1.0; accepted"),
    ({"pos_weight": -ones(C)}, ArgumentError, "pos_weight holds -1.0; accepted"),
    ({"pos_weight": ones(M)}, ShapeError, r"pos_weight has shape \(3,\); it must be \(4,\), one a column of logits"),
    ({"pos_weight": ones(C, dtype=np.float16)}, DTypeError, "pos_weight is float16; it must be float32"),
    ({"pos_weight": 2.0}, OperandError, "pos_weight is a float"),
]


def check(loss: Any, operands: dict[str, Any], changes: dict[str, Any], error: type[LtError], message: str) -> None:
    buffers = {"out_gradient": np.full((M, C), SENTINEL, np.float32), "out_loss": np.full((), SENTINEL, np.float32)}
    with pytest.raises(error, match=message):
        loss(**{**operands, **buffers, **changes})
    assert all((buffer == SENTINEL).all() for buffer in buffers.values())


@pytest.mark.parametrize(("changes", "error", "message"), CROSS_ENTROPY)
def test_cross_entropy(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    check(lt.cross_entropy, {"logits": ones(M, C), "labels": LABELS}, changes, error, message)


@pytest.mark.parametrize(("changes", "error", "message"), MSE)
def test_mse(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    check(lt.mse_loss, {"prediction": ones(M, C), "target": ones(M, C)}, changes, error, message)


@pytest.mark.parametrize(("changes", "error", "message"), HUBER)
def test_huber(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    check(lt.huber_loss, {"prediction": ones(M, C), "target": ones(M, C)}, changes, error, message)


@pytest.mark.parametrize(("changes", "error", "message"), BCE)
def test_bce_with_logits(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    check(lt.bce_with_logits, {"logits": ones(M, C), "targets": ones(M, C)}, changes, error, message)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"prediction": ones(2 * M, 2 * C)[::2, ::2]},
            LayoutError,
            "prediction of shape .*: neither axis is cont",
        ),
        ({"target": np.broadcast_to(ones(C), (M, C))}, LayoutError, "target of shape .*: its rows overlap"),
        ({"out_gradient": ones(M, 2 * C)[:, ::2]}, LayoutError, "out_gradient of shape .*: neither axis is contiguous"),
        ({"out_gradient": np.broadcast_to(ones(C), (M, C))}, LayoutError, "out_gradient of shape .*: its rows overlap"),
        ({"stream": "main"}, ArgumentError, "stream is 'main'; accepted are None, an int handle"),
    ],
)
def test_arrays_and_streams_that_a_gpu_refuses(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    check(lt.mse_loss, {"prediction": ones(M, C), "target": ones(M, C)}, changes, error, message)


def test_labels_with_gaps() -> None:
    with pytest.raises(LayoutError, match=r"labels has strides \(2,\); it must be row-major without gaps"):
        lt.cross_entropy(ones(M, C), np.zeros(2 * M, np.int32)[::2])


def test_labels_without_any_class() -> None:
    with pytest.raises(ArgumentError, match="labels holds 0"):
        lt.cross_entropy(ones(2, 0), np.zeros(2, np.int32))


def test_buffers_over_operands() -> None:
    buffer, target = ones(M, 2 * C), ones(M, C)
    prediction = buffer[:, :C]
    with pytest.raises(OverlapError, match="out_gradient shares memory with prediction"):
        lt.mse_loss(prediction, target, out_gradient=buffer[:, 1 : C + 1])
    with pytest.raises(OverlapError, match="out_gradient shares memory with target"):
        lt.mse_loss(prediction, target, out_gradient=target)
    for array, name in ((prediction, "prediction"), (target, "target")):
        with pytest.raises(OverlapError, match=f"out_loss shares memory with {name}"):
            lt.mse_loss(prediction, target, out_loss=array[1, 1:2].reshape(()))
    gradient = ones(M, C)
    with pytest.raises(OverlapError, match="out_loss shares memory with out_gradient"):
        lt.mse_loss(prediction, target, out_gradient=gradient, out_loss=gradient[0, :1].reshape(()))
    with pytest.raises(OverlapError, match="out_gradient shares memory with logits"):
        lt.cross_entropy(prediction, LABELS, out_gradient=buffer[:, 1 : C + 1])
    labels = np.zeros(M, np.int32)
    with pytest.raises(OverlapError, match="out_loss shares memory with labels"):
        lt.cross_entropy(prediction, labels, out_loss=labels.view(np.float32)[:1].reshape(()))
    scale = gradient[0, :1]
    with pytest.raises(OverlapError, match="out_gradient shares memory with grad_scale"):
        lt.cross_entropy(prediction, LABELS, grad_scale=scale, out_gradient=gradient)
    with pytest.raises(OverlapError, match="out_loss shares memory with grad_scale"):
        lt.cross_entropy(prediction, LABELS, grad_scale=scale, out_loss=scale.reshape(()))
    for array in (buffer, target, gradient):
        assert (array == 1).all()
