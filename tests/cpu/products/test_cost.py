"""Estimated times of products by each method, compared with measurements on an H200 (cuBLASLt 13.1)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import packed
from lt_runtime.problem import DType, MatmulProblem, Spec
from lt_runtime.products.methods import K_MAJOR, LIBRARY, NARROW, PADDED, TILE, Method, estimated_us, fastest_first
from tests.support.product_problems import TF32, forward, input_gradient, weight_gradient


@pytest.mark.parametrize(
    ("problem", "method"),
    [  # Comments give measured µs on an H200: by the expected method, then by the second fastest method.
        (input_gradient(798, 1093, 2720), PADDED),  # 19.1, 58.5
        (weight_gradient(381, 3112, 674), PADDED),  # 9.9, 25.7
        # Padded copies are expected although they are larger than a workspace.
        (input_gradient(3567, 3379, 843), PADDED),
        (input_gradient(2825, 2681, 23), LIBRARY),  # 15.4, 33.3
        (weight_gradient(1075, 35, 2596), LIBRARY),  # 10.5, 14.2
        (input_gradient(2596, 35, 1075), LIBRARY),  # 10.6, 11.2
        (input_gradient(712, 105, 112, **TF32), LIBRARY),  # 4.3, 6.7
        (forward(674, 3112, 381, **TF32), PADDED),  # 18.5, 32.0
        (weight_gradient(1093, 2720, 798, **TF32), K_MAJOR),  # 33.6, 47.0 by PADDED
        (input_gradient(798, 1093, 2720, **TF32), K_MAJOR),  # 42.0, 50.5 by PADDED
        (forward(457, 11, 312, Epilogue.BIAS), NARROW),  # 3.2
        (weight_gradient(6, 840, 1108), NARROW),  # 4.0, 5.7
        (weight_gradient(17, 4280, 871), PADDED),  # 7.0, 11.6
        (input_gradient(7221, 4, 744), PADDED),  # 8.4, 10.5
        (weight_gradient(21, 24, 3904, **TF32), LIBRARY),  # 7.5, 11.0
        (weight_gradient(584, 3625, 444, **TF32), K_MAJOR),  # 31.8, 40.0
        (input_gradient(424, 1384, 14), LIBRARY),  # 3.4, 3.7 by TILE
        (input_gradient(170, 792, 21), TILE),  # 2.7, 3.2
        (weight_gradient(15, 4064, 139, **TF32), NARROW),  # 3.8, 6.3
        (input_gradient(625, 77, 13, **TF32), LIBRARY),  # 3.1, 4.7
        (weight_gradient(13, 77, 625), NARROW),  # 3.7, 6.3
        (forward(256, 512, 784), LIBRARY),
        # Rows begin at multiples of 4 bytes in BF16, of 16 bytes in TF32; the second time (µs) is that of PADDED.
        (input_gradient(16384, 100, 700), LIBRARY),  # 19.6, 29.0
        (weight_gradient(700, 100, 16384), LIBRARY),  # 23.3, 34.7
        (input_gradient(16384, 700, 100), LIBRARY),  # 25.5, 33.8
        (forward(16384, 700, 100, Epilogue.BIAS), PADDED),  # 39.2
        (input_gradient(16384, 100, 700, **TF32), LIBRARY),  # 21.9, 52.7
        (weight_gradient(700, 100, 16384, **TF32), LIBRARY),  # 29.8, 57.2
    ],
)
def test_the_way_that_was_measured_to_be_the_fastest(problem: MatmulProblem, method: Method) -> None:
    assert fastest_first(problem)[0] is method


def test_our_kernel_takes_its_time_for_sums_over_thousands_of_rows() -> None:
    # Measured: 11.1 µs by our kernel, 9.9 µs by cuBLASLt, 7.9 µs on padded copies.
    assert fastest_first(weight_gradient(7, 256, 6156))[0] is not NARROW
    assert fastest_first(forward(6156, 7, 256))[0] is NARROW  # 3.8


@pytest.mark.parametrize(
    ("problem", "us"),
    [
        (forward(13830, 221, 48, Epilogue.BIAS), 9.3),
        (forward(3904, 24, 21, Epilogue.BIAS), 2.6),
        (forward(841, 24, 575, Epilogue.BIAS), 7.0),
        (forward(3904, 24, 21, Epilogue.GELU_AUX_BIAS), 2.9),
        (input_gradient(13830, 221, 48, Epilogue.DGELU), 12.0),
        (input_gradient(3904, 24, 21, Epilogue.DGELU_BGRAD), 6.6),
        (weight_gradient(48, 221, 13830), 15.3),
        (weight_gradient(21, 24, 3904), 8.8),
    ],
)
def test_our_kernel_for_ragged_rows_is_estimated(problem: MatmulProblem, us: float) -> None:
    assert estimated_us(problem)[TILE] == pytest.approx(us, rel=0.13)


@pytest.mark.parametrize(("shape", "us"), [((221, 48, 13830), 16.3), ((21, 24, 3904), 7.5)])
def test_tf32_sums_over_ragged_rows_are_estimated(shape: tuple[int, int, int], us: float) -> None:
    assert estimated_us(weight_gradient(*shape, **TF32))[LIBRARY] == pytest.approx(us, rel=0.15)


def test_our_kernel_for_ragged_rows_has_the_library_s_sums() -> None:
    """With the sum of A, 21x24x3904 takes 9.1 µs by our kernel and 167 µs by cuBLASLt; 23x619x541, 7.4 and 24.9 µs."""
    for shape in ((21, 24, 3904), (23, 619, 541)):
        assert fastest_first(weight_gradient(*shape, Epilogue.BGRADA))[0] is TILE


def test_products_alone_are_seldom_our_kernel_s_for_ragged_rows() -> None:
    """Alone, 1434x936x20 takes 4.1 µs by our kernel and 4.7 by cuBLASLt; beside a weight gradient, 20.7 and 11.7 µs.

    The product below has odd rows, for which the estimates differ as these times do.
    """
    problem = input_gradient(1435, 937, 21)
    us = estimated_us(problem)
    assert us[TILE] < us[LIBRARY]
    assert fastest_first(problem)[0] is LIBRARY


def test_products_of_a_gradient_share_its_copy() -> None:
    """The products 13830x48x221 and 221x48x13830 take 13.7 µs on padded copies, 19.3 by cuBLASLt's ragged kernels."""
    for problem in (input_gradient(13830, 48, 221), weight_gradient(221, 48, 13830)):
        assert fastest_first(problem)[0] is PADDED


