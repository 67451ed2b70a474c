"""One cuBLASLt descriptor of each kind, and every attribute of each, as parameters of tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt.attributes import Attribute
from lt_runtime.errors import MissingLibraryError


def matmul_desc() -> cublaslt.MatmulDesc:
    return cublaslt.MatmulDesc(cublaslt.ComputeType.COMPUTE_32F, cublaslt.DataType.R_32F)


def matrix_layout() -> cublaslt.MatrixLayout:
    return cublaslt.MatrixLayout(cublaslt.DataType.R_16BF, 12, 34, 56)


def transform_desc() -> cublaslt.MatrixTransformDesc:
    return cublaslt.MatrixTransformDesc(cublaslt.DataType.R_32F)


def algorithm() -> cublaslt.Algorithm:
    return cublaslt.Algorithm(bytes(64))


KINDS: list[tuple[Callable[[], Any], type[Attribute]]] = [
    (matmul_desc, cublaslt.MatmulDescAttribute),
    (matrix_layout, cublaslt.MatrixLayoutAttribute),
    (cublaslt.MatmulPreference, cublaslt.PreferenceAttribute),
    (transform_desc, cublaslt.MatrixTransformDescAttribute),
    (cublaslt.EmulationDesc, cublaslt.EmulationDescAttribute),
]
EVERY_KIND = [pytest.param(make, id=make.__name__) for make, _ in KINDS]
EVERY_ATTRIBUTE = [
    pytest.param(make, attribute, id=str(attribute)) for make, attributes in KINDS for attribute in attributes
]


def made(make: Callable[[], Any], attribute: Attribute | None = None) -> Any:
    """Makes a descriptor; skips the test if the installed library is too old for the descriptor or the attribute."""
    if attribute is not None and cublaslt.get_version() < attribute.since:
        pytest.skip("newer than the installed library")
    try:
        return make()
    except MissingLibraryError as error:
        pytest.skip(str(error))
