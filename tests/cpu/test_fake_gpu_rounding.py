"""16-bit results are rounded once: layers and products of any layout, epilogue and size on the pretended GPU."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Final

from hypothesis import given, settings

from lt_runtime.problem import Activation, DType
from tests.support.fake_gpu import FakeGpu
from tests.support.rounding_checks import RoundedLayer, RoundedProduct, sixteen_bit_layers, sixteen_bit_products
from tests.support.strategies import COMPILING, LinearCase, MatmulCase

_EXAMPLES = settings(COMPILING, max_examples=60)
_TYPES: Final = {"none": DType.BFLOAT16, "relu": DType.BFLOAT16, "gelu": DType.FLOAT16}


def _layer(case: LinearCase) -> LinearCase:
    """Gives each activation one type, and dropout only to GELU, so that few kernels are compiled."""
    name = case.activation.name if case.activation.name in _TYPES else "relu"
    dropout = 0.5 if name == "gelu" and case.dropout else 0.0
    return dataclasses.replace(case, activation=Activation(name), dtype=_TYPES[name], dropout=dropout)


def _product(case: MatmulCase) -> MatmulCase:
    """Gives each activation one type, so that few kernels are compiled."""
    dtype = _TYPES[case.epilogue.activation]
    return dataclasses.replace(case, dtype=dtype, d_dtype=dtype)


@_EXAMPLES
@given(case=sixteen_bit_layers().map(_layer))
def test_layers(gpu: FakeGpu, case: LinearCase, examples: Counter[str]) -> None:
    RoundedLayer(gpu, case, gpu.stream).check()
    examples["16-bit layers rounded once on the pretended GPU"] += 1


@_EXAMPLES
@given(case=sixteen_bit_products().map(_product))
def test_products(gpu: FakeGpu, case: MatmulCase, examples: Counter[str]) -> None:
    RoundedProduct(gpu, case, gpu.stream).check()
    examples["16-bit products rounded once on the pretended GPU"] += 1
