"""AdamW's kernels on the host: tensors in guarded buffers, and launches like those of `GpuState` on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime import reference, rules
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.kernels import optimizer as kernels
from lt_runtime.kernels.tiling import THREADS
from lt_runtime.problem import DType
from lt_runtime.schedules import constant
from tests.host_kernels.arrays import Guarded, numbers, vector
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import BF16, F32, TYPES, AdamWVariant
from tests.support.adamw_reference import AdamWHyper, AdamWTensor

HYPER: Final = AdamWHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, constant())
OPTIONS: Final = kernels.Options(
    (rules.AdamW(1e-2, weight_decay=0.1),),
    constant(),
    max_norm=None,
    skip_nonfinite=False,
    scaler=None,
    moments=F32,
    stochastic_rounding=False,
    seed=0,
)


@dataclass(frozen=True)
class TensorCase:
    """A test case: size and types of a parameter, and the offsets of its arrays from aligned addresses.

    A parameter of 16 bits either has a master copy, or is BF16 and updated `in_place`.
    """

    size: int
    dtype: DType = F32
    gradient_dtype: DType = F32
    in_place: bool = False
    # Offsets: elements before the parameter, before the gradient, and before all other arrays.
    offsets: tuple[int, int, int] = (0, 0, 0)
    lr_scale: float = 1.0
    weight_decay: float = 0.1


sizes = st.one_of(st.integers(0, 40), st.sampled_from((255, 256, 260, 700, 1024, 1025, 2048, 2500)))
offsets = st.one_of(st.just((0, 0, 0)), st.just((0, 0, 0)), st.tuples(*(st.sampled_from((0, 1, 3, 4, 8)),) * 3))


def tensors(in_place: bool) -> st.SearchStrategy[TensorCase]:
    """Draws a `TensorCase`; `in_place` says whether BF16 parameters may lack a master copy."""
    return st.builds(
        TensorCase,
        size=sizes,
        dtype=st.sampled_from(TYPES),
        gradient_dtype=st.sampled_from(TYPES),
        in_place=st.booleans() if in_place else st.just(False),
        offsets=offsets,
        lr_scale=st.sampled_from((1.0, 1.0, 0.25, 0.0)),
        weight_decay=st.sampled_from((0.1, 0.0, 0.5)),
    )


class HostTensor:
    """The arrays of one parameter, with random contents unless the gradient is given."""

    def __init__(
        self, case: TensorCase, variant: AdamWVariant, seed: np.random.Generator | int, gradient: Any = None
    ) -> None:
        generator = np.random.default_rng(seed)

        def draw(dtype: DType, offset: int) -> Guarded:
            return vector(numbers(generator, (case.size,), dtype), dtype, offset)

        self.case = case
        data, _, other = case.offsets
        self.parameter = draw(case.dtype, data)
        no_master = case.dtype is F32 or (case.dtype is BF16 and case.in_place)
        self.master = None if no_master else draw(F32, other)
        self.m, self.v = draw(variant.moments, other), draw(variant.moments, other)
        self.v_max = draw(variant.moments, other) if variant.amsgrad else None
        for second in filter(None, (self.v, self.v_max)):
            second.array[...] = np.abs(second.array)
        drawn = numbers(generator, (case.size,), case.gradient_dtype)
        self.set_gradient(drawn if gradient is None else np.asarray(gradient))

    def set_gradient(self, values: NDArray[Any]) -> None:
        self.gradient = vector(values, self.case.gradient_dtype, self.case.offsets[1])

    @property
    def updated(self) -> list[Guarded]:
        """The arrays of the value, m, v and, with AMSGrad, the largest v."""
        return [x for x in (self.master or self.parameter, self.m, self.v, self.v_max) if x is not None]

    @property
    def written(self) -> list[Guarded]:
        """Returns all arrays that an update may write."""
        return [*self.updated, self.parameter]

    @property
    def state(self) -> AdamWTensor:
        """Copies the tensor's state for the reference."""
        return AdamWTensor(*(x.array.copy() for x in self.updated))

    def hyper(self, hyper: AdamWHyper) -> AdamWHyper:
        """Returns the settings with the tensor's own learning rate and weight decay."""
        return replace(hyper, lr=hyper.lr * self.case.lr_scale, weight_decay=self.case.weight_decay)

    def row(self) -> kernels.Tensor:
        """Returns the tensor as an entry of the kernels' tables."""
        arrays = {"value": self.updated[0], "gradient": self.gradient, "m": self.m, "v": self.v}
        if self.master:
            arrays["copy"] = self.parameter
        if self.v_max:
            arrays["v_max"] = self.v_max
        types = {name: (array.address, array.dtype) for name, array in arrays.items()}
        return kernels.Tensor(self.case.size, types)


