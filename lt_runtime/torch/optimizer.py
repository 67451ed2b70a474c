"""`AdamW` for PyTorch: one launch of the package's kernel updates all parameters that have had equally many updates."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arguments import flag, number, shown
from lt_runtime.arrays.operand import TORCH
from lt_runtime.errors import ArgumentError, CaptureError, DeviceError, DTypeError, LayoutError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.streams import relaxed_captures
from lt_runtime.kernels import optimizer as kernels
from lt_runtime.kernels.kernel import Launches
from lt_runtime.problem import DType, Philox
from lt_runtime.reference import RoundedTensor
from lt_runtime.rules import AdamW as AdamWRule
from lt_runtime.rules import AMSGrad
from lt_runtime.schedules import constant
from lt_runtime.torch.operators import Tensor, as_numpy

_DTYPES: Final = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
_MOMENTS: Final = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "v_max"}
"""PyTorch's names of the moments, with the kernel's."""
_PARTS: Final = (RoundedTensor.PARAMETER, RoundedTensor.M, RoundedTensor.V, RoundedTensor.V)
_STATE: Final = [name for name, *_ in kernels.OptimizerState._fields_]
"""The names of the 32-bit words of the kernel's state."""
_SETTINGS: Final = len(_STATE) + kernels.UPDATE_TICKETS
"""Index of a bucket's first word of settings, after the kernel's state and its counters of blocks."""
_ALIGNMENT: Final = 16
_MOST_PREPARED: Final = 16
_NEVER: Final = 2**31 - 1


