"""The updates of `lt_runtime.torch.AdamW`: buckets of parameters, and a step of buckets on the CPU or on a GPU."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arguments import not_negative
from lt_runtime.arrays.operand import TORCH
from lt_runtime.errors import CaptureError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.streams import relaxed_captures
from lt_runtime.kernels import optimizer as kernels
from lt_runtime.kernels.kernel import Launches
from lt_runtime.problem import DType
from lt_runtime.rules import AdamW, AMSGrad
from lt_runtime.schedules import constant
from lt_runtime.torch.tensors import Tensor, as_numpy

State: TypeAlias = dict[str, Tensor]
"""A parameter's entry in the state of an optimizer."""
DTYPES: Final = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
Tiles: TypeAlias = "dict[Tensor, kernels.Fp8Copy]"
"""Maps each weight that an update also writes in FP8 to the description of its FP8 copy."""
MOMENTS: Final = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "v_max"}
"""Maps PyTorch's names of the moments to the kernel's names."""
_STATE: Final = [name for name, *_ in kernels.OptimizerState._fields_]
"""The names of the 32-bit words of the kernel's state."""
_SETTINGS: Final = len(_STATE) + kernels.UPDATE_TICKETS
"""Index of a bucket's first word of settings, after the kernel's state and its counters of blocks."""
_ALIGNMENT: Final = 16
_MOST_PREPARED: Final = 16
_PLACES: Final = 4  # number of buffers for tables on each stream


class Options(NamedTuple):
    """The options that `torch.optim.AdamW` does not have; see `lt_runtime.torch.AdamW`."""

    max_norm: float | None
    masters: bool
    moments: Any
    ema_decay: float | None
    seed: int

    def moments_of(self, parameter: Tensor) -> Any:
        """The type of a parameter's moments."""
        in_place = parameter.dtype is torch.bfloat16 and not self.masters
        return self.moments or (torch.bfloat16 if in_place else torch.float32)


