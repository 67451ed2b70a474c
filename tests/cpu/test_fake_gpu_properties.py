"""Layers and products of any layout, epilogue and size on the pretended GPU, against the float64 reference."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings

from lt_runtime.problem import Activation, DType
from tests.strategies import LinearCase, MatmulCase, linear_cases, matmul_cases
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer
from tests.support.matmul_checks import Product

_EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,  # each kernel variant that an example needs is compiled for it
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
_FEW = ("none", "relu", "gelu")


def _layer(case: LinearCase) -> LinearCase:
    """The case with few kinds of kernels: FP32, and dropout with GELU alone."""
    name = case.activation.name if case.activation.name in _FEW else "relu"
    changes: dict[str, Any] = {"activation": Activation(name), "dtype": DType.FLOAT32}
    changes["dropout"] = 0.5 if name == "gelu" and case.dropout else 0.0
    return dataclasses.replace(case, **changes)


@_EXAMPLES
@given(case=linear_cases().map(_layer))
def test_layers(gpu: FakeGpu, case: LinearCase, examples: Counter[str]) -> None:
    Layer(gpu, case, gpu.stream).check()
    examples["layers on the pretended GPU"] += 1


@_EXAMPLES
@given(case=matmul_cases())
def test_products(gpu: FakeGpu, case: MatmulCase, examples: Counter[str]) -> None:
    Product(gpu, case, gpu.stream).check()
    examples["products on the pretended GPU"] += 1
