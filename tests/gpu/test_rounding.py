"""16-bit results are rounded once, whatever the layout, epilogue and size, on normally distributed data."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings

from tests.support.gpu_arrays import GpuMachine
from tests.support.rounding_checks import RoundedLayer, RoundedProduct, sixteen_bit_layers, sixteen_bit_products
from tests.support.strategies import LinearCase, MatmulCase

_EXAMPLES = settings(
    max_examples=600,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@_EXAMPLES
@given(case=sixteen_bit_layers())
def test_layers(case: LinearCase, examples: Counter[str]) -> None:
    RoundedLayer(GpuMachine(), case).check()
    examples["16-bit layers rounded once"] += 1


@_EXAMPLES
@given(case=sixteen_bit_products())
def test_products(case: MatmulCase, examples: Counter[str]) -> None:
    RoundedProduct(GpuMachine(), case).check()
    examples["16-bit products rounded once"] += 1
