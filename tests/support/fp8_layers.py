"""Layers with FP8 products, for the pretended GPU and a real one: a GPU's results against those of NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import lt_runtime as lt
from tests.support.float8_products import host_of, placed

M, N, K = 48, 64, 32
BF16 = np.dtype(ml_dtypes.bfloat16)
FP16, FP32 = np.dtype(np.float16), np.dtype(np.float32)


@dataclass(frozen=True)
class Fp8Case:
    """A test case: a layer, its FP8 recipe, and the options of its calls."""

    dtype: np.dtype[Any] = BF16
    recipe: lt.FP8 = lt.FP8()  # noqa: RUF009  # it is frozen
    activation: Any = "gelu"
    bias: bool = True
    dropout: float = 0.0
    add: bool = False
    out_z: bool = False
    needs: tuple[bool, bool, bool] = (True, True, True)
    accumulate: bool = False
    before_activation: bool = False


CASES = {
    "delayed": Fp8Case(),
    "current": Fp8Case(recipe=lt.FP8(recipe="current")),
    "rowwise": Fp8Case(recipe=lt.FP8(recipe="rowwise")),
    "rowwise, e4m3, float16": Fp8Case(FP16, recipe=lt.FP8(recipe="rowwise", gradients="e4m3"), dropout=0.5),
    "rowwise, float32, adds": Fp8Case(FP32, recipe=lt.FP8(recipe="rowwise"), add=True, accumulate=True),
    "rowwise, first layer": Fp8Case(
        recipe=lt.FP8(recipe="rowwise"), activation="none", needs=(False, True, True), accumulate=True
    ),
    "rowwise, frozen weights": Fp8Case(recipe=lt.FP8(recipe="rowwise"), needs=(True, False, False)),
    "gradients in e4m3": Fp8Case(recipe=lt.FP8(gradients="e4m3", fast_accumulation="always")),
    "float16": Fp8Case(FP16, recipe=lt.FP8(fast_accumulation="never")),
    "float32": Fp8Case(FP32, activation="silu", dropout=0.25),
    "float32 without a pass": Fp8Case(FP32, activation="none", bias=False),
    "without activation": Fp8Case(activation="none"),
    "only products": Fp8Case(activation="none", bias=False),
    "adds": Fp8Case(activation="none", add=True),
    "adds after an activation": Fp8Case(activation="gelu_erf", add=True, dropout=0.5),
    "the caller's pre-activation": Fp8Case(activation="none", out_z=True),
    "dropout without activation": Fp8Case(activation="none", dropout=0.5),
    "dropout after an activation": Fp8Case(recipe=lt.FP8(recipe="current"), dropout=0.5, accumulate=True),
    "first layer": Fp8Case(needs=(False, True, True)),
    "frozen weights": Fp8Case(needs=(True, False, False)),
    "only a bias gradient": Fp8Case(needs=(False, False, True)),
    "accumulates": Fp8Case(accumulate=True),
    "gradient before the activation": Fp8Case(before_activation=True),
}


class Fp8Layer:
    """A layer with its state and arrays on the host or on a GPU, which trains for a few steps on the same data."""

    def __init__(self, case: Fp8Case, package: Any, gpu: Any = None) -> None:
        self.case, self.lt, self._gpu = case, package, gpu
        recipe = case.recipe
        fields = {each: getattr(recipe, each) for each in ("recipe", "gradients", "history", "headroom")}
        self.state = package.FP8State(package.FP8(**fields, fast_accumulation=recipe.fast_accumulation))

    def put(self, array: NDArray[Any]) -> Any:
        return array.copy() if self._gpu is None else placed(self._gpu, array)

    def get(self, array: Any) -> NDArray[Any]:
        return np.array(array) if self._gpu is None else host_of(self._gpu, array)

    def step(self, number: int, scale: float = 1.0, *, update: bool = True) -> dict[str, NDArray[np.float64]]:
        """Calls forward and backward once; returns the results by name."""
        case, generator = self.case, np.random.default_rng(number)

        def draw(size: float, *shape: int, odd: bool = False) -> Any:
            values = (size * generator.standard_normal(shape)).astype(case.dtype)
            # The last bit of every number is set, so that no number lies halfway between two FP8 numbers, where a tiny
            # error would decide the rounding.
            values.view(f"u{values.itemsize}")[...] |= odd
            return self.put(values)

        x, w, bias, dy = draw(scale, M, K), draw(0.2, N, K), draw(1, N), draw(1e-3, M, N, odd=True)
        add = draw(1, M, N)
        self.state.needs_dx, self.state.needs_dw, _ = case.needs
        y, ctx = self.lt.linear_fwd(
            x, w, bias if case.bias else None, activation=case.activation, dropout=case.dropout,
            rng=self.lt.Philox(5, 0, number), precision=self.state, add=add if case.add else None,
            out_z=self.put(np.zeros((M, N), case.dtype)) if case.out_z else None,
        )  # fmt: skip
        need_dx, need_dw, need_db = case.needs
        outputs = {"out_dw": draw(1, N, K), "out_db": draw(1, N)} if case.accumulate else {}
        gradients = self.lt.linear_bwd(
            dy, ctx, need_dx=need_dx, need_dw=need_dw, need_db=need_db, accumulate=case.accumulate,
            before_activation=case.before_activation, **outputs,
        )  # fmt: skip
        if update:
            self.state.update()
        if self._gpu is not None:
            self._gpu.synchronize()
        named = {"y": y, "z": ctx.preactivation if case.out_z else None, **gradients._asdict()}
        made = {name: self.get(each).astype(np.float64) for name, each in named.items() if each is not None}
        return made | {"slots": self.get(self.state.slots), "history": self.get(self.state.history)}


class GatedLayers:
    """The layers of a gate and its value, with scales of their own, on the host or on a GPU.

    Args:
        gated: the package's module `ops.fp8.gradients`.
    """

    def __init__(self, package: Any, gated: Any, dropout: float, gpu: Any = None) -> None:
        self.lt, self._gated, self._dropout, self._gpu = package, gated, dropout, gpu
        self._states = [package.FP8State() for _ in range(2)]

    def step(self, number: int) -> tuple[Any, list[bytes]]:
        """The bytes of the layers' gradients and scales, with gradients of the gate that one kernel casts.

        Also returns those with gradients that `gated_bwd` writes and each layer casts. The first result is None if the
        layers have not found their scales.
        """
        generator, states = np.random.default_rng(number), self._states

        def draw(size: float, *shape: int) -> Any:
            values = (size * generator.standard_normal(shape)).astype(BF16)
            return values if self._gpu is None else placed(self._gpu, values)

        x, dy, h = draw(1, 2, M // 2, K), draw(1e-3, 2, M // 2, N), draw(1, 2, M // 2, 2 * N)
        contexts = [
            self.lt.linear_fwd(x, draw(size, N, K), precision=state, out=part)[1]
            for size, state, part in zip((0.1, 1), states, (h[..., :N], h[..., N:]), strict=True)
        ]
        assert self._gated.casts_gate(h, *states)
        _, gate = self.lt.gated_fwd(h, dropout=self._dropout, rng=self.lt.Philox(1, 2, number))
        cast, made = self._gated.gated_bwd_in_fp8(dy, gate, *states), []
        for dh in (cast, self.lt.gated_bwd(dy, gate)):
            parts = [] if dh is None else zip(self._gated.halves(dh, N), contexts, strict=True)
            found = [each for part, ctx in parts for each in self.lt.linear_bwd(part, ctx)[:2]]
            if self._gpu is not None:
                self._gpu.synchronize()
            arrays = [] if dh is None else [*found, *(state.slots for state in states)]
            made.append([(each if self._gpu is None else host_of(self._gpu, each)).tobytes() for each in arrays])
        for state in states:
            state.update()
        if self._gpu is not None:
            self._gpu.synchronize()
        return made[0] or None, made[1]


def decibels(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The ratio of signal to error, in dB."""
    noise = float(((found - wanted) ** 2).sum())
    return 10 * np.log10(float((wanted**2).sum()) / noise) if noise else np.inf
