"""Matrix products on the pretended GPU, by the public interface, against the float64 reference."""

from __future__ import annotations

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import DType
from tests.support.fake_gpu import FakeGpu
from tests.support.matmul_checks import Product, matmul_case
from tests.support.placed import COLUMNS, ODD
from tests.support.strategies import MatmulCase, Placement

_LARGE = (65_537, 65_537, 65_537)
_CASES = {
    **{f"epilogue-{each.value}": matmul_case(epilogue=each) for each in Epilogue},
    **{f"columns-{each.value}": matmul_case(epilogue=each, d=COLUMNS) for each in Epilogue},
    "alpha": matmul_case(alpha=-0.5),
    "c": matmul_case(with_c=True, beta=1.0),
    "alpha and beta": matmul_case(with_c=True, alpha=2.0, beta=-0.5),
    "beta 0": matmul_case(with_c=True, beta=0.0),
    "in place": matmul_case(with_c=True, alpha=2.0, beta=-0.5, in_place=True),
    "odd c": matmul_case(with_c=True, alpha=2.0, beta=-0.5, c=ODD),
    "c better aligned than d": matmul_case(
        with_c=True, beta=-0.5, d=Placement(False, 1, 0), epilogue=Epilogue.RELU_AUX_BIAS, device_scalars=True
    ),
    "plain, c better aligned than d": matmul_case(with_c=True, beta=-0.5, d=Placement(False, 1, 0)),
    "c across": matmul_case(with_c=True, alpha=2.0, beta=-0.5, c=COLUMNS),
    "c with gelu": matmul_case(with_c=True, alpha=0.75, beta=-0.5, epilogue=Epilogue.GELU_AUX_BIAS),
    "device scalars": matmul_case(with_c=True, alpha=2.0, beta=-0.5, device_scalars=True),
    "device scalars without c": matmul_case(alpha=2.0, device_scalars=True),
    "columns": matmul_case(a=COLUMNS, b=COLUMNS),
    "column of rows": matmul_case(a=COLUMNS),
    "rows of columns": matmul_case(b=COLUMNS),
    "odd places": matmul_case(a=ODD, b=ODD, d=ODD, epilogue=Epilogue.BIAS, bias_offset=3),
    "odd sizes": matmul_case(m=17, n=19, k=23, epilogue=Epilogue.RELU_AUX_BIAS),
    "one inner": matmul_case(k=1, epilogue=Epilogue.DRELU_BGRAD),
    "a row": matmul_case(m=1, epilogue=Epilogue.BIAS),
    "batch": matmul_case(batches=(3, 3, 3), epilogue=Epilogue.BIAS),
    "batch of masks": matmul_case(batches=(3, 3, 3), epilogue=Epilogue.RELU_AUX_BIAS),
    "batch of derivatives": matmul_case(batches=(3, 3, 3), epilogue=Epilogue.DGELU_BGRAD),
    "batch of masks' derivatives": matmul_case(batches=(3, 3, 3), epilogue=Epilogue.DRELU_BGRAD),
    "batch with c": matmul_case(batches=(3, 3, 3), with_c=True, beta=-0.5, alpha=2.0),
    "batch of separate products": matmul_case(
        m=300, n=304, k=8, batches=(3, 3, 3), d=COLUMNS, dtype=DType.FLOAT16, epilogue=Epilogue.BIAS
    ),
    # more matrices than CUDA accepts blocks in z
    "large batch of masks": matmul_case(m=2, n=9, k=3, batches=_LARGE, d=COLUMNS, epilogue=Epilogue.RELU_AUX_BIAS),
    "large batch of masks' derivatives": matmul_case(m=2, n=9, k=3, batches=_LARGE, epilogue=Epilogue.DRELU_BGRAD),
    "large batch of derivatives": matmul_case(m=2, n=3, k=4, batches=_LARGE, epilogue=Epilogue.DGELU_BGRAD),
    "large batch of sums of a": matmul_case(m=3, n=2, k=4, batches=_LARGE, epilogue=Epilogue.BGRADA),
    "large batch of separate products": matmul_case(
        m=2, n=3, k=4, batches=_LARGE, d=COLUMNS, with_c=True, beta=-0.5, dtype=DType.FLOAT16, epilogue=Epilogue.BIAS
    ),
    "one for all": matmul_case(batches=(2, None, 2)),
    "all for one": matmul_case(batches=(None, 2, 2), d=COLUMNS),
    "no inner": matmul_case(k=0, with_c=True, beta=-0.5),
    "no inner without c": matmul_case(k=0),
    "batch of sums of a": matmul_case(batches=(None, 2, 2), epilogue=Epilogue.BGRADA),
    "batch of sums of b": matmul_case(batches=(2, 1, 2), epilogue=Epilogue.BGRADB),
    "batch of no inner": matmul_case(k=0, batches=(3, 3, 3), d=ODD),
    "tf32": matmul_case(compute="tf32", epilogue=Epilogue.BIAS),
    "float64": matmul_case(dtype=DType.FLOAT64, with_c=True, beta=-0.5),
    "float64 device scalars": matmul_case(dtype=DType.FLOAT64, alpha=-0.5, device_scalars=True),
    "float16": matmul_case(dtype=DType.FLOAT16, epilogue=Epilogue.GELU_AUX_BIAS),
    "bfloat16": matmul_case(dtype=DType.BFLOAT16, epilogue=Epilogue.RELU_AUX_BIAS),
    "copies of rows that are no whole vectors": matmul_case(
        m=904, n=905, k=657, dtype=DType.FLOAT16, epilogue=Epilogue.BIAS, bias_offset=1
    ),
    "bfloat16 to float32": matmul_case(dtype=DType.BFLOAT16, d_dtype=DType.FLOAT32, epilogue=Epilogue.BIAS),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in _CASES.items()])
def test_matmul(gpu: FakeGpu, case: MatmulCase) -> None:
    Product(gpu, case, gpu.stream).check()


@pytest.mark.parametrize("batches", [(None, None, None), (3, 3, 3), (1, 1, 1), (None, 2, 2)])
def test_new_results(gpu: FakeGpu, batches: tuple[int | None, ...]) -> None:
    product = Product(gpu, matmul_case(batches=batches), gpu.stream)
    del product.operands["out"]
    product.check_results(product.run())