def with_hyper(hyper: AdamWHyper) -> kernels.Options:
    """Returns `OPTIONS` with other settings of AdamW."""
    rule = rules.AdamW(hyper.lr, (hyper.beta1, hyper.beta2), hyper.eps, hyper.weight_decay)
    return replace(OPTIONS, rules=(rule,), schedule=hyper.schedule)


class HostOptimizer:
    """Launches the kernels of the norm and of the update, and keeps the optimizer's state between launches.

    Attributes:
        state: the optimizer's state as the kernels read it. scale, growth_tracker: the loss scaler's arrays.
    """

    def __init__(self, host: HostKernels, variant: AdamWVariant, options: kernels.Options, first: int = 0) -> None:
        self._host, self._macros = host, variant.macros
        self._update = host.get(kernels.UPDATE, variant.macros)
        self._norm = host.get(kernels.GRADIENT_NORM)
        self._options = replace(options, moments=variant.moments)
        self.state = np.zeros(1, np.dtype(kernels.OptimizerState))
        self.state["steps"] = first
        self.tickets = np.zeros(kernels.UPDATE_TICKETS, np.uint32)
        scaler = options.scaler or GradScaler()
        self.scale = np.array([scaler.init_scale], np.float32)
        self.growth_tracker = np.zeros(1, np.int32)

    def step(self, tensors: Sequence[HostTensor], order: int = 0) -> None:
        """Launches the kernel gradient_norm, then the kernel optimizer."""
        self.measure(tensors, order)
        self.update(tensors, order)

    def measure(self, tensors: Sequence[HostTensor], order: int = 0) -> None:
        """Launches the kernel gradient_norm alone."""
        table = kernels.norm_table([tensor.row() for tensor in tensors])
        partial = Guarded(np.full((1, table.size), np.nan, np.float32))
        scale = self.scale.ctypes.data if self._options.scaler else 0
        params = kernels.GRADIENT_NORM.params(table.ctypes.data, partial.address, self.state.ctypes.data, scale)
        self._norm.launch((table.size, 1), (THREADS, 1), params, order=order)
        partial.values()
        assert self.state["norm_ticket"] == 0

    def update(self, tensors: Sequence[HostTensor], order: int = 0, octet: int = 0) -> None:
        """Launches the kernel optimizer; `octet` is added to the index of each tensor's first octet of elements."""
        table = kernels.update_table([tensor.row() for tensor in tensors])
        table["octet"] += np.uint64(octet)
        params, _words = self._params(tensors)
        params.chunks, params.tickets = table.ctypes.data, self.tickets.ctypes.data
        tiling = kernels.update_tiling(table.size)
        self._update.launch(tiling.grid, tiling.block, params, order=order)
        assert not self.tickets.any()
        assert self.state["update_ticket"] == self.state["nonfinite"] == 0

    def update_fp8(self, tensors: Sequence[tuple[HostTensor, kernels.Fp8Copy]], order: int = 0) -> None:
        """Launches the update of weights with copies in FP8, which leaves the optimizer's state as it is."""
        table = kernels.fp8_table({i: (tensor.row(), copy) for i, (tensor, copy) in enumerate(tensors)})
        update, _words = self._params([tensor for tensor, _ in tensors])
        params = kernels.UPDATE_FP8.params(update, table.ctypes.data)
        macros = (*self._macros, ("E5M2", "0"), ("ALIGNED", "1"))
        before = self.state.copy()
        self._host.get(kernels.UPDATE_FP8, macros).launch((table.size, 1), (THREADS, 1), params, order=order)
        assert self.state == before

    def _params(self, tensors: Sequence[HostTensor]) -> tuple[Any, NDArray[np.uint32]]:
        """Returns the argument block of an update without addresses of tables, and the settings that it refers to."""
        options = self._options
        words = kernels.settings_words(options, [(each.case.lr_scale, each.case.weight_decay) for each in tensors])
        params = kernels.update_params(options, 0, words.ctypes.data, len(tensors))
        params.state = self.state.ctypes.data
        if options.scaler:
            params.scale, params.growth_tracker = self.scale.ctypes.data, self.growth_tracker.ctypes.data
        return params, words


def bits(tensors: Sequence[HostTensor]) -> list[bytes]:
    """Returns the bytes of all arrays that an update may write."""
    return [array.array.tobytes() for tensor in tensors for array in tensor.written]


def rounded(values: NDArray[np.float32], dtype: DType, lanes: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Rounds FP32 values as a kernel stores them: not at all for FP32, stochastically by the random lanes for BF16."""
    stored = values if dtype is F32 else reference.round_stochastically(values, lanes.reshape(values.shape))
    return stored.astype(np.float64)
