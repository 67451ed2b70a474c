"""One descriptor of each kind, and every attribute of each, as parameters of tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import attributes
from lt_runtime.cublaslt.values import Attribute
from lt_runtime.errors import MissingLibraryError


def matmul_desc() -> cublaslt.MatmulDesc:
    return cublaslt.MatmulDesc(cublaslt.ComputeType.COMPUTE_32F, cublaslt.DataType.R_32F)


def matrix_layout() -> cublaslt.MatrixLayout:
    return cublaslt.MatrixLayout(cublaslt.DataType.R_16BF, 12, 34, 56)


def transform_desc() -> cublaslt.MatrixTransformDesc:
    return cublaslt.MatrixTransformDesc(cublaslt.DataType.R_32F)


def algorithm() -> cublaslt.Algorithm:
    return cublaslt.Algorithm(bytes(64))


KINDS: list[tuple[Callable[[], Any], Mapping[Any, Attribute]]] = [
    (matmul_desc, attributes.MATMUL_DESC),
    (matrix_layout, attributes.MATRIX_LAYOUT),
    (cublaslt.MatmulPreference, attributes.PREFERENCE),
    (transform_desc, attributes.MATRIX_TRANSFORM_DESC),
    (cublaslt.EmulationDesc, attributes.EMULATION_DESC),
]
EVERY_KIND = [pytest.param(make, id=make.__name__) for make, _ in KINDS]
EVERY_ATTRIBUTE = [
    pytest.param(make, attribute, known, id=f"{type(attribute).__name__}.{attribute.name}")
    for make, table in KINDS
    for attribute, known in table.items()
]


def made(make: Callable[[], Any], known: Attribute | None = None) -> Any:
    """A descriptor; the test is skipped where an older library is installed that lacks it, or the attribute."""
    if known is not None and cublaslt.get_version() < known.since:
        pytest.skip("newer than the installed library")
    try:
        return make()
    except MissingLibraryError as error:
        pytest.skip(str(error))
