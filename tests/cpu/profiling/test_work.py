"""FLOPs and bytes of operations, compared with the sizes of their arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.over_fake_gpu import own

M, N, K = 32, 64, 128


@pytest.fixture
def told(gpu: FakeGpu) -> Iterator[list[Any]]:
    from lt_runtime import ranges

    seen: list[Any] = []
    ranges.watchers.append(seen.append)
    yield seen
    ranges.watchers.remove(seen.append)
    gpu.synchronize_all()


def work_of(ran: Any) -> Any:
    return own("profiling.work").work_of(ran)


def arrays(gpu: FakeGpu, *shapes: tuple[int, ...]) -> list[Any]:
    return [gpu.cp.asarray(np.ones(shape, np.float32)) for shape in shapes]


def test_a_product_moves_each_operand_once(gpu: FakeGpu, told: list[Any]) -> None:
    a, b = arrays(gpu, (M, K), (K, N))
    gpu.lt.matmul(a, b)
    (known,) = told
    work = work_of(known)
    assert (work.flops, work.kind, work.strategy, work.copies) == (2 * M * N * K, "float32", "", False)
    assert work.bytes == 4 * (M * K + K * N + M * N)


def test_a_pass_over_a_batch_moves_each_of_its_matrices(gpu: FakeGpu, told: list[Any]) -> None:
    a, b = arrays(gpu, (3, M, K), (3, K, N))
    gpu.lt.matmul(a, b, epilogue="gelu")  # our pass applies GELU: the library's is not accurate enough in FP32
    (known,) = told
    assert work_of(known).bytes == 4 * 3 * (M * K + K * N + 3 * M * N)


@pytest.mark.parametrize(
    ("activation", "kept", "fused"), [("gelu", 1, None), ("relu", 0, "RELU_BIAS")], ids=["gelu", "relu"]
)
def test_a_pass_after_a_product_reads_and_writes_again(
    gpu: FakeGpu, told: list[Any], activation: str, kept: int, fused: str | None
) -> None:
    from lt_runtime.errors import PlanError
    from lt_runtime.plans.cache import plan_for, strategies_of

    x, w, bias = arrays(gpu, (M, K), (N, K), (N,))
    gpu.lt.linear_fwd(x, w, bias, activation=activation)
    (known,) = told
    least = 4 * (M * K + N * K + N + M * N)
    found = {}
    for strategy in strategies_of(known.plan.problem):
        with contextlib.suppress(PlanError):  # in FP32 our pass applies GELU: the library's is not accurate enough
            plan = plan_for(known.plan.problem, 0, strategy)
            found[strategy.epilogue.name] = work_of(replace(known, plan=plan)).bytes
    matrix = 4 * M * N
    if fused is not None:
        assert found[fused] == least
    # cuBLASLt writes the product to y or to the saved tensor; our kernel then reads the product and writes y.
    assert found["BIAS"] == least + 2 * matrix
    # Our kernel after the product also reads the bias, and writes the saved tensor as well as y.
    assert found["NONE"] == least + (2 + kept) * matrix


def test_backward_counts_its_passes(gpu: FakeGpu, told: list[Any]) -> None:
    x, w, bias, dy = arrays(gpu, (M, K), (N, K), (N,), (M, N))
    _, ctx = gpu.lt.linear_fwd(x, w, bias, activation="gelu")
    gpu.lt.linear_bwd(dy, ctx)
    work = work_of(told[-1])
    products = 2 * (M * N + M * K + N * K)
    # Our kernel before the products reads dy and the saved tensor, and writes dz and the bias gradient.
    passes = 3 * M * N + N
    assert work.flops == 4 * M * N * K
    assert work.bytes == 4 * (products + passes)
    assert work.strategy.startswith("db by kernel")


def test_a_mask_has_a_bit_for_each_element(gpu: FakeGpu) -> None:
    problem, spec = own("problem"), own("problem").Spec(own("layout").packed(M, 128))
    moved = {}
    for saved in (problem.Saved.MASK, problem.Saved.OUTPUT):
        derivative = problem.Derivative(problem.Activation("relu"), saved, spec)
        moved[saved.value] = (
            own("kernels.epilogue").BackwardPass(problem.DType.FLOAT32, derivative, spec, spec, 0).moved
        )
    assert moved == {"mask": M * 128 * 8 + M * 128 // 8, "output": M * 128 * 12}


def test_copies_that_a_plan_chose_count(gpu: FakeGpu, told: list[Any]) -> None:
    from lt_runtime.products.padded import PaddedPlan
    from lt_runtime.products.product import ProductPlan

    m, n, k = 128, 64, 127
    a, b = (gpu.cp.asarray(np.ones(shape, np.float16)) for shape in ((m, k), (k, n)))
    gpu.lt.matmul(a, b)
    (known,) = told
    plan = ProductPlan(known.plan.problem, 0, lambda problem, device: PaddedPlan(problem, device))
    work = work_of(replace(known, plan=plan))
    assert work.copies
    assert "copies for d" in work.strategy
    whole = 128  # in the padded copies, rows of K elements are 128 bytes long
    product = 2 * (m * whole + whole * n + m * n)
    assert work.bytes == product + 2 * (m * k + m * whole) + 2 * (k * n + whole * n)


def test_gated_activations_move_their_arrays(gpu: FakeGpu, told: list[Any]) -> None:
    h, dy = arrays(gpu, (M, 2 * N), (M, N))
    _, ctx = gpu.lt.gated_fwd(h, out=arrays(gpu, (M, N))[0])
    gpu.lt.gated_bwd(dy, ctx, out=h)
    gpu.lt.gated_bwd(dy, ctx, remake_y=True, out=h)
    assert [work_of(each).bytes for each in told] == [4 * 3 * M * N, 4 * 5 * M * N, 4 * 6 * M * N]


def test_losses_and_dropout_move_their_arrays(gpu: FakeGpu, told: list[Any]) -> None:
    prediction, target = arrays(gpu, (M, N), (M, N))
    gpu.lt.mse_loss(prediction, target, out_gradient=arrays(gpu, (M, N))[0], out_loss=arrays(gpu, ())[0])
    gpu.lt.dropout(prediction, 0.5, rng=gpu.lt.Philox(1), out=target)
    loss, dropout = map(work_of, told)
    assert loss.bytes == 4 * (3 * M * N + 1)
    assert dropout.bytes == 4 * 2 * M * N


def test_an_update_moves_values_gradients_and_moments(gpu: FakeGpu, told: list[Any]) -> None:
    model = gpu.lt.MLP((K, N), dtype="bfloat16", device="cuda")
    optimizer = gpu.lt.AdamW(model.parameters())
    optimizer.step()
    (ran,) = told
    size = K * N + N
    # Bytes of an update: BF16 gradients and copies; FP32 masters and two moments, read and written.
    assert work_of(ran).bytes == size * (2 + 2 + 2 * 4 + 2 * 2 * 4)
