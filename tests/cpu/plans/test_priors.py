"""The order in which unmeasured strategies are tried: first the choice of a table, then the rest by a fixed rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.plans import priors
from lt_runtime.plans.strategies import (
    BackwardStrategy,
    ForwardStrategy,
    MadeBy,
    backward_strategies,
    forward_strategies,
)
from lt_runtime.problem import Activation, Compute, DType, Saved
from lt_runtime.store.keys import from_json
from lt_runtime.tuner.chain import LayerChain, derivative_of
from tests.support.chain_problems import backward_of, forward_of

EPILOGUE, KERNEL, NOBODY = MadeBy.EPILOGUE, MadeBy.KERNEL, MadeBy.NOBODY
AUX = {"epilogue": "gelu_aux_bias", "saved": "preactivation"}
BIAS = {"epilogue": "bias", "saved": "preactivation"}
FUSED = {"db": "epilogue", "derivative": "epilogue", "db_below": "kernel", "dw_concurrent": True}


def gelu(dtype: DType = DType.BFLOAT16) -> LayerChain:
    return LayerChain.of_mlp(256, (64, 512, 64), Activation("gelu"), dtype, Compute.FLOAT32, input_gradient=True)


GELU = gelu()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {"forward": {}, "backward": {}}
    monkeypatch.setattr(priors, "device_info", lambda _: DeviceInfo(0, "", 90, multiprocessors=132, memory=0))
    monkeypatch.setattr(priors, "_nearest", lambda _: made)
    return made


def first_forward(chain: LayerChain, **changes: Any) -> ForwardStrategy:
    problem = replace(forward_of(chain), **changes)
    ordered = list(priors.forward_priors(problem, 0))
    assert sorted(map(str, ordered)) == sorted(map(str, forward_strategies(problem)))
    return ordered[0]


def first_backward(chain: LayerChain, index: int = 1, **changes: Any) -> BackwardStrategy:
    problem = replace(backward_of(chain, index), **changes)
    ordered = list(priors.backward_priors(problem, 0))
    assert sorted(map(str, ordered)) == sorted(map(str, backward_strategies(problem)))
    return ordered[0]


def test_without_a_table_our_kernels_do_what_is_kept_and_derived(table: dict[str, Any]) -> None:
    assert first_forward(GELU) == ForwardStrategy(Epilogue.BIAS, Saved.PREACTIVATION)
    assert first_forward(GELU, backward=False) == ForwardStrategy(Epilogue.GELU_BIAS, Saved.NOTHING)
    assert first_backward(GELU) == BackwardStrategy(KERNEL, KERNEL, KERNEL)


@pytest.mark.parametrize("backward", [True, False])
def test_with_few_ragged_columns_the_product_applies_no_activation(table: dict[str, Any], backward: bool) -> None:
    chain = LayerChain.of_mlp(1000, (333, 5), Activation("gelu"), DType.BFLOAT16, Compute.FLOAT32)
    assert first_forward(chain, backward=backward).epilogue is Epilogue.BIAS


def test_the_product_adds_an_addend_whatever_the_table_says(table: dict[str, Any]) -> None:
    changes = {"activation": Activation(), "addend": forward_of(GELU).y}
    table["forward"]["bf16 none"] = {"epilogue": "bias", "saved": "nothing"}
    assert first_forward(GELU, **changes) == ForwardStrategy(Epilogue.BIAS, Saved.NOTHING, product_adds=True)
    assert first_forward(GELU, **changes, dropout=True) == ForwardStrategy(Epilogue.BIAS, Saved.NOTHING)


def test_the_table_comes_first_where_its_strategy_is_allowed(table: dict[str, Any]) -> None:
    table["forward"]["bf16 gelu"] = AUX
    assert first_forward(GELU).epilogue is Epilogue.GELU_AUX_BIAS
    assert first_forward(GELU, bias=None).epilogue is Epilogue.GELU_AUX
    assert first_forward(GELU, backward=False).epilogue is Epilogue.GELU_BIAS
    assert first_forward(GELU, dropout=True).epilogue is Epilogue.BIAS
    half = gelu(DType.FLOAT16)
    assert first_forward(half).epilogue is Epilogue.GELU_AUX_BIAS, "16-bit types move the same bytes"
    table["forward"]["fp32 gelu"] = AUX
    assert first_forward(gelu(DType.FLOAT32)).epilogue is Epilogue.GELU_AUX_BIAS


@pytest.mark.parametrize(("feature", "size"), [("output_bytes", 256 * 512 * 2), ("inner", 64), ("rows", 256)])
@pytest.mark.parametrize("more", [0, 1])
def test_limits_are_on_the_problem_s_sizes(table: dict[str, Any], feature: str, size: int, more: int) -> None:
    table["forward"]["bf16 gelu"] = {"feature": feature, "below": size + more, "then": AUX, "otherwise": BIAS}
    assert first_forward(GELU).epilogue is (Epilogue.GELU_AUX_BIAS if more else Epilogue.BIAS)


def test_backward_s_sizes_are_those_of_the_input_gradient() -> None:
    expected = {"output_bytes": 256 * 512 * 2, "inner": 64, "rows": 256, "weights": 512 * 64}
    expected |= {"least": 64, "whole": 1}
    assert priors.backward_features(backward_of(GELU, 1)) == expected


def test_backward_takes_of_the_table_what_the_problem_has(table: dict[str, Any]) -> None:
    table["backward"]["bf16 gelu preactivation"] = FUSED
    assert first_backward(GELU) == BackwardStrategy(EPILOGUE, EPILOGUE, KERNEL, dw_concurrent=True)
    problem = backward_of(GELU, 1)
    assert problem.input_derivative is not None
    without = first_backward(GELU, input_derivative=replace(problem.input_derivative, db=None))
    assert without == BackwardStrategy(EPILOGUE, EPILOGUE, NOBODY, dw_concurrent=True)
    assert not first_backward(GELU, dw=None).dw_concurrent, "there is nothing to be beside"
    kept = first_backward(GELU, accumulate=True)
    assert kept == BackwardStrategy(KERNEL, EPILOGUE, KERNEL, dw_concurrent=True), (
        "the library cannot add to a bias gradient"
    )


def test_a_bias_gradient_is_our_kernel_s_where_it_reads_dy_in_any_case(table: dict[str, Any]) -> None:
    table["backward"]["bf16 none nothing"] = dict.fromkeys(FUSED, "nobody") | {"db": "epilogue", "dw_concurrent": False}
    assert first_backward(GELU, input_derivative=None).db is EPILOGUE
    own = derivative_of(forward_of(GELU))
    assert first_backward(GELU, 0, output_derivative=own, input_derivative=None).db is KERNEL


def test_the_library_sums_no_rows_that_are_no_whole_octets(table: dict[str, Any]) -> None:
    table["backward"]["bf16 gelu preactivation"] = FUSED
    assert first_backward(_ragged(1 << 16)).db is KERNEL, "too large for our kernel for ragged rows"
    assert first_backward(GELU).db is EPILOGUE


def _ragged(rows: int) -> LayerChain:
    return LayerChain.of_mlp(
        rows, (64, 511, 64), Activation("gelu"), DType.BFLOAT16, Compute.FLOAT32, input_gradient=True
    )


def test_ragged_rows_have_trees_of_their_own(table: dict[str, Any]) -> None:
    table["backward"]["bf16 gelu preactivation"] = dict.fromkeys(FUSED, "kernel") | {"dw_concurrent": False}
    assert first_backward(_ragged(256)) == BackwardStrategy(KERNEL, KERNEL, KERNEL), "for want of a tree of their own"
    table["backward"]["ragged bf16 gelu preactivation"] = FUSED
    assert first_backward(_ragged(256)) == BackwardStrategy(EPILOGUE, EPILOGUE, KERNEL, dw_concurrent=True)
    assert first_backward(_ragged(1 << 16)).derivative is KERNEL, "too large for our kernel for ragged rows"
    own = derivative_of(forward_of(_ragged(256)))
    assert first_backward(_ragged(256), output_derivative=own).db is KERNEL, "which reads dy in any case"


@pytest.mark.parametrize(("columns", "epilogue"), [(7, Epilogue.BIAS), (9, Epilogue.GELU_AUX_BIAS)])
def test_few_ragged_columns_have_an_activation_of_their_own_pass(
    table: dict[str, Any], columns: int, epilogue: Epilogue
) -> None:
    table["forward"]["bf16 gelu"] = AUX
    few = LayerChain.of_mlp(256, (63, columns, 63), Activation("gelu"), DType.BFLOAT16, Compute.FLOAT32)
    assert first_forward(few).epilogue is epilogue


def test_backward_that_is_products_alone_has_a_tree_of_its_own(table: dict[str, Any]) -> None:
    table["backward"]["bf16 products"] = dict.fromkeys(FUSED, "nobody") | {"dw_concurrent": True}
    assert first_backward(GELU, 0).dw_concurrent
    assert not first_backward(GELU, 1).dw_concurrent


@pytest.mark.parametrize("activation", ["silu", "gelu_erf", "leaky_relu", "sigmoid", "tanh"])
@pytest.mark.parametrize("compute", [Compute.TF32, Compute.FLOAT32])
def test_other_activations_share_a_tree_and_take_the_nearest_offered_strategy(
    table: dict[str, Any], activation: str, compute: Compute
) -> None:
    table["backward"]["fp32 other" if compute is Compute.FLOAT32 else "tf32 other"] = FUSED
    table["backward"][f"tf32 {activation}"] = {**FUSED, "dw_concurrent": False}
    chain = LayerChain.of_mlp(256, (64, 512, 64), Activation(activation), DType.FLOAT32, compute, input_gradient=True)
    assert first_backward(chain) == BackwardStrategy(EPILOGUE, KERNEL, KERNEL, dw_concurrent=True)


def test_the_derivative_of_tall_products_with_four_byte_elements_is_our_kernel_s(table: dict[str, Any]) -> None:
    table["backward"]["tf32 gelu preactivation"] = FUSED

    def chain(rows: int) -> LayerChain:
        return LayerChain.of_mlp(
            rows, (64, 40, 64), Activation("gelu"), DType.FLOAT32, Compute.TF32, input_gradient=True
        )

    assert first_backward(chain(1 << 14)).derivative is EPILOGUE
    assert first_backward(chain(1 << 15)).derivative is KERNEL


def test_the_nearest_architecture_s_table_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for capability in (80, 90):
        (tmp_path / f"priors_sm{capability}.json").write_text(json.dumps({"of": capability}))
    monkeypatch.setattr(priors, "__file__", str(tmp_path / "priors.py"))
    nearest = priors._nearest.__wrapped__
    assert [nearest(capability)["of"] for capability in (75, 80, 89, 90, 120)] == [80, 80, 90, 90, 90]


@pytest.mark.parametrize(
    "file", sorted(Path(priors.__file__).parent.glob("priors_sm*.json")), ids=lambda file: file.name
)
def test_shipped_tables_are_of_known_strategies_and_say_where_they_come_from(file: Path) -> None:
    shipped = json.loads(file.read_text())
    assert shipped["source"]
    for part, kind in (("forward", ForwardStrategy), ("backward", BackwardStrategy)):
        for tree in shipped[part].values():
            for leaf in leaves(tree):
                from_json(kind, leaf)


def leaves(tree: Any) -> list[Any]:
    if "feature" not in tree:
        return [tree]
    assert set(tree) == {"feature", "below", "then", "otherwise"}
    assert tree["feature"] in priors.forward_features(forward_of(GELU))
    return leaves(tree["then"]) + leaves(tree["otherwise"])
