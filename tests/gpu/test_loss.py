"""Losses and their gradients on the GPU against the float64 reference."""

from __future__ import annotations

import math
from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.ops.losses import summed_loss
from lt_runtime.problem import DType
from lt_runtime.training.averages import GpuTally
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON
from tests.support.placed import FLAT, Placed, host_of
from tests.support.strategies import TYPES, Placement, placements, sizes

_seeds = st.integers(0, 2**32 - 1)
_dtypes = st.sampled_from(list(TYPES))
_classes = st.one_of(sizes, st.sampled_from((2, 7, 9, 33, 511, 1000, 1025, 2048, 2049, 5000)))


def check_cross_entropy(
    gpu: Any,
    logits: NDArray[Any],
    labels: NDArray[Any],
    at: Placement = FLAT,
    out: Placement | None = FLAT,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    scale: float = 1.0,
) -> None:
    """Runs a loss and compares it with the reference; without a placement the gradient is written over the logits."""
    dtype = DType.parse("logits", logits.dtype)
    source = Placed(gpu, logits, at)
    gradient = source if out is None else Placed(gpu, np.zeros_like(logits), out)
    operands, factor = (source.array, cp.asarray(labels)), cp.full((), scale, cp.float32)
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    alone, nothing = lt.cross_entropy(*operands, **options, need_gradient=False)
    loss, returned = lt.cross_entropy(*operands, **options, grad_scale=factor, out_gradient=gradient.array)
    expected, exact = reference.cross_entropy(logits, labels, **options)
    assert nothing is None
    assert float(alone) == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
    assert returned is gradient.array
    assert loss.shape == ()
    assert loss.dtype == cp.float32
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
    tolerance = 2 * EPSILON[dtype] * np.abs(exact) + 2e-6 / len(labels)
    # The smallest positive FP16 number, 2⁻²⁴, is added to the tolerance.
    assert_close("gradient", gradient.values(), exact * scale, tolerance * scale + 2.0**-24)


