"""Layers and products of any layout, epilogue and size on the pretended GPU, against the float64 reference."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from hypothesis import given, settings

from lt_runtime.problem import Activation, DType
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer
from tests.support.matmul_checks import Product
from tests.support.strategies import COMPILING, LinearCase, MatmulCase, linear_cases, matmul_cases

_EXAMPLES = settings(COMPILING, max_examples=150)
_FEW = ("none", "relu", "gelu")


def _layer(case: LinearCase) -> LinearCase:
    """Limits a case to FP32, and dropout to GELU, so that few kernels are compiled."""
    name = case.activation.name if case.activation.name in _FEW else "relu"
    changes: dict[str, Any] = {"activation": Activation(name), "dtype": DType.FLOAT32}
    changes["dropout"] = 0.5 if name == "gelu" and case.dropout else 0.0
    return dataclasses.replace(case, **changes)


_RESULTS = {"none": DType.FLOAT32, "relu": DType.BFLOAT16, "gelu": DType.FLOAT16}


def _product(case: MatmulCase) -> MatmulCase:
    """Gives each activation one 16-bit type, so that few kernels are compiled."""
    if case.dtype.itemsize != 2:
        return case
    result = _RESULTS[case.epilogue.activation]
    return dataclasses.replace(case, dtype=DType.BFLOAT16 if result is DType.FLOAT32 else result, d_dtype=result)


@_EXAMPLES
@given(case=linear_cases().map(_layer))
def test_layers(gpu: FakeGpu, case: LinearCase, examples: Counter[str]) -> None:
    Layer(gpu, case, gpu.stream).check()
    examples["layers on the pretended GPU"] += 1


@_EXAMPLES
@given(case=matmul_cases().map(_product))
def test_products(gpu: FakeGpu, case: MatmulCase, examples: Counter[str]) -> None:
    Product(gpu, case, gpu.stream).check()
    examples["products on the pretended GPU"] += 1
