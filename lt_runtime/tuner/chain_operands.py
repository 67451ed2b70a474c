"""Buffers for the operands of a chain of layers. Problems that share an operand share its buffer.

With shared buffers the L2 cache holds the same operands as in a training step, which may decide which strategy is
faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.layout import packed
from lt_runtime.plans.cache import LayerProblem
from lt_runtime.plans.strategies import kept_spec
from lt_runtime.problem import DType, ForwardProblem, MLPProblem, Philox, Saved, Spec
from lt_runtime.products.plan import Plan
from lt_runtime.tuner.chain import LayerChain, saved_kinds
from lt_runtime.tuner.operands import BETWEEN, LATTICE, NORMAL, Buffer, Memory, Operands, operand_sets
from lt_runtime.tuner.timing import Bench, Launch, Name, Timing, take_times

_DROPOUT: Final = DropoutState.of(0.1, Philox(seed=1), device=0, stream=0)
_RESULTS: Final = ("y", "dx", "dw", "dz", "db", "db_below")

# Results of two strategies may differ, because they round at different points and because cuBLASLt approximates GELU.
# The constants below bound the norm of the difference of an output, relative to the norm of the output; a single
# element may differ by `_PEAK` times as much.
_HALF_UNIT: Final = {
    DType.FLOAT32: 2.0**-24,
    DType.FLOAT16: 2.0**-11,
    DType.BFLOAT16: 2.0**-8,
    DType.FLOAT8_E4M3FN: 2.0**-4,
    DType.FLOAT8_E5M2: 2.0**-3,
}
# Number of times that a value is rounded in each layer that it passes through.
_ROUNDINGS: Final = 2
# Number of layers that a value passes through in a part: one in the forward pass, and one in the backward pass.
_LAYERS: Final = 2
_APPROXIMATION: Final = 2e-3
_PEAK: Final = 32


class Tensor(NamedTuple):
    """Identifies an operand in a chain of layers. Operands of several problems with equal `Tensor`s share one buffer.

    Attributes:
        role: "output", "weight", "bias", "kept mask", "gradient" (of an output), "weight gradient" and the like.
        layer: index of the layer; -1 for the input of the chain, whose role is "output" too.
        scale: factor by which test data are multiplied.
    """

    role: str
    layer: int
    spec: Spec
    scale: float = 1.0

    @property
    def is_mask(self) -> bool:
        """Whether the elements are bits."""
        return self.role == f"kept {Saved.MASK.value}"


def tensors_of(layer: int, problem: LayerProblem, saved: Saved = Saved.NOTHING) -> dict[str, Tensor]:
    """The operands of a layer's problem, by name.

    Equal tensors connect the problems of a chain. A layer's y is the "output" that the layer above reads as x. The
    "gradient" of that output is dx of the layer above and dy of the layer itself.

    Args:
        saved: kind of the tensor that a forward problem saves.
    """
    found: dict[str, _Place] = {"x": ("output", layer - 1, problem.x), "w": ("weight", layer, problem.w)}
    if isinstance(problem, ForwardProblem):
        found |= {"bias": _vector("bias", layer, problem.y, problem.bias), "addend": ("addend", layer, problem.addend)}
        found |= {"y": ("output", layer, problem.y), "kept": (f"kept {saved.value}", layer, kept_spec(problem, saved))}
    else:
        found |= {"dy": ("gradient", layer, problem.dy), "dx": ("gradient", layer - 1, problem.dx)}
        found["dw"] = "weight gradient", layer, problem.dw
        found["dz"] = "gradient before the activation", layer, problem.dz
        derivatives = [("", layer, problem.dy, problem.output_derivative)]
        if problem.input_derivative is not None and problem.dx is not None:
            derivatives.append(("_below", layer - 1, problem.x, problem.input_derivative))
        for suffix, at, output, derivative in derivatives:
            role = "output" if derivative.saved is Saved.OUTPUT else f"kept {derivative.saved.value}"
            found[f"saved{suffix}"] = role, at, derivative.saved_spec
            found[f"db{suffix}"] = _vector("bias gradient", at, output, derivative.db)
    # With this scale of the weights, x · wᵀ has about the magnitude of x. The bias has the same scale.
    scales = dict.fromkeys(("w", "bias"), 2.0 ** -round(math.log2(max(problem.w.layout.cols, 1)) / 2))
    return {name: Tensor(role, at, spec, scales.get(name, 1.0)) for name, (role, at, spec) in found.items() if spec}


_Place: TypeAlias = tuple[str, int, Spec | None]
Placed: TypeAlias = Sequence[tuple[int, Plan]]
"""Plans that run one after the other, each with the index of its layer in the chain."""


def _vector(role: str, layer: int, matrix: Spec, alignment: int | None) -> _Place:
    """The place of a vector with one element for each column of a matrix; its spec is None if `alignment` is None."""
    return role, layer, None if alignment is None else Spec(packed(1, matrix.layout.cols), alignment)


def _added_to(problem: LayerProblem) -> tuple[str, ...]:
    """Names the outputs that a problem adds to the old values in their buffers (accumulation)."""
    if isinstance(problem, ForwardProblem):
        return ()
    return (("dw", "db", "db_below") if problem.accumulate else ()) + (("dx",) if problem.accumulate_dx else ())


class ChainOperands(Operands):
    """One buffer set: all operands of a chain, including the saved tensors of all strategies.

    Args:
        chain: a chain without empty problems.
    """

    def __init__(self, memory: Memory, chain: LayerChain) -> None:
        super().__init__()
        self._results: dict[str, Tensor] = {}
        for layer, problem in chain.runs:
            read = _added_to(problem)
            tensors = (tensors_of(layer, problem, saved).items() for saved in saved_kinds(problem))
            for name, tensor in itertools.chain(*tensors):
                if tensor not in self.buffers:
                    dtype = None if tensor.is_mask else problem.dtype
                    self.buffers[tensor] = Buffer(memory, tensor.spec, dtype, scale=tensor.scale)
                if name in _RESULTS and self._results.setdefault(name, tensor) != tensor:
                    self._results[f"{name} of layer {tensor.layer}"] = tensor
                if name in (*_RESULTS, "kept") and name not in read:
                    self.outputs.append(tensor)

    def prepare(self) -> None:
        """Fills inputs with data for which all strategies compute pre-activations of equal sign, and outputs with NaN.

        All sums of the forward pass are exact. The bias is chosen so that no pre-activation is 0, where ReLU's
        derivative is a convention: our kernel uses 0, cuBLASLt's mask 1. Nor can rounding the product change the sign
        of its sum with the bias.
        """
        for number, (tensor, buffer) in enumerate(self.buffers.items()):
            buffer.fill(BETWEEN if tensor.role == "bias" else LATTICE, number, 0)
        self.poison()

    def call(self, layer: int, plan: Plan, stream: int) -> Call:
        """The call that runs a plan of one of the chain's layers on these operands."""
        problem = plan.problem
        if isinstance(problem, MLPProblem):
            return Call(self._addresses_of_mlp(problem), stream)
        tensors = tensors_of(layer, problem, getattr(plan.strategy, "saved", Saved.NOTHING))
        addresses = (self.buffers[tensors[name]].address if name in tensors else 0 for name in problem.operands)
        is_forward = isinstance(problem, ForwardProblem)
        dropping = (problem, None) if is_forward else (problem.output_derivative, problem.input_derivative)
        own, below = (_DROPOUT if each is not None and each.dropout else None for each in dropping)
        return Call(tuple(addresses), stream, dropouts=(own, below))

    def _addresses_of_mlp(self, problem: MLPProblem) -> tuple[int, ...]:
        layers, goes_back = range(len(problem.biases)), problem.backward
        places = [("output", -1), ("gradient" if goes_back else "output", layers[-1])]
        kinds = [("weight", "bias"), *([("weight gradient", "bias gradient")] if goes_back else [])]
        places += [(role, layer) for roles in kinds for layer in layers for role in roles]
        found = {(tensor.role, tensor.layer): buffer.address for tensor, buffer in self.buffers.items()}
        return tuple(found.get(place, 0) for place in places)

    def results(self) -> dict[str, Buffer]:
        """Copies of the chain's results, by operand name; the second of two equal names has its layer added."""
        return {name: self.buffers[tensor].snapshot() for name, tensor in self._results.items()}


