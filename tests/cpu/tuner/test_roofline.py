"""The roofline's least time of a problem, against published peak rates and sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.peaks import Hardware
from lt_runtime.layout import packed
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem, MLPProblem, Saved, Spec
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.roofline import Work, least_us, work_of
from tests.support.chain_problems import backward_of, forward_of

H200 = Hardware(90, 132, 1_980_000, 3_201_000, 6144)
PUBLISHED = [  # GPU at its boost clock, operand type, compute type, TFLOP/s in the data sheet
    (Hardware(75, 40, 1_590_000, 0, 0), DType.FLOAT16, Compute.FLOAT32, 65),
    (Hardware(80, 108, 1_410_000, 0, 0), DType.BFLOAT16, Compute.FLOAT32, 312),
    (Hardware(80, 108, 1_410_000, 0, 0), DType.FLOAT32, Compute.TF32, 156),
    (Hardware(80, 108, 1_410_000, 0, 0), DType.FLOAT32, Compute.FLOAT32, 19.5),
    (Hardware(80, 108, 1_410_000, 0, 0), DType.FLOAT64, Compute.FLOAT64, 19.5),
    (Hardware(86, 84, 1_740_000, 0, 0), DType.FLOAT16, Compute.FLOAT32, 149.7),
    (Hardware(86, 84, 1_740_000, 0, 0), DType.FLOAT32, Compute.FLOAT32, 37.4),
    (Hardware(89, 142, 2_520_000, 0, 0), DType.BFLOAT16, Compute.FLOAT32, 362),
    (Hardware(90, 132, 1_830_000, 0, 0), DType.BFLOAT16, Compute.FLOAT32, 989.4),
    (Hardware(90, 132, 1_830_000, 0, 0), DType.FLOAT32, Compute.TF32, 494.7),
    (Hardware(90, 132, 1_980_000, 0, 0), DType.FLOAT32, Compute.FLOAT32, 66.9),
    (Hardware(90, 132, 1_980_000, 0, 0), DType.FLOAT64, Compute.FLOAT64, 66.9),
    (Hardware(100, 148, 1_850_000, 0, 0), DType.FLOAT16, Compute.FLOAT32, 2250),
    (Hardware(120, 188, 2_617_000, 0, 0), DType.BFLOAT16, Compute.FLOAT32, 504),
]


@pytest.mark.parametrize(("hardware", "dtype", "compute", "teraflops"), PUBLISHED)
def test_peaks_are_those_of_data_sheets(hardware: Hardware, dtype: DType, compute: Compute, teraflops: float) -> None:
    assert hardware.flops_per_s(dtype, compute) == pytest.approx(teraflops * 1e12, rel=0.02)


def test_bandwidth_is_that_of_the_data_sheet() -> None:
    assert H200.bytes_per_s == pytest.approx(4.8e12, rel=0.03)


def test_a_large_product_waits_for_computing_and_a_thin_one_for_memory() -> None:
    bf16 = DType.BFLOAT16
    square, row = packed(8192, 8192), packed(1, 8192)
    large = MatmulProblem(bf16, bf16, Compute.FLOAT32, Spec(square), Spec(square), Spec(square))
    assert least_us(large, H200) == pytest.approx(2 * 8192**3 / H200.flops_per_s(bf16, Compute.FLOAT32) * 1e6)
    thin = replace(large, a=Spec(row), d=Spec(row))
    assert least_us(thin, H200) == pytest.approx(2 * (8192**2 + 2 * 8192) / H200.bytes_per_s * 1e6)


def test_unknown_hardware_has_no_least_time() -> None:
    problem = forward_of(LayerChain.of_mlp(8, (3, 5), Activation(), DType.FLOAT32, Compute.TF32))
    assert least_us(problem, H200._replace(capability=130)) is None
    assert least_us(problem, H200._replace(memory_clock_khz=0)) is None
    assert least_us(problem, H200._replace(capability=75)) is None  # has no TF32


def test_work_of_products() -> None:
    a, b, d = Spec(packed(4, 3), batch_stride=12), Spec(packed(3, 5)), Spec(packed(4, 5), batch_stride=20)
    plain = MatmulProblem(DType.FLOAT16, DType.FLOAT32, Compute.FLOAT32, a, b, d, batch=7)
    assert work_of(plain) == Work(2 * 7 * 4 * 3 * 5, 2 * (7 * 12 + 15) + 4 * 7 * 20)
    with_c = replace(plain, c=d, epilogue=Epilogue.BIAS)
    assert work_of(with_c).bytes - work_of(plain).bytes == 4 * (7 * 20 + 5)
    mask = replace(plain, batch=1, epilogue=Epilogue.RELU_AUX, aux=Spec(packed(4, 128)))
    assert work_of(mask).bytes - work_of(replace(plain, batch=1)).bytes == 4 * 128 // 8


def test_work_of_layers() -> None:
    chain, relu = (
        LayerChain.of_mlp(6, (3, 5, 4), Activation(name), DType.BFLOAT16, Compute.FLOAT32) for name in ("gelu", "relu")
    )
    x, w, y = 6 * 3, 5 * 3, 6 * 5
    assert work_of(forward_of(chain)) == Work(2 * 6 * 5 * 3, 2 * (x + w + y + 5))
    assert work_of(replace(forward_of(chain), addend=forward_of(chain).y)).bytes == 2 * (x + w + 2 * y + 5)
    # This problem computes only dw, from dz.
    assert work_of(backward_of(chain, 0)) == Work(2 * 6 * 5 * 3, 2 * (y + x + w))
    dy, w, x = 6 * 4, 4 * 5, 6 * 5
    # This problem reads the pre-activation of the layer below, and computes both layers' bias gradients.
    read, written = dy + w + x + x, x + w + 4 + 5
    assert work_of(backward_of(chain, 1)) == Work(2 * 2 * 6 * 4 * 5, 2 * (read + written))
    accumulated = replace(backward_of(chain, 1), accumulate=True)
    assert work_of(accumulated).bytes == 2 * (read + written + w)
    added = replace(backward_of(chain, 1), accumulate_dx=True)
    assert work_of(added).bytes == 2 * (read + written + x)
    assert work_of(backward_of(relu, 1, Saved.MASK)).bytes == 2 * (read + written - x) + x // 8


def test_work_of_a_narrow_mlp() -> None:
    inference = MLPProblem(DType.BFLOAT16, 6, (3, 5, 4), (True, False), Activation("relu"))
    weights, parameters = 3 * 5 + 5 * 4, 3 * 5 + 5 * 4 + 5
    assert work_of(inference) == Work(2 * 6 * weights, 2 * (6 * (3 + 4) + parameters))
    # A layer has three products in training; the first layer has two, because the inputs have no gradient.
    training = Work(2 * 6 * (3 * weights - 3 * 5), 2 * (6 * (3 + 2 * 4) + 2 * parameters))
    assert work_of(replace(inference, backward=True)) == training
    # With a loss the targets are read, and neither outputs nor their gradient are written or read.
    with_loss = Work(training.flops, 2 * (6 * (3 + 4) + 2 * parameters))
    assert work_of(replace(inference, backward=True, loss=True)) == with_loss
