"""Functions of the bindings that need a GPU: handles, algorithms by id, checks, capabilities, the matrix transform."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import cupy as cp
import numpy as np
import pytest

from lt_runtime import cublaslt
from lt_runtime.errors import MissingLibraryError
from lt_runtime.problem import DType

M, N, K = 64, 48, 32
KINDS = {
    "float32": (cublaslt.ComputeType.COMPUTE_32F, cublaslt.DataType.R_32F, cublaslt.DataType.R_32F),
    "tf32": (cublaslt.ComputeType.COMPUTE_32F_FAST_TF32, cublaslt.DataType.R_32F, cublaslt.DataType.R_32F),
    "bfloat16": (cublaslt.ComputeType.COMPUTE_32F, cublaslt.DataType.R_32F, cublaslt.DataType.R_16BF),
    "float16": (cublaslt.ComputeType.COMPUTE_32F, cublaslt.DataType.R_32F, cublaslt.DataType.R_16F),
    "float64": (cublaslt.ComputeType.COMPUTE_64F, cublaslt.DataType.R_64F, cublaslt.DataType.R_64F),
}


@pytest.fixture
def handle() -> Iterator[cublaslt.Handle]:
    cp.cuda.Device(0).use()
    with cublaslt.Handle() as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_every_capability_and_configuration_of_every_algorithm_is_readable(kind: str, handle: cublaslt.Handle) -> None:
    compute, scale, data = KINDS[kind]
    types = (compute, scale, data, data, data, data)
    ids = cublaslt.algo_get_ids(handle, types)
    assert ids
    known = [attribute for attribute in cublaslt.AlgoCapAttribute if attribute.name not in ("TILE_IDS", "STAGES_IDS")]
    for algo_id in ids:
        algorithm = cublaslt.algo_init(handle, types, algo_id)
        assert algorithm.get(cublaslt.AlgoConfigAttribute.ID) == algo_id
        for attribute in known:
            _read(lambda each=attribute, algo=algorithm: algo.capability(each))
        for attribute in (cublaslt.AlgoCapAttribute.TILE_IDS, cublaslt.AlgoCapAttribute.STAGES_IDS):
            assert isinstance(algorithm.capabilities(attribute), tuple)
        for config in cublaslt.AlgoConfigAttribute:
            _read(lambda each=config, algo=algorithm: algo.get(each))


def _read(read: Callable[[], int]) -> None:
    with contextlib.suppress(MissingLibraryError):  # this version of the library cannot report the capability
        assert isinstance(read(), int)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_heuristic_passes_the_check_and_multiplies(kind: str, handle: cublaslt.Handle) -> None:
    compute, scale, data = KINDS[kind]
    dtype = DType(kind).numpy
    # In memory these are column-major matrices: A is M×K and B is K×N.
    a, b = cp.ones((K, M), dtype), cp.ones((N, K), dtype)
    d = cp.zeros((N, M), dtype)
    workspace = cp.empty(1 << 20, cp.uint8)
    with cublaslt.MatmulDesc(compute, scale) as desc, cublaslt.MatmulPreference() as preference:
        preference.set(cublaslt.PreferenceAttribute.MAX_WORKSPACE_BYTES, workspace.nbytes)
        layouts = [cublaslt.MatrixLayout(data, *shape) for shape in ((M, K, M), (K, N, K), (M, N, M))]
        for algorithm in cublaslt.get_heuristics(handle, desc, *layouts, layouts[2], preference, 4):
            checked = cublaslt.algo_check(handle, desc, *layouts, layouts[2], algorithm)
            assert checked.workspace_size == algorithm.workspace_size
            d.fill(0)
            cublaslt.matmul(
                handle, desc, 2.0, a.data.ptr, layouts[0], b.data.ptr, layouts[1], 0.0, d.data.ptr, layouts[2],
                d.data.ptr, layouts[2], checked, workspace.data.ptr, workspace.nbytes, 0,
            )  # fmt: skip
            assert (d == 2 * K).all()


def test_the_transform_transposes_and_scales(handle: cublaslt.Handle) -> None:
    source = cp.arange(M * N, dtype=cp.float32).reshape(N, M)  # A column-major matrix of M×N.
    target = cp.empty((M, N), cp.float32)  # A column-major matrix of N×M.
    with cublaslt.MatrixTransformDesc(cublaslt.DataType.R_32F) as desc:
        desc.set(cublaslt.MatrixTransformDescAttribute.TRANSA, cublaslt.Operation.T)
        layouts = [cublaslt.MatrixLayout(cublaslt.DataType.R_32F, *shape) for shape in ((M, N, M), (N, M, N))]
        cublaslt.matrix_transform(
            handle, desc, 3.0, source.data.ptr, layouts[0], 0.0, 0, None, target.data.ptr, layouts[1], 0
        )
    np.testing.assert_array_equal(cp.asnumpy(target), 3 * cp.asnumpy(source).T)
