"""All planted faults."""

from __future__ import annotations

from typing import Final

from tests.mutants import (
    calls,
    epilogue_kernels,
    layers,
    loss_kernels,
    models,
    narrow_mlps,
    optimizer_kernels,
    product_kernels,
    products,
    profiling,
    reports,
    storing,
    training,
    tuning,
    weights,
)
from tests.mutants.fault import Fault

_AREAS: Final = (
    *(epilogue_kernels, product_kernels, loss_kernels, optimizer_kernels, narrow_mlps),
    *(products, layers, calls, storing, models, training, tuning, weights, profiling, reports),
)

FAULTS: Final[tuple[Fault, ...]] = tuple(each for area in _AREAS for each in area.FAULTS)
