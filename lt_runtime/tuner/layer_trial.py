"""The operands of a layer's forward and backward pass in memory of their own, filled with data to try splits on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.layout import packed
from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.plans.strategies import kept_spec
from lt_runtime.problem import (
    BackwardProblem,
    Derivative,
    DType,
    ForwardProblem,
    Philox,
    Saved,
    Spec,
    keep_threshold,
)
from lt_runtime.tuner.alternatives import Half
from lt_runtime.tuner.links import SIDES, Link, Side, saved_kinds
from lt_runtime.tuner.trial import BETWEEN, LATTICE, Buffer, Data, decode, mask_for, mask_in_bytes, values_for

_DROPOUT: Final = DropoutState(keep_threshold(0.1), Philox(seed=1))
_DB: Final[Mapping[Side, str]] = {"own": "db", "through": "db_below"}
_OUTPUTS: Final = ("y", "dx", "dw", "dz", "db", "db_below")

# Two splits differ by how often they round, and by the library's GELU. That is what the whole of an output may be off,
# relative to its norm; a single element may be off a good deal more.
_HALF_UNIT: Final = {DType.FLOAT32: 2.0**-24, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}
_ROUNDINGS: Final = 4
_APPROXIMATION: Final = 2e-3
_PEAK: Final = 32


class LayerTrial:
    """All operands of one link: read, written and judged as a whole.

    The forward pass's output, and what it keeps, are what the backward pass reads.

    Args:
        xp: CuPy with the device and the stream current that everything is to happen on; or NumPy.
        link: none of its extents is 0.
        shared: operands that lie in memory of others' already, by name.

    Attributes:
        outputs: names of what the passes are for.
    """

    def __init__(self, xp: Any, link: Link, shared: Mapping[str, Buffer] | None = None) -> None:
        self._xp, self._link, self._shared = xp, link, shared or {}
        self._dtype = link.problems[0].dtype
        self._buffers: dict[str, Buffer] = {}
        self._masks: set[str] = set()
        self._scales: dict[str, float] = {}
        self._x, self._w = ("y", "w above") if link.side == "through" else ("x", "w")
        if link.forward is not None:
            self._add_forward(link.forward)
        if link.backward is not None:
            self._add_backward(link.backward, link.side)
        is_made = {"y": link.forward is not None}
        self.outputs = tuple(name for name in _OUTPUTS if name in self._buffers and is_made.get(name, True))

    def _add_forward(self, problem: ForwardProblem) -> None:
        for name, spec in (("x", problem.x), ("y", problem.y)):
            self._add(name, spec)
        self._add_weight("w", problem.w)
        if problem.bias is not None:
            self._add_vector("bias", problem.y.layout.cols, problem.bias)
            self._scales["bias"] = self._scales["w"]
        for saved in saved_kinds(problem):
            kept = kept_spec(problem, saved)
            if kept is not None:
                self._add(f"kept {saved.value}", kept, is_mask=saved is Saved.MASK)

    def _add_backward(self, problem: BackwardProblem, linked: Side | None) -> None:
        if self._x not in self._buffers:
            self._add(self._x, problem.x)
        if self._w not in self._buffers:
            self._add_weight(self._w, problem.w)
        for name, spec in (("dy", problem.dy), ("dx", problem.dx), ("dw", problem.dw), ("dz", problem.dz)):
            if spec is not None:
                self._add(name, spec)
        for side in SIDES:
            derivative: Derivative | None = getattr(problem, side)
            if derivative is not None and (side == "own" or problem.dx is not None):
                cols = problem.dy.layout.cols if side == "own" else problem.x.layout.cols
                self._add_derivative(side, derivative, cols, is_linked=side == linked)

    def _add_derivative(self, side: Side, derivative: Derivative, cols: int, *, is_linked: bool) -> None:
        if derivative.db is not None:
            self._add_vector(_DB[side], cols, derivative.db)
        if derivative.saved_spec is not None and not is_linked:
            self._add(f"saved {side}", derivative.saved_spec, is_mask=derivative.saved is Saved.MASK)

    def _add(self, name: str, spec: Spec, *, is_mask: bool = False) -> None:
        if is_mask:
            self._masks.add(name)
        if name in self._shared:
            self._buffers[name] = self._shared[name]
        elif is_mask:
            self._buffers[name] = Buffer(self._xp, mask_in_bytes(spec), 1, 1)
        else:
            self._buffers[name] = Buffer(self._xp, spec, self._dtype.itemsize, 1)

    def _add_vector(self, name: str, size: int, alignment: int) -> None:
        self._add(name, Spec(packed(1, size), alignment))

    def _add_weight(self, name: str, spec: Spec) -> None:
        """Scaled by a power of two, so that products are about as large as what is multiplied."""
        self._add(name, spec)
        self._scales[name] = 2.0 ** -round(math.log2(spec.layout.cols) / 2)

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """The operands by name: x, w, bias, y and what is kept of a forward pass; all that a backward pass has."""
        return self._buffers

    @property
    def size(self) -> int:
        """Bytes of all operands that are not shared."""
        return sum(buffer.flat.nbytes for name, buffer in self._buffers.items() if name not in self._shared)

    def fill(self, data: Data, seed: int) -> None:
        """Puts data into every operand, those that are to be written included."""
        for number, name in enumerate(self._buffers):
            self._fill(number, name, data, seed)

    def _fill(self, number: int, name: str, data: Data, seed: int) -> None:
        if name in self._masks:
            self._buffers[name].fill(mask_for(data, number, seed))
        else:
            scale = self._scales.get(name, 1.0)
            self._buffers[name].fill(values_for(data, self._dtype, number, seed, scale))

    def prepare(self) -> None:
        """Puts in data of which forward's sums are exact, so that no split gets another sign; NaN into what is written.

        The bias keeps pre-activations from being 0, where ReLU has no derivative: from the output it is taken to be 0,
        from the library's mask 1. It turns the sign of no product that is rounded.
        """
        self.fill(LATTICE, 0)
        for number, name in enumerate(self._buffers):
            if name == "bias":
                self._fill(number, name, BETWEEN, 0)
        accumulates = self._link.backward is not None and self._link.backward.accumulate
        added_to = {"dw", "db", "db_below"} if accumulates else set()
        written = {*self.outputs, *(name for name in self._buffers if name.startswith("kept"))} - added_to
        for name in written:
            self._buffers[name].poison()

    def run(self, plan: Half, stream: int) -> None:
        """Puts a half on the stream."""
        if isinstance(plan, ForwardPlan):
            names = {"kept": f"kept {plan.strategy.saved.value}"}
            own = _DROPOUT if plan.problem.dropout else None
            below = None
        else:
            names = {"x": self._x, "w": self._w}
            own = _DROPOUT if plan.problem.own.dropout else None
            below = _DROPOUT if plan.problem.through and plan.problem.through.dropout else None
        at = {name: self._address(names.get(name, name)) for name in plan.problem.operands}
        if isinstance(plan, BackwardPlan):
            at["saved"] = self._saved("own", plan.problem.own)
            at["saved_below"] = self._saved("through", plan.problem.through) if plan.problem.through else 0
        plan.run(Call(tuple(at.values()), stream, dropouts=(own, below)))

    def _saved(self, side: Side, derivative: Derivative) -> int:
        if derivative.saved is Saved.NOTHING:
            return 0
        if side != self._link.side:
            return self._address(f"saved {side}")
        return self._address("y" if derivative.saved is Saved.OUTPUT else f"kept {derivative.saved.value}")

    def _address(self, name: str) -> int:
        return self._buffers[name].address if name in self._buffers else 0

    def results(self) -> dict[str, Any]:
        """The outputs in float64."""
        return {name: decode(self._buffers[name].bits, self._dtype).astype("float64") for name in self.outputs}


def disagreement(actual: Mapping[str, Any], expected: Mapping[str, Any], dtype: DType) -> tuple[str, str] | None:
    """The first output that is not what another split has made of the same data, and how far off it is."""
    tolerance = _APPROXIMATION + _ROUNDINGS * _HALF_UNIT[dtype]
    for name, wanted in expected.items():
        norm, error = _norm(wanted), abs(actual[name] - wanted)
        off = _norm(error)
        if not off <= tolerance * norm:  # NaN is off
            return name, f"{name} is off by {off:.3g}, its elements being about {norm:.3g}"
        bad = int((error > _PEAK * tolerance * (abs(wanted) + norm)).sum())
        if bad:
            return name, f"{bad} of {error.size} elements of {name} are off"
    return None


def _norm(values: Any) -> float:
    """The root of the mean square."""
    return math.sqrt(float((values * values).mean()))
