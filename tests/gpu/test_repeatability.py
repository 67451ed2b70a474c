"""Every kernel writes the same bits in each run, also while other work is on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.matmul_epilogue import MatmulPass
from lt_runtime.layout import packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from tests.gpu.test_own_products import TYPED_KINDS, name_of
from tests.support.calls import call_of
from tests.support.gpu_arrays import MaskPass
from tests.support.gpu_products import Product
from tests.support.strategies import TYPES

REPEATS = 100
pytestmark = pytest.mark.large
SHAPES = [(1000, 777), (4096, 1024), (70, 20000), (9, 3)]
RNG = lt.Philox(2**35 + 1, 2, 3)


def random(seed: int, shape: tuple[int, ...], dtype: DType = DType.FLOAT32) -> Any:
    """Draws an array of standard normal numbers on the GPU."""
    return cp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype.numpy))


def bits(array: Any) -> Any:
    return array.reshape(-1).view(cp.uint8)


def assert_repeats(run: Callable[[], Sequence[Any]]) -> None:
    """Runs an operation 100 times, and fails unless all results agree bit for bit.

    Results are overwritten after each run, so that a kernel that writes nothing is noticed. Another stream keeps a part
    of the GPU busy, so that blocks are scheduled differently.
    """
    busy, other = random(0, (1 << 20,)), cp.cuda.Stream(non_blocking=True)
    first = [cp.asnumpy(bits(array)) for array in run()]
    expected = [cp.asarray(array) for array in first]
    assert all(array.size for array in first)
    for repeat in range(1, REPEATS):
        with other:
            for _ in range(repeat % 4):
                cp.cos(busy, out=busy)
        for number, (array, wanted) in enumerate(zip(run(), expected, strict=True)):
            assert bool((bits(array) == wanted).all()), f"result {number} differs in run {repeat}"
            bits(array)[...] = 0xFF
    other.synchronize()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("activation", "dropout"), [("gelu", 0.1), ("gelu", 0.0), ("relu", 0.3), ("sigmoid", 0.0), ("none", 0.0)]
)
def test_epilogues(dtype: DType, shape: tuple[int, int], activation: str, dropout: float) -> None:
    m, n = shape
    x, w, bias, dy = (random(i, s, dtype) for i, s in enumerate(((m, 8), (n, 8), (n,), shape)))

    def forward() -> tuple[list[Any], Any]:
        z = cp.empty(shape, dtype.numpy)
        y, context = lt.linear_fwd(x, w, bias, activation=activation, dropout=dropout, rng=RNG, out_z=z)
        return [y, z], context

    _, context = forward()

    def backward() -> list[Any]:
        dz = cp.empty(shape, dtype.numpy)
        gradients = lt.linear_bwd(dy, context, need_dx=False, need_dw=False, out_dz=dz)
        return [dz, gradients.db]

    assert_repeats(lambda: forward()[0])
    assert_repeats(backward)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mask_in_place(dtype: DType, shape: tuple[int, int]) -> None:
    dy, mask = random(0, shape, dtype), reference.pack_mask(np.random.default_rng(1).random(shape) < 0.5)
    masked = MaskPass(dy, cp.asarray(mask))

    def run() -> list[Any]:
        dz, db = dy.copy(), cp.empty(shape[1], dtype.numpy)
        masked.run(dz, dz, db)
        return [dz, db]

    assert_repeats(run)


@pytest.mark.parametrize("epilogue", [Epilogue.GELU_AUX_BIAS, Epilogue.DGELU_BGRAD, Epilogue.BGRADB])
@pytest.mark.parametrize("dtype", list(TYPES))
def test_epilogues_of_a_product(epilogue: Epilogue, dtype: DType) -> None:
    m, n, k = 1000, 776, 640
    a, b, product, aux, bias = (random(i, s, dtype) for i, s in enumerate(((m, k), (k, n), (m, n), (m, n), (n,))))
    specs = [Spec(packed(*s)) for s in ((m, k), (k, n), (m, n))]
    has_aux = epilogue is not Epilogue.BGRADB
    problem = MatmulProblem(dtype, dtype, Compute.FLOAT32, *specs, epilogue, aux=specs[2] if has_aux else None)
    own_pass, stream = MatmulPass(problem, 0), cp.cuda.get_current_stream().ptr

    def run() -> list[Any]:
        d, kept, vector = product.copy(), aux.copy(), bias.copy()
        at = {"a": a, "b": b, "d": d, "vector": vector, "aux": kept}
        call = call_of(problem, stream, **{name: array.data.ptr for name, array in at.items()})
        own_pass.launch(call, d.data.ptr, stream)
        return [d, kept, vector]

    assert_repeats(run)


@pytest.mark.parametrize("kind", TYPED_KINDS, ids=name_of)
def test_products_by_our_kernels(gpu: Any, kind: tuple[Any, ...]) -> None:
    product = Product(gpu, *kind)

    def run() -> list[Any]:
        product.run()
        return [product.d_gpu.array.copy(), product.vector_gpu.array.copy()]

    assert_repeats(run)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", [(1000, 77), (8192, 10), (333, 1000), (40, 50304), (5, 2), (3000, 1)])
def test_losses(dtype: DType, shape: tuple[int, int]) -> None:
    scores, target = random(0, shape, dtype), random(1, shape, dtype)
    labels = cp.asarray(np.random.default_rng(2).integers(0, shape[1], shape[0]))
    assert_repeats(lambda: lt.cross_entropy(scores, labels))
    assert_repeats(lambda: lt.cross_entropy(scores, labels, ignore_index=0, label_smoothing=0.1))
    assert_repeats(lambda: lt.mse_loss(scores, target))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_norm": 0.5, "skip_nonfinite": True},
        {"amsgrad": True, "moments": "bfloat16", "stochastic_rounding": True, "seed": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("data", list(TYPES))
@pytest.mark.parametrize("grad", list(TYPES))
def test_adamw(data: DType, grad: DType, options: dict[str, Any]) -> None:
    shapes = [(1000, 333), (1,), (4097,), (64, 64), (0,), (100_000,)]
    values = [(random(i, shape, data), random(100 + i, shape, grad)) for i, shape in enumerate(shapes)]

    def run() -> list[Any]:
        parameters = [lt.Parameter(value.copy(), gradient) for value, gradient in values]
        optimizer = lt.AdamW(parameters, lr=1e-2, weight_decay=0.1, **options)
        for _ in range(3):
            optimizer.step()
        norm = [optimizer.grad_norm.copy()] if "max_norm" in options else []
        arrays = [array for each in parameters for array in (each.data, each.master) if array is not None]
        return [*(array for array in arrays if array.size), *norm]

    assert_repeats(run)
