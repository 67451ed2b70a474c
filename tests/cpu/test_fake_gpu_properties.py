"""Layers and products of any layout, epilogue and size on the pretended GPU, against the float64 reference; 16-bit
results are rounded once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Final

from hypothesis import example, given, settings

from lt_runtime.problem import Activation, DType
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer
from tests.support.matmul_checks import Product
from tests.support.rounding_checks import (
    BIAS_OVER_C,
    RoundedLayer,
    RoundedProduct,
    sixteen_bit_layers,
    sixteen_bit_products,
)
from tests.support.strategies import COMPILING, LinearCase, MatmulCase, linear_cases, matmul_cases

_EXAMPLES, _FEWER = settings(COMPILING, max_examples=60), settings(COMPILING, max_examples=25)
_FP32: Final = dict.fromkeys(("none", "relu", "gelu"), DType.FLOAT32)
_SIXTEEN_BITS: Final = {"none": DType.BFLOAT16, "relu": DType.BFLOAT16, "gelu": DType.FLOAT16}


def _layer(case: LinearCase, types: Mapping[str, DType]) -> LinearCase:
    """Gives each activation one type, and dropout only to GELU, so that few kernels are compiled."""
    name = case.activation.name if case.activation.name in types else "relu"
    dropout = 0.5 if name == "gelu" and case.dropout else 0.0
    return dataclasses.replace(case, activation=Activation(name), dtype=types[name], dropout=dropout)


def _product(case: MatmulCase) -> MatmulCase:
    """Gives each activation one 16-bit type, so that few kernels are compiled."""
    dtype = _SIXTEEN_BITS[case.epilogue.activation]
    return dataclasses.replace(case, dtype=dtype, d_dtype=dtype) if case.dtype.itemsize == 2 else case


def _wide_product(case: MatmulCase) -> MatmulCase:
    """Gives each activation one 16-bit type; products without an activation have an FP32 result."""
    case = _product(case)
    is_wide = case.dtype.itemsize == 2 and case.epilogue.activation == "none"
    return dataclasses.replace(case, d_dtype=DType.FLOAT32) if is_wide else case


@_EXAMPLES
@given(case=linear_cases().map(lambda case: _layer(case, _FP32)))
def test_layers(gpu: FakeGpu, case: LinearCase, examples: Counter[str]) -> None:
    Layer(gpu, case, gpu.stream).check()
    examples["layers on the pretended GPU"] += 1


@_EXAMPLES
@given(case=matmul_cases().map(_wide_product))
def test_products(gpu: FakeGpu, case: MatmulCase, examples: Counter[str]) -> None:
    Product(gpu, case, gpu.stream).check()
    examples["products on the pretended GPU"] += 1


@_FEWER
@given(case=sixteen_bit_layers().map(lambda case: _layer(case, _SIXTEEN_BITS)))
def test_layers_are_rounded_once(gpu: FakeGpu, case: LinearCase, examples: Counter[str]) -> None:
    RoundedLayer(gpu, case, gpu.stream).check()
    examples["16-bit layers rounded once on the pretended GPU"] += 1


@_FEWER
@example(case=BIAS_OVER_C)
@given(case=sixteen_bit_products().map(_product))
def test_products_are_rounded_once(gpu: FakeGpu, case: MatmulCase, examples: Counter[str]) -> None:
    RoundedProduct(gpu, case, gpu.stream).check()
    examples["16-bit products rounded once on the pretended GPU"] += 1
