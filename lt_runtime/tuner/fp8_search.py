"""Measures whether layers are faster in FP8: forward, backward and their casts, against the layers in their own type.

If an optimizer's update writes a weight in FP8, the weight's cast does not count, but the time to write it does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lt_runtime.errors import GpuError
from lt_runtime.fp8 import Fp8ChainProblem, Fp8Problem, Precision, Prologue
from lt_runtime.gpu.peaks import hardware
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.fp8 import ScalesPass
from lt_runtime.layout import packed
from lt_runtime.plans.cache import IN_FP8
from lt_runtime.plans.fp8 import Fp8BackwardPlan, Fp8ForwardPlan
from lt_runtime.plans.fp8_rule import expected_slower_in_fp8, update_us
from lt_runtime.problem import Activation, DType, Saved, Spec
from lt_runtime.products.plan import PassPlan, Plan
from lt_runtime.reference.fp8 import SLOT_WIDTH, fp8_slots
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.chain_operands import OperandSets, tensors_of
from lt_runtime.tuner.operands import NORMAL, Buffer, Memory
from lt_runtime.tuner.report import Decided
from lt_runtime.tuner.timing import Bench
from lt_runtime.tuner.two_ways import EndOperands, TwoWays, as_planned

_LEAST_GAIN = 0.08
"""Fraction of the time that FP8 must save, because a step also runs what is not measured.

For 1024 rows of 1024-4096-1024 FP8 saved 5 %, but the step was 3.5 % slower: in FP8 the optimizer needs one kernel for
the weights and another one for the biases (H200).
"""
_LAYERS = 2
"""The tolerance of results allows for the rounding errors of at most this many layers.

A tolerance for more layers would accept results of 0.
"""


def fp8_plans(problem: Fp8ChainProblem, device: int) -> list[tuple[int, Plan]]:
    """The plans of a step of layers in FP8: forward, backward and, if scales are delayed, the update of the scales.

    Returns:
        The plans in the order in which they run, each with the index of its layer.

    Raises:
        GpuError: the GPU lacks FP8 or the recipe's scales, or cuBLASLt has no algorithm for one of the products.
    """
    recipe, prologue, forwards, backwards = problem.recipe, None, list[tuple[int, Plan]](), list[tuple[int, Plan]]()
    precision = Precision(recipe, recipe.recipe == "current")
    for i, activation in enumerate(problem.activations):
        kept = Saved.NOTHING if activation.name == "none" else Saved.PREACTIVATION
        ((forward, backward),) = LayerChain.of_fp8(_layer_of(problem, i)).keeping({0: kept}).layers
        assert forward is not None
        assert backward is not None
        is_written, needs_dx = i < len(problem.written) and problem.written[i], backward.dx is not None
        of_forward = precision._replace(prologue=prologue, has_w8=is_written, needs_dx=needs_dx)
        prologue = Prologue(activation) if _defers(problem, i) else None
        if prologue is not None:
            forward = replace(forward, activation=Activation())
        forwards.append((i, Fp8ForwardPlan(Fp8Problem(forward, of_forward), device)))
        backwards.append((i, Fp8BackwardPlan(Fp8Problem(backward, precision), device)))
    if recipe.recipe != "delayed":
        return [*forwards, *reversed(backwards)]
    update = ScalesPass(3, recipe.history, recipe.headroom, len(problem.activations), device)
    return [*forwards, *reversed(backwards), (0, PassPlan(update, device))]


def _layer_of(problem: Fp8ChainProblem, i: int) -> Fp8ChainProblem:
    """The problem of layer `i` alone."""
    activations, biases = problem.activations[i : i + 1], problem.biases[i : i + 1]
    dims, dx = problem.dims[i : i + 2], problem.dx or i > 0
    return replace(problem, dims=dims, activations=activations, biases=biases, dx=dx)


def _defers(problem: Fp8ChainProblem, i: int) -> bool:
    """Whether layer `i` leaves its activation to the next layer's cast, as in `forward_of_several`."""
    is_last = i + 1 == len(problem.activations)
    return not (is_last or problem.recipe.by_rows) and problem.dtype is DType.BFLOAT16


