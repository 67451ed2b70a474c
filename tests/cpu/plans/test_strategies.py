"""Strategies of plans: which ones a problem allows, and that each is read back from a file as it was written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.plans.layers import leaves_a_pass
from lt_runtime.plans.strategies import (
    BackwardStrategy,
    ForwardStrategy,
    MadeBy,
    backward_strategies,
    dz_spec,
    forward_strategies,
    kept_spec,
    unchanged,
)
from lt_runtime.problem import (
    ACTIVATIONS,
    Activation,
    BackwardProblem,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    Saved,
    Spec,
)
from lt_runtime.store.keys import from_json, to_json

M, N, K = 8, 20, 12
X, W, Y = Spec(packed(M, K)), Spec(packed(N, K)), Spec(packed(M, N))
PADDED = Spec(Layout(M, N, Order.ROW, 24))
COLUMNS = Spec(packed(N, M).transposed)
NONE, BIAS = Epilogue.NONE, Epilogue.BIAS
NOBODY, KERNEL, EPILOGUE = MadeBy.NOBODY, MadeBy.KERNEL, MadeBy.EPILOGUE


def a_forward(activation: str = "gelu", **changes: object) -> ForwardProblem:
    problem = ForwardProblem(DType.FLOAT32, Compute.TF32, Activation(activation), X, W, Y, bias=256, backward=True)
    return replace(problem, **changes)  # type: ignore[arg-type]


def a_backward(**changes: object) -> BackwardProblem:
    own = Derivative(Activation("gelu"), Saved.PREACTIVATION, Y, db=256)
    problem = BackwardProblem(DType.BFLOAT16, Compute.FLOAT32, X, W, Y, own, X, W)
    return replace(problem, **changes)  # type: ignore[arg-type]


def below(activation: str, saved: Saved, **changes: object) -> Derivative:
    kept = {Saved.MASK: Spec(Layout(M, K, Order.ROW, 128)), Saved.PREACTIVATION: Spec(Layout(M, K, Order.ROW, 16))}
    spec = kept.get(saved, None if saved is Saved.NOTHING else X)
    return replace(Derivative(Activation(activation), saved, spec, db=256), **changes)  # type: ignore[arg-type]


def pairs(problem: ForwardProblem) -> list[tuple[Epilogue, Saved]]:
    return [(each.epilogue, each.saved) for each in forward_strategies(problem)]


def test_forward_that_is_trained() -> None:
    kept = Saved.PREACTIVATION
    assert pairs(a_forward()) == [(Epilogue.GELU_AUX_BIAS, kept), (BIAS, kept), (NONE, kept)]
    assert pairs(a_forward("relu")) == [
        (Epilogue.RELU_BIAS, Saved.OUTPUT),
        (Epilogue.RELU_AUX_BIAS, Saved.MASK),
        (BIAS, Saved.OUTPUT),
        (NONE, Saved.OUTPUT),
    ]
    assert pairs(a_forward("none")) == [(BIAS, Saved.NOTHING), (NONE, Saved.NOTHING)]
    assert pairs(a_forward("tanh")) == [(BIAS, Saved.OUTPUT), (NONE, Saved.OUTPUT)]
    assert pairs(a_forward("tanh", dropout=True)) == [(BIAS, kept), (NONE, kept)]
    assert pairs(a_forward("silu", bias=None)) == [(NONE, kept)]


def test_forward_of_inference_keeps_nothing() -> None:
    for activation in ACTIVATIONS:
        assert {saved for _, saved in pairs(a_forward(activation, backward=False))} == {Saved.NOTHING}
    assert pairs(a_forward(backward=False))[0] == (Epilogue.GELU_BIAS, Saved.NOTHING)
    asked_for = a_forward(backward=False, preactivation=PADDED)
    assert pairs(asked_for)[0] == (Epilogue.GELU_AUX_BIAS, Saved.NOTHING)
    assert kept_spec(asked_for, Saved.NOTHING) == PADDED


@pytest.mark.parametrize(
    "changes",
    [
        {"y": COLUMNS},  # with a column-major y, cuBLASLt's bias would run along the other axis
        {"preactivation": COLUMNS},
        {"x": Spec(packed(M, 0)), "w": Spec(packed(N, 0))},  # K is 0, so that cuBLASLt is not called
    ],
)
def test_what_the_library_cannot_fuse(changes: dict[str, Spec]) -> None:
    assert [epilogue for epilogue, _ in pairs(a_forward("relu", **changes))] == [NONE]


def test_dropout_and_nan_rule_out_activations_of_the_library() -> None:
    for changes in ({"dropout": True}, {"propagate_nan": True}):
        assert [epilogue for epilogue, _ in pairs(a_forward("relu", **changes))] == [BIAS, NONE]
    assert Epilogue.GELU_AUX_BIAS in [epilogue for epilogue, _ in pairs(a_forward(propagate_nan=True))]


def test_auxiliary_matrices_that_the_library_cannot_use() -> None:
    """cuBLASLt requires a leading dimension that is a multiple of 8, and an address that is a multiple of 16 bytes."""
    for spec in (Spec(Layout(M, N, Order.ROW, N + 1)), Spec(Layout(M, N, Order.ROW, 24), 8)):
        assert Epilogue.GELU_AUX_BIAS not in [epilogue for epilogue, _ in pairs(a_forward(preactivation=spec))]
        through = below("gelu", Saved.PREACTIVATION, saved_spec=spec)
        chained = a_backward(dtype=DType.FLOAT32, output_derivative=unchanged(None), input_derivative=through)
        assert makers(chained) == [(NOBODY, KERNEL, KERNEL)]


def test_auxiliary_matrices_that_a_kernel_of_ours_can_use() -> None:
    """Our kernel for ragged 16-bit rows takes any row-major auxiliary matrix."""
    spec = Spec(Layout(M, N, Order.ROW, N + 1), 2)
    asked = [epilogue for epilogue, _ in pairs(a_forward(dtype=DType.FLOAT16, preactivation=spec))]
    assert Epilogue.GELU_AUX_BIAS in asked
    chained = a_backward(
        output_derivative=unchanged(None), input_derivative=below("gelu", Saved.PREACTIVATION, saved_spec=spec)
    )
    below_it = (KERNEL, KERNEL), (EPILOGUE, KERNEL), (EPILOGUE, EPILOGUE)
    assert makers(chained) == [(NOBODY, *each) for each in below_it]
    whole = Spec(packed(M, 16)), Spec(packed(24, 16)), Spec(packed(M, 24)), Spec(Layout(M, 24, Order.ROW, 25))
    x, w, y, spec = whole
    problem = a_forward(dtype=DType.FLOAT16, x=x, w=w, y=y, preactivation=spec)
    assert Epilogue.GELU_AUX_BIAS not in [epilogue for epilogue, _ in pairs(problem)]


def test_a_preactivation_that_is_asked_for_is_what_is_kept() -> None:
    problem = a_forward("relu", preactivation=Spec(packed(M, N), 16))
    assert [saved for _, saved in pairs(problem)] == [Saved.OUTPUT, Saved.OUTPUT]
    assert all(leaves_a_pass(problem, strategy) for strategy in forward_strategies(problem))
    assert kept_spec(problem, Saved.OUTPUT) == problem.preactivation


def test_rows_of_what_is_kept_are_padded() -> None:
    mask, preactivation = (kept_spec(a_forward("relu"), saved) for saved in (Saved.MASK, Saved.PREACTIVATION))
    assert mask == Spec(Layout(M, N, Order.ROW, 128))
    assert preactivation == Spec(Layout(M, N, Order.ROW, 24))
    assert kept_spec(a_forward("relu"), Saved.OUTPUT) is None


@pytest.mark.parametrize(
    ("dtype", "y", "pitch"),
    [
        (DType.BFLOAT16, packed(M, 20), 20),
        (DType.FLOAT16, Layout(M, 20, Order.ROW, 21), 24),
        (DType.BFLOAT16, Layout(M, 20, Order.ROW, 32), 24),
        (DType.BFLOAT16, packed(20, M, order=Order.COLUMN), 20),
        (DType.FLOAT32, packed(1 << 12, 257), 257),
        (DType.FLOAT32, packed(1 << 12, 255), 256),
        (DType.FLOAT32, packed(1 << 13, 252), 256),
    ],
)
def test_what_the_library_does_not_write_is_kept_without_gaps(dtype: DType, y: Layout, pitch: int) -> None:
    problem = a_forward(dtype=dtype, y=Spec(y))
    assert kept_spec(problem, Saved.PREACTIVATION) == Spec(Layout(*y.shape, y.order, pitch))
    is_asked = Epilogue.GELU_AUX_BIAS in [epilogue for epilogue, _ in pairs(problem)]
    is_ours = dtype is not DType.FLOAT32 and y.order is Order.ROW
    assert is_asked == (is_ours or pitch % 8 == 0)


def test_what_is_left_to_our_kernel() -> None:
    left = {each.epilogue: leaves_a_pass(a_forward("relu"), each) for each in forward_strategies(a_forward("relu"))}
    assert left == {Epilogue.RELU_BIAS: False, Epilogue.RELU_AUX_BIAS: False, BIAS: True, NONE: True}
    linear = a_forward("none", bias=None)
    assert not leaves_a_pass(linear, ForwardStrategy(NONE, Saved.NOTHING))
    assert leaves_a_pass(replace(linear, dropout=True), ForwardStrategy(NONE, Saved.NOTHING))


def test_an_addend_is_the_products_or_our_kernels() -> None:
    def added(activation: str = "none", **changes: object) -> list[tuple[Epilogue, Saved, bool]]:
        strategies = forward_strategies(a_forward(activation, **{"addend": Y, **changes}))
        return [(each.epilogue, each.saved, each.product_adds) for each in strategies]

    nothing, kept = Saved.NOTHING, Saved.PREACTIVATION
    by_kernel = [(BIAS, nothing, False), (NONE, nothing, False)]
    assert added() == [(BIAS, nothing, True), *by_kernel]
    assert added(bias=None) == [(NONE, nothing, True), (NONE, nothing, False)]
    assert added(y=COLUMNS) == by_kernel[1:], "cuBLASLt's bias runs along rows"
    assert added(y=COLUMNS, addend=COLUMNS, bias=None) == [(NONE, nothing, True), (NONE, nothing, False)]
    for changes in ({"addend": COLUMNS}, {"dropout": True}, {"preactivation": Y}):
        assert added(**changes) == by_kernel
    # The library (cuBLASLt) would add the addend before the activation; y is then no longer the activation's output.
    for activation in ("relu", "sigmoid", "gelu"):
        assert added(activation) == [(BIAS, kept, False), (NONE, kept, False)]
    plain, fused = ForwardStrategy(BIAS, nothing), ForwardStrategy(BIAS, nothing, product_adds=True)
    assert to_json(plain) == {"epilogue": "bias", "saved": "nothing"}, "as plan files have it"
    assert [from_json(ForwardStrategy, to_json(each)) for each in (plain, fused)] == [plain, fused]
    assert [leaves_a_pass(a_forward("none", addend=Y), each) for each in (plain, fused)] == [True, False]


def makers(problem: BackwardProblem) -> list[tuple[MadeBy, MadeBy, MadeBy]]:
    return [
        (each.db, each.derivative, each.db_below) for each in backward_strategies(problem) if not each.dw_concurrent
    ]


def test_bias_gradient() -> None:
    assert makers(a_backward()) == [(KERNEL, NOBODY, NOBODY), (EPILOGUE, NOBODY, NOBODY)]
    kernel_alone = [(KERNEL, NOBODY, NOBODY)]
    # CuBLASLt's bias gradient overwrites its buffer instead of adding to it.
    assert makers(a_backward(accumulate=True)) == kernel_alone
    assert makers(a_backward(dw=None)) == kernel_alone
    assert makers(a_backward(dw=Spec(packed(K, N).transposed))) == kernel_alone
    assert makers(a_backward(output_derivative=unchanged(None))) == [(NOBODY, NOBODY, NOBODY)]
    columns = a_backward(output_derivative=unchanged(256), dy=COLUMNS)
    assert dz_spec(columns) == COLUMNS
    assert makers(columns) == kernel_alone


def test_through_the_layer_below() -> None:
    chained = a_backward(output_derivative=unchanged(None), input_derivative=below("gelu", Saved.PREACTIVATION))
    fused = [(NOBODY, EPILOGUE, KERNEL), (NOBODY, EPILOGUE, EPILOGUE)]
    assert makers(chained) == [(NOBODY, KERNEL, KERNEL), *fused]
    assert makers(replace(chained, input_derivative=below("relu", Saved.MASK))) == [(NOBODY, KERNEL, KERNEL), *fused]
    assert makers(replace(chained, accumulate=True)) == [(NOBODY, KERNEL, KERNEL), (NOBODY, EPILOGUE, KERNEL)]
    by_kernel = [(NOBODY, KERNEL, KERNEL)]
    alone = below("relu", Saved.OUTPUT), below("tanh", Saved.OUTPUT), below("gelu", Saved.PREACTIVATION, dropout=True)
    assert [makers(replace(chained, input_derivative=each)) for each in alone] == [by_kernel] * 3
    assert makers(replace(chained, dx=Spec(packed(K, M).transposed))) == by_kernel
    no_bias = below("gelu", Saved.PREACTIVATION, db=None)
    assert makers(replace(chained, input_derivative=no_bias)) == [(NOBODY, KERNEL, NOBODY), (NOBODY, EPILOGUE, NOBODY)]
    assert makers(replace(chained, input_derivative=below("none", Saved.NOTHING))) == [(NOBODY, NOBODY, KERNEL)]
    both = replace(chained, output_derivative=unchanged(256))
    assert len(makers(both)) == 6


@pytest.mark.parametrize("empty", ["M", "N", "K"])
def test_where_nothing_is_multiplied_the_library_makes_no_sum(empty: str) -> None:
    """If M, N or K is 0, cuBLASLt is not called, but the bias gradient must still be set to zero."""
    m, n, k = (0 if axis == empty else size for axis, size in (("M", M), ("N", N), ("K", 16)))
    x, w, y = (Spec(packed(*shape)) for shape in ((m, k), (n, k), (m, n)))
    kept = Spec(Layout(m, k, Order.ROW, 16))
    through = Derivative(Activation("gelu"), Saved.PREACTIVATION, kept, db=256)
    problem = a_backward(x=x, w=w, dy=y, dx=x, dw=w, output_derivative=unchanged(256), input_derivative=through)
    assert makers(problem) == [(KERNEL, KERNEL, KERNEL)]


def test_two_products_may_run_beside_each_other() -> None:
    assert [each.dw_concurrent for each in backward_strategies(a_backward())] == [False, False, True, True]
    for changes in ({"dw": None}, {"dx": None}):
        assert not any(each.dw_concurrent for each in backward_strategies(a_backward(**changes)))


@pytest.mark.parametrize("problem", [a_forward(), a_forward("relu"), a_forward("none")])
def test_a_forward_strategy_stands_in_a_file(problem: ForwardProblem) -> None:
    for strategy in forward_strategies(problem):
        assert from_json(ForwardStrategy, to_json(strategy)) == strategy


def test_a_backward_strategy_stands_in_a_file() -> None:
    for strategy in backward_strategies(a_backward(input_derivative=below("relu", Saved.MASK))):
        assert from_json(BackwardStrategy, to_json(strategy)) == strategy


@pytest.mark.parametrize("values", [{}, {"epilogue": "gelu"}, {"epilogue": "gelu", "saved": "all"}, {"db": "kernel"}])
def test_what_is_no_strategy(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"ForwardStrategy has the fields|is not a valid"):
        from_json(ForwardStrategy, values)