class Bucket:
    """Parameters of one group that have had the same number of updates.

    Attributes:
        states: the parameters, in the group's order, and the state of each. group: the group in `param_groups` to which
            all of them belong.
        first: number of the first parameter, for the random numbers of stochastic rounding.
        step: FP32 tensor with one element for each parameter, all equal to the number of updates done; "step" in each
            state is a view of one element.
        words: the kernel's state, counters, settings and loss scale in words of 32 bits, on the parameters' device.
        lr, weight_decays, norm, scale: FP32 views of words. steps, nonfinite: integer views.
    """

    def __init__(self, states: dict[Tensor, State], group: dict[str, Any], first: int, options: Options) -> None:
        self.states, self.group, self.first, self.options = states, group, first, options
        self._masters = {each: state for each, state in states.items() if "master" in state}
        self._versions, self._written = [-1] * len(self._masters), (0.0, 0.0)
        self._launches: dict[tuple[Any, ...], Launches] = {}
        parameter, state = next(iter(states.items()))
        self.moments, done = DTYPES[state["exp_avg"].dtype], float(state["step"])
        with torch.inference_mode(mode=False):  # a tensor made in inference mode has no version counter
            self.step = torch.full((len(states),), done, dtype=torch.float32, device=parameter.device)
        self._steps = [self.step[i] for i in range(len(states))]
        for state, own in zip(states.values(), self._steps, strict=True):
            state["step"] = own
        self._step_version, self._forms = self.step._version, self._present_forms()
        count = first + len(states)
        settings = kernels.settings_words(self._kernel_options(), [(1.0, 0.0)] * count)
        words = np.concatenate([np.zeros(_SETTINGS, np.uint32), settings, np.zeros(2, np.uint32)])
        words[_STATE.index("steps")] = int(done)
        self.words = torch.from_numpy(words.view(np.int32)).to(parameter.device)
        floats = self.words.view(torch.float32)
        self.steps, self.nonfinite = (self.words[_STATE.index(name)] for name in ("steps", "nonfinite"))
        self.norm, self.scale = floats[_STATE.index("norm")], floats[-2]
        self.lr, self.weight_decays = floats[_SETTINGS], floats[-2 - count : -2]

    @property
    def rule(self) -> AdamW:
        """The rule with the group's betas and epsilon."""
        kind = AMSGrad if self.group["amsgrad"] else AdamW
        return kind(0.0, self.group["betas"], self.group["eps"], 0.0)

    def rule_with_rate(self) -> AdamW:
        """The rule with the group's betas, epsilon, learning rate and weight decay; raises `ArgumentError` if wrong."""
        rate, decay = not_negative("lr", float(self.group["lr"])), float(self.group["weight_decay"])
        return dataclasses.replace(self.rule, lr=rate, weight_decay=decay)

    @property
    def max_norm(self) -> float | None:
        """The norm that gradients are clipped to: the group's own, else the optimizer's; None for no clipping."""
        found: float | None = self.group.get("max_norm", self.options.max_norm)
        return found

    @property
    def is_step_written(self) -> bool:
        """Whether the caller has written into the "step" of a state since the last step."""
        return bool(self.step._version != self._step_version)

    def is_unchanged(self, states: dict[Tensor, State], groups: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether the parameters have the same group, states, steps, devices and types as when the bucket was made.

        Args:
            states, groups: the present state and group of each parameter.
        """
        return (
            all(groups.get(each) is self.group and states.get(each) is state for each, state in self.states.items())
            and all(state.get("step") is own for state, own in zip(self.states.values(), self._steps, strict=True))
            and not self.is_step_written
            and self._forms == self._present_forms()
        )

    def _present_forms(self) -> list[Any]:
        return [(p.device, p.dtype, "exp_avg" in s and s["exp_avg"].dtype) for p, s in self.states.items()]

    def _kernel_options(self) -> kernels.Options:
        seed = self.options.seed
        return kernels.Options((self.rule,), constant(), self.max_norm, False, None, self.moments, True, seed)

    def refresh_masters(self) -> None:
        """Copies values that were written into parameters since the last step to their master copies."""
        for (parameter, state), version in zip(self._masters.items(), self._versions, strict=True):
            if parameter._version != version:
                master = state["master"]
                master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter.float()))

    def note_versions(self) -> None:
        """Notes PyTorch's version counters of `step`, and of parameters, whose master copies now have equal values."""
        self._step_version = self.step._version
        self._versions = [each._version for each in self._masters]

    def apply_settings(self) -> None:
        """Writes the group's learning rate and weight decay to the device, if they have changed."""
        lr, decay = self.group["lr"], float(self.group["weight_decay"])
        on_device = isinstance(lr, torch.Tensor) and lr.device == self.words.device
        if on_device:
            self.lr.copy_(lr.reshape(()))
        wanted = (self._written[0] if on_device else float(lr)), decay
        if wanted == self._written:
            return
        if is_capturing(self.words):
            raise CaptureError(
                "a learning rate or weight decay was changed since the last step; call the optimizer's apply_settings "
                "before the capture, or give lr as a tensor on the GPU"
            )
        if not on_device:
            self.lr.fill_(wanted[0])
        self.weight_decays.fill_(decay)
        self._written = wanted

    def rows(self) -> list[kernels.Tensor]:
        """The entries of the kernels' tables, with gradients at address 0."""
        made = []
        for parameter, state in self.states.items():
            arrays = {"value": _typed(state.get("master", parameter)), "gradient": (0, DTYPES[parameter.grad.dtype])}
            if "master" in state:
                arrays["copy"] = _typed(parameter)
            arrays |= {MOMENTS[name]: _typed(each) for name, each in state.items() if name in MOMENTS}
            made.append(kernels.Tensor(local(parameter).numel(), arrays))
        return made

    def averaged(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a parameter's moving average (EMA) and the tensor that it averages."""
        return [(state["ema"], state.get("master", parameter)) for parameter, state in self.states.items()]

    def launches(self, rows: int, device: int, *, in_fp8: bool) -> Launches:
        """The update's launch for each stream, for a table of `rows` rows and the group's present betas and epsilon.

        Args:
            in_fp8: whether the update also writes weights in FP8. It then leaves the number of steps as it is.
        """
        rule = self.rule
        key = rule, self.max_norm, rows, in_fp8
        if key not in self._launches:
            start, size, count = self.words.data_ptr(), kernels.WORD_BYTES, self.first + len(self.states)
            params = kernels.update_params(self._kernel_options(), 0, start + _SETTINGS * size, count)
            params.state = start
            # PyTorch's GradScaler changes the scale: factors of 1 keep the kernel's own rule from changing it.
            params.growth_factor, params.backoff_factor, params.growth_interval = 1.0, 1.0, 1
            params.growth_tracker = start + (self.words.numel() - 1) * size
            stochastic = any("master" not in s and p.dtype is torch.bfloat16 for p, s in self.states.items())
            macros = kernels.update_macros(rule, self.moments, stochastic=stochastic)
            if in_fp8:
                both = kernels.UPDATE_FP8.params(params)
                made = kernels.launches_by_row(kernels.UPDATE_FP8, both, rows, device, macros)
            else:
                params.tickets = start + len(_STATE) * size
                made = Launches(kernels.UPDATE, macros, device, kernels.update_tiling(rows), params)
            remember(self._launches, key, made)
        return self._launches[key]

    def set_scale(self, scale: Tensor | None, found_inf: Tensor | None) -> int:
        """Writes the scale and the flag of PyTorch's GradScaler into the bucket.

        The kernel divides gradients by the scale: with the option `maximize` the scale is negative.

        Returns:
            The scale's address; 0 for a scale of 1.
        """
        sign = -1.0 if self.group["maximize"] else 1.0
        if found_inf is not None:
            self.nonfinite.copy_(found_inf.reshape(()))
        if scale is not None:
            torch.mul(scale.reshape(()), sign, out=self.scale)
        elif sign < 0:
            self.scale.fill_(sign)
        return 0 if scale is None and sign > 0 else int(self.scale.data_ptr())


class HostStep:
    """Updates the parameters of some buckets on the CPU, with the NumPy reference.

    Args:
        tiles: the weights that a step on a GPU also writes in FP8.

    Attributes:
        tiles: the weights that this step also writes in FP8.
        clipped: lists of buckets whose gradients are clipped to a norm over all of the list. A group with its own
            "max_norm" has its own list.
    """

    def __init__(self, buckets: list[Bucket], options: Options, tiles: Tiles) -> None:
        self.tiles: Tiles = {}
        self.buckets, self.options, lists = buckets, options, dict[Any, list[Bucket]]()
        for each in buckets:
            if each.max_norm is not None:
                lists.setdefault("max_norm" in each.group and id(each.group), []).append(each)
        self.clipped = [*lists.values()]

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm over all groups without an own "max_norm"; None if they are not clipped."""
        return next((each[0].norm for each in self.clipped if "max_norm" not in each[0].group), None)

    def run(self, scale: Tensor | None, found_inf: Tensor | None) -> Any:
        """Updates the parameters.

        Args:
            scale: the loss scale that the gradients are divided by; None for 1.
            found_inf: the flag of PyTorch's GradScaler: a value other than 0 skips the update; None for 0.

        Returns:
            Tensors that a graph captured from the step reads, and nothing else keeps alive.
        """
        factor, rules = 1.0 if scale is None else 1.0 / float(scale), [each.rule_with_rate() for each in self.buckets]
        with np.errstate(all="ignore"):  # as on a GPU, NaN and infinite gradients cause no warnings
            for buckets in self.clipped:
                grads = [_flat(each.grad) for bucket in buckets for each in bucket.states]
                norm = reference.gradient_norm(grads, 1.0 / factor)[0]
                for bucket in buckets:
                    bucket.norm.fill_(norm)
            for bucket, rule in zip(self.buckets, rules, strict=True):
                if found_inf is None or not float(found_inf):
                    bucket.step += 1
                    self._update(bucket, rule, -factor if bucket.group["maximize"] else factor)
                if self.options.ema_decay is not None:
                    for average, value in bucket.averaged():
                        average.lerp_(value.float(), 1.0 - self.options.ema_decay)

    def _update(self, bucket: Bucket, rule: AdamW, factor: float) -> None:
        step, limit = int(bucket.step[0]), bucket.max_norm
        factor *= 1.0 if limit is None else reference.clip_factor(float(bucket.norm), limit)
        for i, (parameter, state) in enumerate(bucket.states.items(), bucket.first):
            tensors = [state.get("master", parameter), *(state[name] for name in [*MOMENTS][: len(rule.moments)])]
            arrays = [_flat(each) for each in tensors]
            place = {"seed": self.options.seed, "tensor": i}
            reference.update_in_place(rule, constant(), arrays, _flat(parameter.grad), step, factor, **place)
            if "master" in state:
                parameter.copy_(state["master"])


class GpuStep(HostStep):
    """Updates the parameters of some buckets on a GPU.

    A step launches a kernel for each bucket, a second one for a bucket's weights that have a copy in FP8, one for each
    norm that gradients are clipped to, and one for the moving averages.
    """

    def __init__(self, buckets: list[Bucket], options: Options, tiles: Tiles) -> None:
        super().__init__(buckets, options, tiles)
        self.tiles, self._like = tiles, buckets[0].words
        self._device = self._like.device.index or 0
        # For each launch: the bucket, the parameters of it that are updated, and whether they are also written in FP8.
        self._updates, self._tables = list[tuple[Bucket, list[Tensor], bool]](), list[NDArray[Any]]()
        for bucket in buckets:
            rows = bucket.rows()
            numbered = enumerate(zip(bucket.states, rows, strict=True), bucket.first)
            tiled = {number: (row, tiles[each]) for number, (each, row) in numbered if each in tiles}
            for in_fp8 in (True, False) if tiled else (False,):
                self._updates.append((bucket, [each for each in bucket.states if (each in tiles) == in_fp8], in_fp8))
                table = kernels.fp8_table(tiled) if in_fp8 else kernels.update_table(rows, bucket.first, tiled)
                self._tables.append(table)
        self._norms: list[tuple[Tensor, Launches]] = []
        # For each stream, tables on the GPU and the gradients' addresses that they hold, the oldest first.
        self._places: dict[int, collections.deque[tuple[Any, list[Tensor]]]] = {}
        with activated(self._device):
            for (bucket, _, in_fp8), table in zip(self._updates, self._tables, strict=True):
                bucket.launches(len(table), self._device, in_fp8=in_fp8)
            for clipped in self.clipped:
                table = kernels.norm_table([row for each in clipped for row in each.rows()])
                self._tables.append(table)
                partial = torch.empty(len(table), dtype=torch.float32, device=self._like.device)
                state = clipped[0].words.data_ptr()
                params = kernels.GRADIENT_NORM.params(partial=partial.data_ptr(), state=state)
                launches = kernels.launches_by_row(kernels.GRADIENT_NORM, params, len(table), self._device)
                self._norms.append((partial, launches))
            if options.ema_decay is not None:
                pairs = [each for bucket in buckets for each in bucket.averaged()]
                arrays = [{"average": _typed(average), "value": _typed(value)} for average, value in pairs]
                counts = [local(value).numel() for _, value in pairs]
                table = kernels.ema_table([*map(kernels.Tensor, counts, arrays)])
                self._averages = _upload(table, self._like)
                params = kernels.EMA.params(self._averages.data_ptr(), 1.0 - options.ema_decay)
                self._ema = kernels.launches_by_row(kernels.EMA, params, len(table), self._device)

    def run(self, scale: Tensor | None, found_inf: Tensor | None) -> Any:
        """See `HostStep`; puts the launches on PyTorch's current stream."""
        with activated(self._device):
            stream = TORCH.current_stream(self._device)
            for bucket in self.buckets:
                bucket.apply_settings()
            # `bucket.launches` raises for wrong betas and epsilons: all calls of it come before the first launch.
            launches = [
                bucket.launches(len(table), self._device, in_fp8=in_fp8)[stream]
                for (bucket, _, in_fp8), table in zip(self._updates, self._tables, strict=False)
            ]
            scales = {bucket: bucket.set_scale(scale, found_inf) for bucket in self.buckets}
            tables = self._tables_on(stream)
            of_norms = zip(self.clipped, self._norms, tables[len(self._updates) :], strict=True)
            for (first, *others), (_, of_norm), table in of_norms:
                params, launch = of_norm[stream]
                params.chunks, params.scale = table.data_ptr(), scales[first]
                launch()
                for bucket in others:
                    bucket.norm.copy_(first.norm)
            for (bucket, _, in_fp8), (params, launch), on_device in zip(self._updates, launches, tables, strict=False):
                if in_fp8:
                    params.tiles, params = on_device.data_ptr(), params.update
                else:
                    params.chunks = on_device.data_ptr()
                params.scale, params.skip_nonfinite = scales[bucket], found_inf is not None
                launch()
            for bucket in self.buckets:
                bucket.step.copy_(bucket.steps)
            if self.options.ema_decay is not None:
                _, launch = self._ema[stream]
                launch()
        return tables

    def _tables_on(self, stream: int) -> list[Tensor]:
        """The kernels' tables on the GPU with the gradients' present addresses, for work on the given stream.

        The tables of the last few sets of addresses are kept. Each further one overwrites the oldest: if each step
        allocated new tables, PyTorch's allocator would give the next step's gradients other addresses. A graph has
        tables of its own, which nothing overwrites.
        """
        of_updates = [_gradients(parameters) for _, parameters, _ in self._updates]
        captures = is_capturing(self._like)
        if not captures:
            if stream not in self._places:
                copies = [[_upload(each, self._like) for each in self._tables] for _ in range(_PLACES)]
                self._places[stream] = collections.deque((None, each) for each in copies)
            places = self._places[stream]
            for addresses, made in places:
                if addresses == of_updates:
                    return made
        of_norms = [_gradients([each for bucket in clipped for each in bucket.states]) for clipped in self.clipped]
        tables = [_filled(*each) for each in zip(self._tables, (*of_updates, *of_norms), strict=True)]
        if captures:
            return [_upload(each, self._like) for each in tables]
        _, made = places[0]
        places[0] = None, made  # if a copy is interrupted, the tables are not found for any addresses
        for into, each in zip(made, tables, strict=True):
            host = _bytes_of(each)
            into.copy_(host.pin_memory() if into.is_cuda else host, non_blocking=True)
        places[0] = of_updates, made
        places.rotate(-1)
        return made


def _filled(table: NDArray[Any], addresses: tuple[int, ...]) -> NDArray[Any]:
    """A copy of a kernel's table that replaces the gradients' address 0 by the addresses of non-empty gradients."""
    made = table.copy()
    rows: Any = made["chunk"] if "chunk" in (made.dtype.names or ()) else made
    column = "gradient" if "gradient" in rows.dtype.names else "data"
    # A tensor has a row for each of its chunks, with the chunk's offset in bytes, which is 0 in its first row.
    starts = np.array(addresses or (0,), np.uint64)[np.cumsum(rows[column] == 0) - 1]
    rows[column] += starts
    rows["aligned"] &= (starts % _ALIGNMENT == 0).astype(np.uint8)
    return made


def _gradients(parameters: list[Tensor]) -> tuple[int, ...]:
    """The addresses of the gradients that are not empty."""
    grads = [local(each.grad) for each in parameters]
    return tuple([each.data_ptr() for each in grads if each.numel()])


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Puts an entry into a cache, and drops the oldest if there are many."""
    if len(cache) >= _MOST_PREPARED:
        cache.pop(next(iter(cache)))
    cache[key] = value


def _upload(table: NDArray[Any], like: Tensor) -> Tensor:
    """Copies a table to the device of the tensor `like`; the copy stays at its address as long as it is referred to.

    During a capture the copy is made at once, on another stream: otherwise it would become part of the graph, in
    memory that the graph uses for other tensors too.
    """
    if not (like.is_cuda and is_capturing(like)):
        return _bytes_of(table).to(like.device, copy=True)
    with relaxed_captures(), torch.cuda.stream(torch.cuda.Stream(like.device)):
        return _bytes_of(table).to(like.device)


def _bytes_of(table: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table).view(np.uint8))


def step_class(tensor: Tensor) -> type[HostStep]:
    """Returns the class that updates parameters on a tensor's device: `GpuStep` or `HostStep`."""
    return GpuStep if tensor.is_cuda else HostStep


def is_capturing(tensor: Tensor) -> bool:
    """Whether the current stream of a tensor's GPU is being captured."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def local(tensor: Tensor) -> Tensor:
    """The part of a `DTensor` that this process holds; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _typed(tensor: Tensor) -> tuple[int, DType]:
    part = local(tensor)
    return int(part.data_ptr()), DTYPES[part.dtype]


def _flat(tensor: Tensor) -> Any:
    """A NumPy vector of a tensor's elements in the order of memory."""
    part = local(tensor)
    return as_numpy(part.as_strided((part.numel(),), (1,)))
