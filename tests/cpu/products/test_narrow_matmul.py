"""Which products our kernel for one tiny dimension supports, and how its threads share a product."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels import tiling
from lt_runtime.kernels.kernel import Entry
from lt_runtime.kernels.narrow import MAX_WIDTH, NarrowPass, supports
from lt_runtime.kernels.tiling import MAX_GRID_Y
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from tests.support.product_problems import across, forward, input_gradient, problem_of, weight_gradient

H200 = DeviceInfo(0, "", 90, multiprocessors=132, memory=0)


DERIVATIVES = (Epilogue.DRELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU, Epilogue.DGELU_BGRAD)


def through(m: int, n: int, k: int, epilogue: Epilogue) -> MatmulProblem:
    """The product of an input gradient, with the derivative of the layer below's activation as its epilogue."""
    return input_gradient(m, n, k, epilogue, aux=Spec(Layout(m, n, Order.ROW, -(-n // 128) * 128)))


BIAS, SUM = Epilogue.BIAS, Epilogue.BGRADA
PRODUCTS = (forward(256, 10, 512, BIAS), input_gradient(256, 512, 10), weight_gradient(10, 512, 256, SUM))


@pytest.mark.parametrize("problem", PRODUCTS)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_an_output_layer_is_taken(problem: MatmulProblem, dtype: DType) -> None:
    problem = replace(problem, dtype=dtype, d_dtype=dtype)
    assert supports(problem)
    assert supports(replace(problem, epilogue=Epilogue.NONE, c=problem.d))
    assert supports(replace(problem, compute=Compute.TF32))


@pytest.mark.parametrize("problem", PRODUCTS)
def test_what_is_refused(problem: MatmulProblem) -> None:
    c = problem.d
    for change in (
        {"dtype": DType.FLOAT64, "d_dtype": DType.FLOAT64},
        {"d_dtype": DType.FLOAT32},
        {"batch": 2},
        {"device_scalars": True},
        {"aux": c},
        {"c": across(*c.layout.shape)},
        {"d": across(*c.layout.shape)},
        {"epilogue": Epilogue.RELU},
        {"epilogue": Epilogue.BGRADB},
    ):
        assert not supports(replace(problem, **change)), change


@pytest.mark.parametrize("epilogue", DERIVATIVES)
def test_the_derivative_of_the_layer_below_is_taken(epilogue: Epilogue) -> None:
    problem = through(256, 512, 10, epilogue)
    assert supports(problem)
    assert supports(replace(problem, c=problem.d))
    assert supports(through(256, 1, 1, epilogue)), "of the three kernels the one that knows it"
    assert not supports(through(256, 512, 17, epilogue))
    assert not supports(replace(problem, aux=None))
    assert not supports(replace(problem, aux=across(256, 512)))
    column = through(256, 1, 10, epilogue)
    bits_down = replace(column, d=across(256, 1), aux=across(256, 1))
    assert not supports(bits_down), "a single column of bits may run down the rows"


def test_epilogues_are_those_of_the_kind() -> None:
    assert not supports(forward(256, 10, 512, Epilogue.BGRADA))
    assert not supports(input_gradient(256, 512, 10, Epilogue.BIAS))
    assert not supports(weight_gradient(10, 512, 256, Epilogue.BIAS))


@pytest.mark.parametrize("shape", [(256, 17, 512), (256, 512, 17), (17, 512, 256), (0, 10, 512), (256, 10, 0)])
def test_sizes_that_are_refused(shape: tuple[int, int, int]) -> None:
    assert not any(supports(make(*shape, Epilogue.NONE)) for make in (forward, input_gradient, weight_gradient))


def test_layouts_that_are_refused() -> None:
    assert not supports(problem_of(across(256, 512), across(512, 10)))
    assert not supports(problem_of(Spec(packed(256, 512)), Spec(packed(512, 10))))
    assert not supports(problem_of(across(256, 10), Spec(packed(10, 512))))
    assert not supports(problem_of(Spec(packed(10, 256)), Spec(packed(256, 512))))


def test_a_single_row_or_column_lies_either_way() -> None:
    column, row = Spec(packed(512, 1)), Spec(packed(1, 512))
    assert supports(problem_of(Spec(packed(256, 512)), column))
    assert supports(problem_of(row, Spec(packed(512, 264)), Epilogue.BGRADA)), "the transpose of a column"
    assert supports(problem_of(across(256, 1), Spec(packed(1, 512))))
    gaps = Spec(Layout(512, 1, Order.ROW, 3))
    assert not supports(problem_of(Spec(packed(256, 512)), gaps))


class _Recorded:
    """What a recorded launch had: the kernel's macros, grid, block and scratch memory."""

    def __init__(self, problem: MatmulProblem, monkeypatch: pytest.MonkeyPatch) -> None:
        def get(entry: Entry, macros: Macros, device: int) -> None:
            self.entry, self.macros = entry.name, dict(macros)

        monkeypatch.setattr(kernels, "get_kernel", get)
        monkeypatch.setattr(tiling, "device_info", lambda _: H200)
        made = NarrowPass(problem, 0)
        (self.grid, self.block), self.scratch_bytes, self.tickets = made.tiling, made.scratch_bytes, made.tickets
        self.blocks, self.threads = self.grid[0] * self.grid[1], self.block[0] * self.block[1]


def test_blocks_share_a_long_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _Recorded(weight_gradient(10, 512, 65536, SUM), monkeypatch)
    assert made.grid[1] > 1
    assert 132 <= made.blocks <= 2 * 132
    assert made.scratch_bytes == 4 * made.blocks * 10 * 64


@pytest.mark.parametrize(
    ("m", "n", "k", "rows"), [(512, 512, 10, "1"), (2048, 256, 1, "4"), (2049, 200, 16, "4"), (40_000, 512, 10, "4")]
)
def test_blocks_share_a_bias_gradient(m: int, n: int, k: int, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _Recorded(through(m, n, k, Epilogue.DGELU_BGRAD), monkeypatch)
    assert made.macros["ROWS"] == rows
    assert made.grid[1] > 1
    assert 60 <= made.blocks <= 132
    assert made.scratch_bytes == 4 * made.blocks * 32
    assert made.tickets == made.grid[0]


SIZES = (1, 2, 7, 8, 33, 256, 1000, 4096, 100_000, 3_000_000)


@pytest.mark.parametrize("width", [1, 3, MAX_WIDTH])
@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("second", SIZES)
def test_any_sizes_fit_the_hardware(width: int, first: int, second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for problem in (
        forward(first, width, second),
        input_gradient(first, second, width),
        through(first, second, width, Epilogue.DRELU_BGRAD),
        weight_gradient(width, first, second),
    ):
        made = _Recorded(problem, monkeypatch)
        x, y = made.block
        assert x & (x - 1) == y & (y - 1) == 0, "powers of two"
        assert made.threads <= 256
        assert made.grid[0] < 2**31
        assert made.grid[1] <= MAX_GRID_Y
        if made.entry != "narrow_k":
            assert made.threads % 32 == 0, "whole warps"
        if made.entry == "narrow_n":
            assert x >= int(made.macros["WIDTH"])
            assert x <= 32 or made.macros["ROWS"] == "1"
        if made.entry == "narrow_m":
            assert x <= 16
        if made.entry == "narrow_m" or problem.epilogue.has_bias_gradient:
            assert made.grid[1] == 1 or made.grid[0] <= MAX_TICKETS
