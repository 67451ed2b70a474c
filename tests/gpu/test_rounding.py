"""16-bit results are rounded once, whatever the layout, epilogue and size, on normally distributed data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import DType
from tests.support.rounding_checks import (
    BIAS_OVER_C,
    RoundedLayer,
    RoundedProduct,
    sixteen_bit_layers,
    sixteen_bit_products,
)
from tests.support.strategies import LinearCase, MatmulCase, Placement

_EXAMPLES = settings(
    max_examples=600,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@_EXAMPLES
@given(case=sixteen_bit_layers())
def test_layers(gpu: Any, case: LinearCase, examples: Counter[str]) -> None:
    RoundedLayer(gpu, case).check()
    examples["16-bit layers rounded once"] += 1


@_EXAMPLES
@example(case=BIAS_OVER_C)
@example(case=replace(BIAS_OVER_C, m=64, n=64, k=64, dtype=DType.BFLOAT16, d_dtype=DType.BFLOAT16))
@given(case=sixteen_bit_products())
def test_products(gpu: Any, case: MatmulCase, examples: Counter[str]) -> None:
    RoundedProduct(gpu, case).check()
    examples["16-bit products rounded once"] += 1


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("c", [Placement(False, 0, 1), Placement(False, 0, 4), Placement(False, 1, 0)])
@pytest.mark.parametrize("epilogue", [Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS])
def test_products_over_a_ragged_c(gpu: Any, epilogue: Epilogue, c: Placement, dtype: DType) -> None:
    """cuBLASLt's kernels for ragged rows round before they add C and the bias: on an H200 up to 99 times the bound."""
    flat = Placement(column_major=False, gap=0, offset=0)
    case = MatmulCase(
        m=64, n=64, k=64, batches=(None, None, None), dtype=dtype, compute="float32", d_dtype=dtype, epilogue=epilogue,
        alpha=1.0, beta=1.0, with_c=True, in_place=False, device_scalars=False, a=flat, b=flat, c=c, d=flat,
        bias_offset=0, data_seed=0,
    )  # fmt: skip
    RoundedProduct(gpu, case).check()