class OperandSets:
    """Buffer sets of a chain, used in turn; `buffer_sets` says how many.

    Args:
        make: function that makes one buffer set; None for `ChainOperands`.

    Attributes:
        measured: number of contenders that have been timed on these sets.
    """

    def __init__(
        self, bench: Bench, chain: LayerChain, make: Callable[[Memory, LayerChain], ChainOperands] | None = None
    ) -> None:
        self._clock = bench.clock
        self._sets = operand_sets(lambda: (make or ChainOperands)(bench.memory, chain), bench.device)
        self.measured = 0

    def take_times(
        self, contenders: Mapping[Name, Placed], budget_s: float, rounds: int, **options: Any
    ) -> dict[Name, Timing]:
        """Times plans against each other; arguments and errors are those of `timing.take_times`."""
        launches = {name: self._launch(plans) for name, plans in contenders.items()}
        timings = take_times(launches, self._clock, len(self._sets), budget_s, rounds, **options)
        self.measured += len(timings)
        return timings

    def _launch(self, plans: Placed) -> Launch:
        stream = self._clock.stream
        calls = [[(plan, each.call(layer, plan, stream)) for layer, plan in plans] for each in self._sets]

        def launch(number: int, _: int) -> None:
            for plan, call in calls[number]:
                plan.run(call)

        return launch

    def results(self, plans: Placed) -> dict[str, Buffer]:
        """Runs plans on the test data that `prepare` writes; returns copies of their results.

        The plans run in a graph, because dw and dx are computed concurrently only in a graph.
        """
        launch = self._launch(plans)
        # Each plan runs once before the capture, because loading a kernel and allocating cannot be captured.
        launch(0, self._clock.stream)
        self._sets[0].prepare()
        with self._clock.capture(lambda stream: launch(0, stream)) as graph:
            self._clock.replay([graph])
        found = self._sets[0].results()
        self._sets[0].fill(NORMAL, 0)
        return found


def disagreement(
    actual: Mapping[str, Buffer], expected: Mapping[str, Buffer], dtype: DType, layers: int = _LAYERS
) -> tuple[str, str] | None:
    """Compares the outputs of two strategies for the same data.

    Args:
        layers: number of layers that the values pass through, each of which may round differently.

    Returns:
        The name of the first output that differs, and a sentence that says by how much; None if all outputs agree.
    """
    tolerance = _APPROXIMATION + _ROUNDINGS * layers * _HALF_UNIT[dtype]
    for name, wanted in expected.items():
        size, found = math.prod(wanted.shape), actual[name].compare(wanted)
        norm, off = (math.sqrt(squares / size) for squares in (found.wanted_squares, found.error_squares))
        if not off <= tolerance * norm:  # the negated comparison is also true for NaN
            return name, f"{name} is off by {off:.3g}, its elements being about {norm:.3g}"
        peak = _PEAK * tolerance
        bad = actual[name].compare(wanted, limit=peak * norm, relative=peak).bad
        if bad:
            return name, f"{bad} of {size} elements of {name} are off"
    return None