class _Options(NamedTuple):
    """The options that `torch.optim.AdamW` does not have; see `AdamW`."""

    max_norm: float | None
    masters: bool
    moments: Any
    ema_decay: float | None
    seed: int

    def moments_of(self, parameter: Tensor) -> Any:
        """The type of a parameter's moments."""
        in_place = parameter.dtype is torch.bfloat16 and not self.masters
        return self.moments or (torch.bfloat16 if in_place else torch.float32)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, which on a GPU updates all parameters of a group by one kernel.

    Arguments, groups, schedulers, `torch.amp.GradScaler` and `state_dict` are those of `torch.optim.AdamW`, whose
    states load here and the other way round. BF16 parameters are rounded stochastically, or rounded from FP32 master
    copies. Values that are written into a parameter between two steps also go into its master copy; values that are
    written through `parameter.data` do so only in the first step after `load_state_dict`.

    A CUDA graph that is captured from `step` reads learning rate and weight decay from the device. If `lr` is a tensor
    on the GPU, each replay reads it. Otherwise call `apply_settings` after a change. Run a step before the capture.

    `load_state_dict` and `add_param_group` end all captured graphs of the optimizer: capture them anew.

    A state has the additional keys "master" and "ema", and "step" is one tensor for many parameters while training.

    Args:
        params: float32, float16 or bfloat16, without gaps between their elements, all on one GPU or all on the CPU; as
            `torch.optim.AdamW` takes them.
        arguments, keywords: those of `torch.optim.AdamW`: lr, betas, eps, weight_decay, amsgrad, maximize. Its foreach,
            capturable and fused have no effect here, and its differentiable must be False.
        max_norm: clip the gradients to this norm over all parameters together, as `clip_grad_norm_`; None does not.
        masters: keep FP32 master copies of BF16 parameters. FP16 parameters always have them.
        moments: `torch.float32` or `torch.bfloat16`; None for FP32, and BF16 for BF16 parameters without master copy.
            BF16 moments are rounded stochastically.
        ema_decay: in [0, 1): keep an exponential moving average of each parameter in `state[parameter]["ema"]`, FP32,
            which each step that updates the parameter moves; None keeps none.
        seed: of the random numbers that stochastic rounding draws; 64 bits.

    Attributes:
        grad_norm: FP32 tensor of shape (), the norm of the gradients in the last step, before clipping. None without
            `max_norm`.

    Raises:
        ArgumentError: an option is out of its range.
        ValueError: as `torch.optim.AdamW`.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        *arguments: Any,
        max_norm: float | None = None,
        masters: bool = False,
        moments: Any = None,
        ema_decay: float | None = None,
        seed: int = 0,
        **keywords: Any,
    ) -> None:
        if keywords.get("differentiable"):
            raise ArgumentError("differentiable is True; a step has no gradient here: use torch.optim.AdamW")
        if moments not in (None, torch.float32, torch.bfloat16):
            raise ArgumentError(f"moments is {shown(moments)}; accepted are None, torch.float32 and torch.bfloat16")
        if max_norm is not None and not number("max_norm", max_norm) > 0:
            raise ArgumentError(f"max_norm is {max_norm}; it must be positive, or None")
        if ema_decay is not None and not 0 <= number("ema_decay", ema_decay) < 1:
            raise ArgumentError(f"ema_decay is {ema_decay}; it must be in [0, 1), or None")
        self._options = _Options(max_norm, flag("masters", masters), moments, ema_decay, Philox(seed).seed)
        super().__init__(params, *arguments, **keywords)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        """Drops all that the next step can make again from `state` and `param_groups`."""
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._prepared: dict[Any, _Prepared] = {}
        self._captured: list[_Prepared] = []  # the tables of captured graphs, which must live as long as these
        self._numbered = 0
        self.grad_norm: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer`; each parameter has a "step" of its own, on the CPU."""
        packed: dict[str, Any] = super().state_dict()
        states = packed["state"].items()
        steps = {id(each["step"]): float(each["step"]) for _, each in states if "step" in each}
        for i, state in states:
            own = {"step": torch.tensor(steps[id(state["step"])], dtype=torch.float32)} if "step" in state else {}
            packed["state"][i] = {**state, **own}
        return packed

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; moments, master copies and averages keep the types that they have here."""
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, parameter in zip(ids, self._parameters(), strict=True):
            for name, values in state_dict["state"].get(i, {}).items():
                if name in (*_MOMENTS, "master", "ema"):
                    dtype = self._options.moments_of(parameter) if name in _MOMENTS else torch.float32
                    self.state[parameter][name] = torch.empty_like(parameter, dtype=dtype).copy_(values)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def apply_settings(self) -> None:
        """Writes changed learning rates and weight decays to the GPU, for graphs that were captured from `step`.

        Values that were written into parameters also go into their master copies.

        Raises:
            CaptureError: the current stream is being captured, and settings have been changed.
        """
        for bucket in {*self._bucket_of.values()}:
            bucket.apply_settings()
            bucket.refresh_masters()
            bucket.note_versions()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients before the update.

        Returns:
            What `closure` returns; None without.

        Raises:
            DTypeError, LayoutError, DeviceError: a parameter or gradient is not accepted. Nothing has been updated.
            CaptureError: the stream is being captured, and some parameter has not been updated before, or settings
                have been changed since.
            GpuError: the driver or the compiler failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [each for each in self._parameters() if each.grad is not None]
        if not parameters:
            return loss
        prepared = self._prepared.get(self._key()) or self._prepare()
        if _is_capturing(parameters[0]):
            self._captured.append(prepared)
        for bucket in prepared.buckets:
            bucket.refresh_masters()
        prepared.run(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        torch.autograd.graph.increment_version(parameters)
        for bucket in prepared.buckets:
            bucket.note_versions()
        if self._options.max_norm is not None:
            self.grad_norm = prepared.buckets[0].norm
        return loss

    def _parameters(self) -> Iterator[Tensor]:
        return (each for group in self.param_groups for each in group["params"])

    def _key(self) -> tuple[Any, ...]:
        """Everything that a prepared step depends on; not the addresses of gradients, which are new in many steps."""
        key: list[Any] = []
        for group in self.param_groups:
            key.append(group["amsgrad"])
            for parameter in group["params"]:
                grad = _local(parameter.grad)
                if grad is None:
                    continue
                if grad.layout is not torch.strided:
                    return ()  # no key of a step that was prepared: `_check` refuses the gradient by name
                kept = [_local(each).data_ptr() for each in self.state.get(parameter, {}).values()]
                key.append((_local(parameter).data_ptr(), grad.dtype, grad.stride(), *kept))
        return tuple(key)

    def _prepare(self) -> _Prepared:
        """Sorts the parameters that have gradients into buckets, and prepares the launches for their addresses."""
        groups = enumerate(self.param_groups)
        active = [(i, each) for i, group in groups for each in group["params"] if each.grad is not None]
        parameters = [each for _, each in active]
        for parameter in parameters:
            self._check(parameter, parameters[0])
        counts = collections.Counter(self._bucket_of[each] for each in parameters if each in self._bucket_of)
        for bucket, count in counts.items():
            if count < len(bucket.parameters):
                self._dissolve(bucket)
        if _is_capturing(parameters[0]) and any(each not in self._bucket_of for each in parameters):
            raise CaptureError("a parameter gets its first gradient in a capture; run a step with all gradients before")
        self._fill_buckets(active)
        buckets = [*dict.fromkeys(self._bucket_of[each] for each in parameters)]
        prepared = (_PreparedOnGpu if _is_on_gpu(parameters[0]) else _Prepared)(buckets, self._options)
        _remember(self._prepared, self._key(), prepared)
        return prepared

    def _dissolve(self, bucket: _Bucket) -> None:
        """Ends a bucket of which only some parameters have gradients: from now on their numbers of updates differ."""
        for parameter in bucket.parameters:
            del self._bucket_of[parameter]

    def _fill_buckets(self, active: list[tuple[int, Tensor]]) -> None:
        """Puts parameters that have no bucket into new ones; `active` has each with the number of its group."""
        found: dict[Any, list[Tensor]] = {}
        for i, parameter in active:
            state = self._complete_state(parameter, self.param_groups[i])
            if parameter in self._bucket_of:
                state["step"] = self._bucket_of[parameter].step  # it may have been replaced by a copy
            else:
                found.setdefault((i, float(state["step"]), state["exp_avg"].dtype), []).append(parameter)
        for (i, step, _), parameters in found.items():
            states = [self.state[each] for each in parameters]
            bucket = _Bucket(parameters, states, self.param_groups[i], self._numbered, step, self._options)
            self._numbered += len(parameters)
            self._bucket_of.update(dict.fromkeys(parameters, bucket))

    def _complete_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter, in which missing tensors are made; a first "step" is 0."""
        options = self._options
        state: dict[str, Tensor] = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0))
        for name in [*_MOMENTS][: 3 if group["amsgrad"] else 2]:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=options.moments_of(parameter))
        has_master = parameter.dtype is torch.float16 or (parameter.dtype is torch.bfloat16 and options.masters)
        for name, wanted in (("master", has_master), ("ema", options.ema_decay is not None)):
            if wanted and name not in state:
                state[name] = parameter.detach().to(torch.float32, copy=True)
        return state

    def _check(self, parameter: Tensor, first: Tensor) -> None:
        """Raises unless the kernel can update a parameter from its gradient; `first` is the first parameter."""
        name, value, state = self._name(parameter), _local(parameter), self.state.get(parameter, {})
        for each, of in ((value, name), (parameter.grad, f"{name}.grad")):
            if each.layout is not torch.strided:
                raise LayoutError(
                    f"{of} is {each.layout}; accepted are dense tensors: make the layer with sparse=False"
                )
            if each.dtype not in _DTYPES:
                raise DTypeError(f"{of} is {each.dtype}; accepted are float32, float16 and bfloat16")
        if value.device != first.device or value.device.type not in ("cuda", "cpu"):
            raise DeviceError(f"{name} is on {value.device}; all parameters must be on one GPU or all on the CPU")
        extent = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
        if value.numel() and extent != value.numel():
            raise LayoutError(f"{name} has strides {value.stride()}; there must be no gaps between its elements")
        for of, each in {f"{name}.grad": parameter.grad, **state}.items():
            found, wanted = _form(_local(each)), _form(value)
            if of != "step" and found != wanted:
                raise LayoutError(
                    f"{of} of {name} has shape, strides and device {found}; they must be {wanted}, as those of the "
                    "parameter: make a new optimizer if it was moved or resized"
                )
        if value is not parameter and self._options.max_norm is not None:
            raise ArgumentError(f"{name} is sharded, of which max_norm would see a shard; use clip_grad_norm_ instead")

    def _name(self, parameter: Tensor) -> str:
        """A parameter's name if its group has names, else its place in the groups."""
        places = [(i, j) for i, group in enumerate(self.param_groups) for j in range(len(group["params"]))]
        i, j = next((i, j) for i, j in places if self.param_groups[i]["params"][j] is parameter)
        names: list[str] | None = self.param_groups[i].get("param_names")
        return names[j] if names else f"param_groups[{i}]['params'][{j}]"


class _Bucket:
    """Parameters of one group that have had the same number of updates.

    Attributes:
        parameters: in the group's order. group: their group in `param_groups`.
        states: the state of each.
        first: number of the first parameter, for the random numbers of stochastic rounding.
        step: FP32 tensor of shape (), the number of updates done.
        words: the kernel's state, counters, settings and loss scale in words of 32 bits, on the parameters' device.
        lr, weight_decays, norm, scale: FP32 views of words. steps, nonfinite: integer views.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        group: dict[str, Any],
        first: int,
        step: float,
        options: _Options,
    ) -> None:
        self.parameters, self.states, self.group, self.first = parameters, states, group, first
        self.options, self._versions = options, [-1] * len(parameters)
        device, count = parameters[0].device, first + len(parameters)
        self.step = torch.tensor(step, dtype=torch.float32, device=device)
        for state in states:
            state["step"] = self.step
        settings = kernels.settings_words(self._kernel_options(), [(1.0, 0.0)] * count)
        words = np.concatenate([np.zeros(_SETTINGS, np.uint32), settings, np.zeros(2, np.uint32)])
        words[_STATE.index("steps")] = int(step)
        self.words = torch.from_numpy(words.view(np.int32)).to(device)
        self._written = (0.0, 0.0)
        floats = self.words.view(torch.float32)
        self.steps, self.nonfinite = (self.words[_STATE.index(name)] for name in ("steps", "nonfinite"))
        self.norm, self.scale = floats[_STATE.index("norm")], floats[-2]
        self.lr, self.weight_decays = floats[_SETTINGS], floats[-2 - count : -2]

    @property
    def moments(self) -> DType:
        """The type of the moments."""
        return _DTYPES[self.states[0]["exp_avg"].dtype]

    @property
    def rule(self) -> AdamWRule:
        """The rule with the group's betas and epsilon."""
        kind = AMSGrad if self.group["amsgrad"] else AdamWRule
        return kind(0.0, self.group["betas"], self.group["eps"], 0.0)

    def _kernel_options(self) -> kernels.Options:
        max_norm, seed = self.options.max_norm, self.options.seed
        return kernels.Options((self.rule,), constant(), max_norm, False, None, self.moments, True, seed)

    def refresh_masters(self) -> None:
        """Takes values that were written into parameters since the last step into their master copies."""
        for parameter, state, version in zip(self.parameters, self.states, self._versions, strict=True):
            if "master" in state and parameter._version != version:
                master = state["master"]
                master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter.float()))

    def note_versions(self) -> None:
        """Notes that the parameters have the values of their master copies."""
        self._versions = [each._version for each in self.parameters]

    def apply_settings(self) -> None:
        """Writes the group's learning rate and weight decay to the device, if they have changed."""
        lr, decay = self.group["lr"], float(self.group["weight_decay"])
        on_device = isinstance(lr, torch.Tensor) and lr.device == self.words.device
        if on_device:
            self.lr.copy_(lr.reshape(()))
        wanted = (self._written[0] if on_device else float(lr)), decay
        if wanted == self._written:
            return
        if _is_capturing(self.words):
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
        for parameter, state in self.pairs():
            value, dtype = _typed(state.get("master", parameter)), _DTYPES[parameter.grad.dtype]
            arrays = {"value": value, "gradient": (0, dtype)}
            if "master" in state:
                arrays["copy"] = _typed(parameter)
            arrays |= {_MOMENTS[name]: _typed(each) for name, each in state.items() if name in _MOMENTS}
            made.append(kernels.Tensor(_local(parameter).numel(), arrays))
        return made

    def addresses(self) -> tuple[int, ...]:
        """The addresses of the gradients that are not empty."""
        grads = [_local(each.grad) for each in self.parameters]
        return tuple([each.data_ptr() for each in grads if each.numel()])

    def launches(self, rows: int, device: int) -> Launches:
        """The launch of the update for each stream, for a table of `rows` rows."""
        start, size, count = self.words.data_ptr(), kernels.WORD_BYTES, self.first + len(self.parameters)
        params = kernels.update_params(self._kernel_options(), 0, start + _SETTINGS * size, count)
        params.state, params.tickets = start, start + len(_STATE) * size
        # PyTorch's GradScaler moves the scale: the kernel's own rule is made to keep it.
        params.growth_factor = params.backoff_factor = 1.0
        params.growth_interval, params.growth_tracker = _NEVER, start + (self.words.numel() - 1) * size
        stochastic = any("master" not in s and p.dtype is torch.bfloat16 for p, s in self.pairs())
        macros = kernels.update_macros(self.rule, self.moments, stochastic=stochastic)
        return Launches(kernels.UPDATE, macros, device, kernels.update_tiling(rows), params)

    def averaged(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter's average, and the tensor that it averages."""
        return ((state["ema"], state.get("master", parameter)) for parameter, state in self.pairs())

    def pairs(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Each parameter with its state."""
        return zip(self.parameters, self.states, strict=True)

    def set_scale(self, scale: Tensor | None, found_inf: Tensor | None) -> int:
        """Writes what PyTorch's GradScaler found. Returns the address of the scale; 0 for a scale of 1.

        The kernel divides gradients by the scale; a negative one maximises.
        """
        if found_inf is not None:
            self.nonfinite.copy_(found_inf.reshape(()))
        if scale is None and not self.group["maximize"]:
            return 0
        sign = -1.0 if self.group["maximize"] else 1.0
        if scale is None:
            self.scale.fill_(sign)
        else:
            torch.mul(scale.reshape(()), sign, out=self.scale)
        return int(self.scale.data_ptr())


class _Prepared:
    """A step of some buckets on the CPU, by the reference."""

    def __init__(self, buckets: list[_Bucket], options: _Options) -> None:
        self.buckets, self.options = buckets, options

    def run(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Updates the parameters.

        Args:
            scale: the loss scale that the gradients are divided by; None for 1.
            found_inf: not 0 to leave the update out; None for 0.
        """
        factor = 1.0 if scale is None else 1.0 / float(scale)
        with np.errstate(all="ignore"):  # NaN and infinite gradients cost no warnings, as on a GPU
            if self.options.max_norm is not None:
                grads = [_flat(each.grad) for bucket in self.buckets for each in bucket.parameters]
                self.buckets[0].norm.fill_(reference.gradient_norm(grads, 1.0 / factor)[0])
                factor *= reference.clip_factor(float(self.buckets[0].norm), self.options.max_norm)
            for bucket in self.buckets:
                if found_inf is None or not float(found_inf):
                    bucket.step += 1
                    self._update(bucket, -factor if bucket.group["maximize"] else factor)
                self._average(bucket)

    def _update(self, bucket: _Bucket, factor: float) -> None:
        group, rule, step = bucket.group, bucket.rule, int(bucket.step)
        own = type(rule)(float(group["lr"]), rule.betas, rule.eps, float(group["weight_decay"]))
        for i, (parameter, state) in enumerate(bucket.pairs(), bucket.first):
            tensors = [state.get("master", parameter), *(state[name] for name in [*_MOMENTS][: len(rule.moments)])]
            arrays = [_flat(each) for each in tensors]
            new = reference.rule_update(own, constant(), arrays, _flat(parameter.grad), step, factor)
            for array, exact, part in zip(arrays, new, _PARTS, strict=False):  # rules have up to three moments
                if array.dtype == np.float32:
                    array[...] = exact
                else:
                    lanes = reference.rounding_lanes(exact.size, self.options.seed, i, step, part)
                    array[...] = reference.round_stochastically(exact, lanes)
            if "master" in state:
                parameter.copy_(state["master"])

    def _average(self, bucket: _Bucket) -> None:
        if self.options.ema_decay is not None:
            for average, value in bucket.averaged():
                average.lerp_(value.float(), 1.0 - self.options.ema_decay)


class _PreparedOnGpu(_Prepared):
    """A step of some buckets on a GPU: a launch for each bucket, one for the norm, and one for the averages."""

    def __init__(self, buckets: list[_Bucket], options: _Options) -> None:
        super().__init__(buckets, options)
        words = buckets[0].words
        self._device, rows = words.device.index or 0, [each.rows() for each in buckets]
        updates = [kernels.update_table(each, bucket.first) for each, bucket in zip(rows, buckets, strict=True)]
        self._tables, self._sizes = [_Table(each, "gradient", words) for each in updates], [*map(len, updates)]
        self._updates: list[dict[AdamWRule, Launches]] = [{} for _ in buckets]
        with activated(self._device):
            for i in range(len(buckets)):
                self._update_of(i)
            if options.max_norm is not None:
                norms = kernels.norm_table([*itertools.chain(*rows)])
                self._norms = _Table(norms, "data", words)
                self._partial = torch.empty(len(norms), dtype=torch.float32, device=words.device)
                params = kernels.GRADIENT_NORM.params(partial=self._partial.data_ptr(), state=words.data_ptr())
                self._norm = kernels.launches_by_row(kernels.GRADIENT_NORM, params, len(norms), self._device)
            if options.ema_decay is not None:
                pairs = [each for bucket in buckets for each in bucket.averaged()]
                arrays = [{"average": _typed(average), "value": _typed(value)} for average, value in pairs]
                counts = [_local(value).numel() for _, value in pairs]
                table = kernels.ema_table([*map(kernels.Tensor, counts, arrays)])
                self._averages = _upload(table, words)
                params = kernels.EMA.params(self._averages.data_ptr(), 1.0 - options.ema_decay)
                self._ema = kernels.launches_by_row(kernels.EMA, params, len(table), self._device)

    def run(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """See `_Prepared`; puts the launches on PyTorch's current stream."""
        with activated(self._device):
            stream = TORCH.current_stream(self._device)
            for bucket in self.buckets:
                bucket.apply_settings()
            scales = [bucket.set_scale(scale, found_inf) for bucket in self.buckets]
            addresses = [bucket.addresses() for bucket in self.buckets]
            if self.options.max_norm is not None:
                params, launch = self._norm[stream]
                params.chunks, params.scale = self._norms.at(tuple(itertools.chain(*addresses)), stream), scales[0]
                launch()
                for bucket in self.buckets[1:]:
                    bucket.norm.copy_(self.buckets[0].norm)
            for i, bucket in enumerate(self.buckets):
                params, launch = self._update_of(i)[stream]
                params.chunks, params.scale = self._tables[i].at(addresses[i], stream), scales[i]
                params.skip_nonfinite = found_inf is not None
                launch()
                bucket.step.copy_(bucket.steps)
            if self.options.ema_decay is not None:
                _, launch = self._ema[stream]
                launch()

    def _update_of(self, index: int) -> Launches:
        """The launch of a bucket's update for each stream, with its group's present betas and epsilon."""
        rule = self.buckets[index].rule
        if rule not in self._updates[index]:
            self._updates[index] = {rule: self.buckets[index].launches(self._sizes[index], self._device)}
        return self._updates[index][rule]


class _Table:
    """A kernel's table on a GPU, for the latest addresses of gradients.

    Args:
        base: the table with each gradient at address 0, so that the rows have the offsets.
        column: the column of the gradients' addresses.
        like: a tensor on the GPU.
    """

    def __init__(self, base: NDArray[Any], column: str, like: Tensor) -> None:
        self._base, self._column, self._like = base, column, like
        self._tensor = np.cumsum(base[column] == 0) - 1  # a tensor's first row has offset 0
        self._uploaded: dict[Any, Tensor] = {}
        self._captured: list[Tensor] = []  # tables that captured graphs read

    def at(self, addresses: tuple[int, ...], stream: int) -> int:
        """The address of the table for the addresses of the gradients that are not empty, in the order of a stream."""
        table = self._uploaded.get((addresses, stream))
        if table is None:
            rows, starts = self._base.copy(), np.array(addresses or (0,), np.uint64)[self._tensor]
            rows[self._column] += starts
            rows["aligned"] &= (starts % _ALIGNMENT == 0).astype(np.uint8)
            table = _upload(rows, self._like)
            _remember(self._uploaded, (addresses, stream), table)
        if _is_capturing(self._like):
            self._captured.append(table)
        return int(table.data_ptr())


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Puts an entry into a cache, and drops the oldest if there are many."""
    if len(cache) >= _MOST_PREPARED:
        cache.pop(next(iter(cache)))
    cache[key] = value


def _upload(table: NDArray[Any], like: Tensor) -> Tensor:
    """A copy of a table on a tensor's device, where it stays at its address.

    During a capture the copy is made at once, by another stream: it would be part of the graph otherwise, and lie in
    memory that the graph uses for other tensors too.
    """
    host = torch.from_numpy(np.ascontiguousarray(table).view(np.uint8))
    if not like.is_cuda:
        return host.clone()
    if not _is_capturing(like):
        return host.pin_memory().to(like.device, non_blocking=True)
    with relaxed_captures(), torch.cuda.stream(torch.cuda.Stream(like.device)):
        return host.to(like.device)


def _is_on_gpu(tensor: Tensor) -> bool:
    return bool(tensor.is_cuda)


def _is_capturing(tensor: Tensor) -> bool:
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides and device of a tensor; the strides of axes of one element have no meaning and are 0."""
    strides = tuple(s * (n > 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(tensor.shape), strides, tensor.device


def _local(tensor: Tensor) -> Tensor:
    """The part of a `DTensor` that this process holds; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _typed(tensor: Tensor) -> tuple[int, DType]:
    local = _local(tensor)
    return int(local.data_ptr()), _DTYPES[local.dtype]


def _flat(tensor: Tensor) -> Any:
    """A NumPy vector of a tensor's elements in the order of memory."""
    local = _local(tensor)
    return as_numpy(local.as_strided((local.numel(),), (1,)))