@settings(max_examples=200, deadline=None)
@given(
    rows=sizes,
    classes=_classes,
    dtype=_dtypes,
    at=placements,
    out=st.one_of(st.none(), placements),
    smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    ignore_index=st.sampled_from((None, -100, 0)),
    scale=st.sampled_from((1.0, 1024.0)),
    wide=st.booleans(),
    seed=_seeds,
)
def test_cross_entropy(
    gpu: Any,
    rows: int,
    classes: int,
    dtype: DType,
    at: Placement,
    out: Placement | None,
    smoothing: float,
    ignore_index: int | None,
    scale: float,
    wide: bool,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    logits = (5 * generator.standard_normal((rows, classes))).astype(dtype.numpy)
    labels = generator.integers(0, classes, rows).astype(np.int64 if wide else np.int32)
    if ignore_index is not None:
        labels[generator.random(rows) < 0.3] = ignore_index
    check_cross_entropy(gpu, logits, labels, at, out, smoothing, ignore_index, scale)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("classes", [50304, 50257])
@pytest.mark.parametrize("place", [FLAT, Placement(False, 3, 1), Placement(True, 0, 0), None], ids=str)
def test_a_vocabulary(gpu: Any, dtype: DType, classes: int, place: Placement | None) -> None:
    generator = np.random.default_rng(classes)
    logits = (3 * generator.standard_normal((40, classes))).astype(dtype.numpy)
    labels = generator.integers(0, classes, 40)
    labels[[3, 39]] = -100
    check_cross_entropy(gpu, logits, labels, place or FLAT, place, 0.1)


@pytest.mark.parametrize("out", [FLAT, None], ids=["apart", "in place"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize(
    ("rows", "classes"), [(20000, 10), (8000, 1000), (5000, 300), (5000, 3000), (300, 70000), (150, 128256)]
)
def test_many_rows(gpu: Any, rows: int, classes: int, dtype: DType, out: Placement | None) -> None:
    """There are so many rows that a block or warp has several, and that a separate launch counts the ignored labels."""
    generator = np.random.default_rng(rows)
    logits = generator.standard_normal((rows, classes)).astype(dtype.numpy)
    labels = generator.integers(0, classes, rows)
    labels[generator.random(rows) < 0.5] = -100
    check_cross_entropy(gpu, logits, labels, out=out)


def test_more_than_two_to_the_31_logits() -> None:
    rows, classes = 43000, 50304
    assert rows * classes > 2**31
    logits = cp.zeros((rows, classes), cp.float16)
    labels = cp.arange(rows) % classes
    loss, gradient = lt.cross_entropy(logits, labels, grad_scale=float(rows), out_gradient=logits)
    assert float(loss) == pytest.approx(math.log(classes), rel=1e-5)
    for row in (0, rows // 2, rows - 1):
        assert float(gradient[row, row]) == pytest.approx(1 / classes - 1, rel=1e-3)
        assert float(gradient[row, -1]) == pytest.approx(1 / classes, rel=2e-3)


def test_mse_of_large_matrices() -> None:
    prediction, target = cp.full((3000, 3001), 2.5, cp.float16), cp.full((3000, 3001), 1.0, cp.float16)
    loss, gradient = lt.mse_loss(prediction, target, grad_scale=float(prediction.size))
    assert float(loss) == pytest.approx(2.25, rel=1e-6)
    assert cp.unique(gradient).tolist() == [3.0]


_TORCH_TYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
_SHAPES = pytest.mark.parametrize("shape", [(64, 1000), (2000, 1), (333, 17), (5, 4099)], ids=str)


def check_against_torch(torch: Any, scores: Any, expected: Any, result: Any) -> None:
    """Compares a loss and its gradient with those of FP32 copies of the same numbers."""
    (exact,) = torch.autograd.grad(expected, scores)
    assert isinstance(result.loss, torch.Tensor)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(result.gradient.float(), exact, rtol=2.0**-7, atol=2.0**-24)


@_TORCH_TYPES
@_SHAPES
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", ["mse_loss", "huber_loss", "bce_with_logits"])
def test_means_over_elements_as_pytorch(loss: str, shape: tuple[int, int], weighted: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    functional, generator = torch.nn.functional, torch.Generator("cuda").manual_seed(1)
    kind = getattr(torch, dtype)
    draw = {"device": "cuda", "generator": generator}
    scores, target = (3 * torch.randn(shape, **draw)).to(kind), torch.rand(shape, **draw).to(kind)
    of_rows, of_columns = torch.randn(shape[0], **draw), 3 * torch.rand(shape[1], **draw)
    exact, options, own = scores.float().requires_grad_(), {}, {"reduction": "none"}
    if weighted:
        options["row_weights"] = of_rows
    if loss == "bce_with_logits" and weighted:
        options["pos_weight"] = own["pos_weight"] = of_columns
    if loss == "huber_loss":
        options["delta"] = own["delta"] = 0.75
    name = "binary_cross_entropy_with_logits" if loss == "bce_with_logits" else loss
    losses = getattr(functional, name)(exact, target.float(), **own)
    expected = (losses * of_rows[:, None] if weighted else losses).mean()
    for _ in range(4):  # the last calls replay a graph
        result = getattr(lt, loss)(scores, target, grad_scale=1.0, **options)
    check_against_torch(torch, exact, expected, result)


@_TORCH_TYPES
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", ["none", "rows", "classes", "both"])
@pytest.mark.parametrize("shape", [(2000, 10), (3000, 300), (64, 1000), (40, 50304), (7, 50257)], ids=str)
def test_cross_entropy_as_pytorch(shape: tuple[int, int], weights: str, smoothing: float, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator("cuda").manual_seed(1)
    draw = {"device": "cuda", "generator": generator}
    logits = torch.randn(shape, **draw).to(getattr(torch, dtype))
    labels = torch.randint(0, shape[1], shape[:1], **draw)
    labels[[0, 5]] = -100
    of_rows = torch.randn(shape[0], **draw) if weights in ("rows", "both") else None
    of_classes = 0.5 + torch.rand(shape[1], **draw) if weights in ("classes", "both") else None
    exact = logits.float().requires_grad_()
    own = {"weight": of_classes, "label_smoothing": smoothing}
    losses = torch.nn.functional.cross_entropy(exact, labels, **own, reduction="none")
    counts = labels != -100
    divisor = counts.sum() if of_classes is None else of_classes[labels[counts]].sum()
    expected = (losses if of_rows is None else losses * of_rows).sum() / divisor
    options = {"row_weights": of_rows, "class_weights": of_classes, "label_smoothing": smoothing}
    result = lt.cross_entropy(logits, labels, **options)
    check_against_torch(torch, exact, expected, result)
    again = lt.cross_entropy(logits, labels, **options)
    assert torch.equal(result.loss, again.loss)
    assert torch.equal(result.gradient, again.gradient)


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("shape", [(8192, 4096), (20000, 8), (40, 100_000)], ids=str)
def test_sums_of_the_gradient(gpu: Any, shape: tuple[int, int], dtype: DType) -> None:
    """The sums equal the column sums of the stored gradient, and a second run gives the same bits."""
    generator, found = np.random.default_rng(0), []
    x, target = (generator.random(shape, np.float32).astype(dtype.numpy) for _ in range(2))
    options = {"grad_scale": cp.full((), 1024.0, cp.float32), "share": 1.0, "out_gradient": None, "stream": None}
    for _ in range(2):
        tally = GpuTally(0, cp.cuda.get_current_stream().ptr)
        placed, sums = map(cp.asarray, (x, target)), cp.asarray(np.ones(shape[1], dtype.numpy))
        out_loss = tally.part(first=True)
        _, gradient = summed_loss(ElementwiseLoss("mse"), sums, True, *placed, **options, out_loss=out_loss)
        found.append([float(tally.mean), *(host_of(gpu, each) for each in (gradient, sums))])
    (value, stored, total), again = found
    assert all(map(np.array_equal, found[0], again))
    expected, exact = reference.mse_loss(x, target)
    assert value == pytest.approx(expected, rel=1e-4)
    assert_close("gradient", stored, 1024 * exact, 1.1 * EPSILON[dtype] * abs(1024 * exact) + 2.0**-24)
    wide = stored.astype(np.float64)
    wanted, bound = 1 + wide.sum(axis=0), 1e-5 * abs(wide).sum(axis=0)
    assert_close("sums", total, wanted, 1.1 * EPSILON[dtype] * abs(wanted) + bound)