def test_our_kernel_has_the_width_of_a_power_of_two() -> None:
    """On an H200 603x12x752 takes 5.3 µs by our kernel."""
    nine, eight = (estimated_us(forward(603, columns, 752))[NARROW] for columns in (9, 8))
    assert nine > 1.5 * eight
    assert estimated_us(forward(603, 12, 752))[NARROW] == pytest.approx(5.3, rel=0.1)


def test_the_sum_of_an_operand_leaves_no_pass_over_the_product() -> None:
    """The estimate for cuBLASLt is lower with an epilogue that sums an operand than with one that changes the product.

    A separate kernel sums the operand; for other epilogues cuBLASLt writes an FP32 product that another pass reads.
    """
    d = Spec(packed(24, 8), alignment=2)
    problem = weight_gradient(24, 8, 2, Epilogue.BGRADA, dtype=DType.FLOAT16, d=d)
    others = replace(problem, epilogue=Epilogue.RELU)
    assert estimated_us(problem)[LIBRARY] < estimated_us(others)[LIBRARY]


def test_copies_are_considered_only_where_something_is_to_be_padded() -> None:
    assert [*estimated_us(forward(256, 512, 784))] == [LIBRARY]
    assert [*estimated_us(input_gradient(256, 512, 784, **TF32))] == [LIBRARY], "not measured untuned"
    assert set(estimated_us(input_gradient(256, 512, 783, **TF32))) == {LIBRARY, PADDED, K_MAJOR}


def test_in_full_fp32_our_kernel_comes_first_where_a_dimension_is_tiny() -> None:
    problem = forward(1108, 6, 840, dtype=DType.FLOAT32)
    assert fastest_first(problem) == [NARROW, LIBRARY]


def test_a_refused_epilogue_is_left_to_a_pass_where_copies_are_slower() -> None:
    wide = forward(1 << 20, 129, 8, Epilogue.RELU)
    product = replace(wide, epilogue=Epilogue.NONE)
    assert fastest_first(product) == [LIBRARY, PADDED]
    large = forward(2048, 1024, 479, Epilogue.RELU)
    assert fastest_first(large) == [PADDED, TILE, LIBRARY]
    us = estimated_us(forward(64, 64, 63, Epilogue.BIAS))
    assert us[LIBRARY] > 2 + estimated_us(forward(64, 64, 63))[LIBRARY], "our pass takes time as well"
    tf32 = forward(64, 64, 63, Epilogue.BIAS, **TF32)
    assert fastest_first(tf32) == [LIBRARY], "the library makes this epilogue"


def test_a_refused_sum_is_left_to_a_pass_and_not_to_a_slower_kernel() -> None:
    deep = weight_gradient(16, 32, 4096)
    assert fastest_first(deep) == [LIBRARY, NARROW]
    assert fastest_first(replace(deep, epilogue=Epilogue.BGRADA)) == [LIBRARY]
    assert fastest_first(weight_gradient(8, 1024, 72, Epilogue.BGRADA))[0] is NARROW


def test_an_epilogue_is_left_to_a_pass_and_not_to_a_slower_kernel() -> None:
    # Measured: cuBLASLt takes 40.8 µs, and needs one more kernel for the bias; our kernel takes 181 µs.
    ragged = forward(3890, 15, 3247, Epilogue.BIAS)
    assert fastest_first(ragged) == [LIBRARY]
    whole = forward(3890, 16, 3248, Epilogue.BIAS)
    assert fastest_first(whole) == [LIBRARY, NARROW], "the library may have no algorithm for the epilogue"


@pytest.mark.parametrize("size", [1, 63, 257])
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.RELU])
def test_small_products_are_two_kernels_at_most(size: int, epilogue: Epilogue) -> None:
    """With padded copies a product takes three kernels: copies of operands, the product, a copy of D."""
    for kind in ({"dtype": DType.FLOAT16}, {}, TF32):
        assert fastest_first(forward(size, size, size, epilogue, **kind))[0] is not PADDED


def test_copies_cost_what_they_move() -> None:
    few, many = 1 << 10, 1 << 14
    padded = estimated_us(forward(many, 512, 511))[PADDED] - estimated_us(forward(few, 512, 511))[PADDED]
    whole = estimated_us(forward(many, 512, 512))[LIBRARY] - estimated_us(forward(few, 512, 512))[LIBRARY]
    moved = 2 * (511 + 512) * (many - few)
    assert padded - whole == pytest.approx(moved / 3.7e6)