class _Fp8Operands(EndOperands):
    """The operands of layers in their own type and in FP8, which share inputs and results.

    Tensors between the layers differ, because a layer in FP8 may leave its activation to the next one.
    """

    def __init__(self, memory: Memory, chain: LayerChain, problem: Fp8ChainProblem) -> None:
        super().__init__(memory, chain)
        outputs = {tensor.layer: buffer for tensor, buffer in self.buffers.items() if tensor.role == "output"}
        self._added = [_buffers_of(memory, _layer_of(problem, i)) for i in range(len(problem.activations))]
        for i, added in enumerate(self._added):
            if _defers(problem, i):
                added["kept"] = outputs[i]

    def call(self, layer: int, plan: Any, stream: int) -> Call:
        """See `ChainOperands`."""
        addresses = {name: each.address for name, each in self._added[layer].items()}
        state, kept = ("slots", "history"), ("x8", "w8")
        if isinstance(plan, PassPlan):  # the update of all scales; address 0 means that no step is skipped
            return Call((*[each[name].address for each in self._added for name in state], 0), stream)
        if not isinstance(plan, Fp8ForwardPlan | Fp8BackwardPlan):
            return super().call(layer, plan, stream)
        tensors = tensors_of(layer, plan.problem).items()
        addresses |= {name: self.buffers[each].address for name, each in tensors if each in self.buffers}
        if isinstance(plan, Fp8ForwardPlan):
            if plan.kept_spec is None:
                addresses["kept"] = 0
            names = *plan.problem.operands, *state, *kept, "cast_slots", "w8_given", "x8_given", "slots_of_x"
        else:
            addresses["saved"] = addresses["kept"]
            names = "dy", "cast_slots", *kept, "saved", "dx", "dw", "db", "dz", *state
        return Call(tuple(addresses.get(name, 0) for name in names), stream)


def _buffers_of(memory: Memory, layer: Fp8ChainProblem) -> dict[str, Buffer]:
    """The arrays that a layer has in FP8 only, by name; its scales and their history are as before the first step."""
    m, (k, n), recipe = layer.rows, layer.dims, layer.recipe
    e4m3, full = DType.FLOAT8_E4M3FN, DType.FLOAT32
    sizes: dict[str, tuple[int, int, DType]] = {
        "slots": (3, SLOT_WIDTH, full), "history": (3, recipe.history, full),
        "cast_slots": (2, k if recipe.by_rows else SLOT_WIDTH, full),
        "x8": (k, m, e4m3), "w8": (k, n, e4m3), "w8_given": (n, k, e4m3), "kept": (m, n, layer.dtype),
    }  # fmt: skip
    made = {name: Buffer(memory, Spec(packed(*size)), dtype) for name, (*size, dtype) in sizes.items()}
    memory.write(made["slots"].address, fp8_slots([each.value for each in recipe.dtypes]))
    memory.write(made["history"].address, np.zeros(sizes["history"][:2], np.float32))
    for name in ("w8", "w8_given"):
        made[name].fill(NORMAL, 0, 0)  # an update would have written them before
    return made


def decide_fp8(bench: Bench, problem: Fp8ChainProblem) -> Decided:
    """Measures whether layers are clearly faster in FP8; returns the result and the entry for the plan cache.

    The plans of the layers' products must have been chosen before. The results that are verified are those of plans
    that cast all weights; the tolerance allows for FP8's rounding.

    Raises:
        PlanError: cuBLASLt has no algorithm for the layers in their own type.
        MemoryError: the GPU has not enough memory for the operands.
    """
    device, casting = bench.device, list[tuple[int, Plan]]()
    chain, layers = as_planned(LayerChain.of_fp8(problem), device)
    operands = OperandSets(bench, chain, partial(_Fp8Operands, problem=problem))
    tolerance = problem.recipe.dtypes[2], min(len(problem.activations), _LAYERS)
    added_us = update_us(problem, hardware(device))
    ways = TwoWays(bench, problem, IN_FP8, {False: layers}, operands, casting, tolerance, added_us)
    try:
        ways.plans[True] = fp8_plans(problem, device)
        casting += fp8_plans(replace(problem, written=()), device)
    except GpuError as error:
        ways.reject(f"refused: {error}")
    return ways.decide(untuned=expected_slower_in_fp8(problem, device) is None, least_gain=_LEAST_GAIN)
