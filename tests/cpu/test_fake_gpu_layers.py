"""Layers on the pretended GPU, by the public interface, against the float64 reference."""

from __future__ import annotations

import pytest

from lt_runtime.problem import ACTIVATIONS, DType
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer, layer_case
from tests.support.placed import COLUMNS, FLAT, ODD
from tests.support.strategies import LinearCase

# Every second activation has aligned rows, the others unaligned ones, as in tests/host_kernels/variants.py: so these
# tests reuse the kernels that those tests have compiled.
_ACTIVATIONS = [layer_case(activation=name, n=32 if index % 2 == 0 else 33) for index, name in enumerate(ACTIVATIONS)]
_CASES = {
    **{f"activation-{case.activation.name}": case for case in _ACTIVATIONS},
    "no bias": layer_case(bias=False, activation="none"),
    "relu without bias": layer_case(bias=False, activation="relu"),
    "dropout": layer_case(dropout=0.5),
    "dropout alone": layer_case(dropout=0.25, activation="none", bias=False),
    "keep z": layer_case(keep_z=True),
    "keep z of relu": layer_case(keep_z=True, activation="relu"),
    "keep z with dropout": layer_case(keep_z=True, dropout=0.5),
    "accumulate": layer_case(accumulate=True),
    "added": layer_case(add=FLAT, activation="none"),
    "added in place": layer_case(add=FLAT, add_over_out=True, activation="none", bias=False, dtype=DType.BFLOAT16),
    "added in place after relu": layer_case(add=FLAT, add_over_out=True, activation="relu", n=33),
    "added in place after dropout": layer_case(add=FLAT, add_over_out=True, dropout=0.5, activation="none", y=ODD),
    "added to a kept z": layer_case(add=ODD, activation="none", keep_z=True, dtype=DType.FLOAT16),
    "added in place to a kept z": layer_case(add=FLAT, add_over_out=True, activation="none", keep_z=True),
    "added across": layer_case(add=COLUMNS, activation="none", bias=False),
    "added to columns": layer_case(add=COLUMNS, y=COLUMNS, activation="none"),
    "added after sigmoid": layer_case(add=FLAT, activation="sigmoid", dtype=DType.BFLOAT16),
    "added to ragged rows": layer_case(add=FLAT, activation="none", n=33, dtype=DType.BFLOAT16),
    "added without inputs": layer_case(add=FLAT, activation="none", bias=False, k=0),
    "added without rows": layer_case(add=FLAT, m=0),
    "added dx": layer_case(accumulate_dx=True, dx=ODD, keep_z=True, dropout=0.5),
    "added dx of columns": layer_case(accumulate_dx=True, accumulate=True, dx=COLUMNS),
    "added dx alone": layer_case(accumulate_dx=True, need=(True, False, False), activation="none"),
    "added dx of no outputs": layer_case(accumulate_dx=True, n=0),
    "added dx of ragged rows": layer_case(accumulate_dx=True, k=23, dtype=DType.BFLOAT16),
    "added dx of few inputs": layer_case(accumulate_dx=True, m=64, k=2, activation="none"),
    "only dx": layer_case(need=(True, False, False)),
    "only dw": layer_case(need=(False, True, False)),
    "only db": layer_case(need=(False, False, True)),
    "columns": layer_case(x=COLUMNS, w=COLUMNS),
    "columns y": layer_case(y=COLUMNS, dy=COLUMNS),
    "columns gradients": layer_case(dx=COLUMNS, dw=COLUMNS, accumulate=True),
    "odd places": layer_case(x=ODD, w=ODD, y=ODD, dy=ODD, dx=ODD, dw=ODD),
    "odd sizes": layer_case(m=17, n=19, k=23, activation="relu"),
    "a row": layer_case(m=1, activation="relu"),
    "no rows": layer_case(m=0),
    "no rows accumulated": layer_case(m=0, accumulate=True),
    "no rows through the product alone": layer_case(m=0, activation="none", need=(False, True, True)),
    "few outputs": layer_case(m=64, n=3, activation="none"),
    "few inputs": layer_case(m=64, k=2, activation="none"),
    "large": layer_case(m=130, n=72, k=257, activation="relu"),
    "tf32": layer_case(compute="tf32", activation="relu"),
    "float16": layer_case(dtype=DType.FLOAT16),
    "float16 relu": layer_case(dtype=DType.FLOAT16, activation="relu", accumulate=True),
    "bfloat16": layer_case(dtype=DType.BFLOAT16, activation="relu"),
    "bfloat16 none": layer_case(dtype=DType.BFLOAT16, activation="none", m=17),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in _CASES.items()])
def test_forward_and_backward(gpu: FakeGpu, case: LinearCase) -> None:
    # The result is read after waiting for this stream alone: work on any other stream would be missed.
    Layer(gpu, case, gpu.stream).check()
