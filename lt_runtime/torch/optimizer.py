"""`AdamW` for PyTorch: on a GPU one kernel updates all parameters of a group that have had equally many updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

import torch

from lt_runtime.arguments import flag, number, shown
from lt_runtime.errors import ArgumentError, CaptureError, DeviceError, DTypeError, LayoutError, ShapeError
from lt_runtime.problem import Philox
from lt_runtime.torch import fp8_steps, updates
from lt_runtime.torch.tensors import Tensor
from lt_runtime.torch.updates import DTYPES, MOMENTS, Bucket, HostStep, Options, Tiles, local, remember
from lt_runtime.training.fp8_weights import are_aligned

_PLAIN: Final = {torch.Tensor, torch.nn.Parameter}
_MOMENTS_TYPES: Final = {torch.float32, torch.bfloat16}
_ACCEPTED: Final = "a parameter's moments must be all float32 or all bfloat16, its master copy and average float32"
_OTHERS: Final = ("master", "ema")
"""The names in a parameter's state of the FP32 master copy and of the FP32 moving average."""


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, which on a GPU updates by one kernel all parameters of a group with equally many updates.

    Arguments, groups, schedulers, `torch.amp.GradScaler` and `state_dict` are those of `torch.optim.AdamW`; states
    load in both directions. BF16 parameters are rounded stochastically, or rounded from FP32 master copies. Values that
    are written into a parameter between two steps also go into its master copy; values that are written through
    `parameter.data` do so only in the first step after `load_state_dict`.

    A CUDA graph that is captured from `step` reads learning rate and weight decay from the device. If `lr` is a tensor
    on the GPU, each replay reads it. Otherwise call `apply_settings` after a change. Run a step before the capture.

    After `load_state_dict` or `add_param_group`, or if states or groups were replaced, graphs that were captured before
    must not be launched: capture anew.

    A state has the additional keys "master" and "ema".

    Args:
        params: float32, float16 or bfloat16, without gaps between their elements, all on one GPU or all on the CPU; as
            `torch.optim.AdamW` takes them.
        arguments, keywords: those of `torch.optim.AdamW`: lr, betas, eps, weight_decay, amsgrad, maximize. Its foreach,
            capturable and fused have no effect here, and its differentiable must be False.
        max_norm: clip the gradients to this norm over all parameters together, as `clip_grad_norm_`; None: no clipping.
            A group may have a "max_norm" of its own: its gradients are clipped to that norm, and left out of the norm
            over the others.
        masters: keep FP32 master copies of BF16 parameters. FP16 parameters always have them.
        moments: `torch.float32` or `torch.bfloat16`; None for FP32, and BF16 for BF16 parameters without master copy.
            BF16 moments are rounded stochastically.
        ema_decay: in [0, 1): keep an exponential moving average of each parameter in `state[parameter]["ema"]`, FP32.
            Each step in which the parameter has a gradient updates the average, also a step that `GradScaler` skips.
            None keeps no averages.
        seed: 64-bit seed of the random numbers for stochastic rounding.

    Attributes:
        grad_norm: FP32 tensor of shape (), the norm of the gradients in the last step, before clipping, over the groups
            that have no "max_norm" of their own. None without `max_norm`.

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
        if moments not in (None, *_MOMENTS_TYPES):
            raise ArgumentError(f"moments is {shown(moments)}; accepted are None, torch.float32 and torch.bfloat16")
        _check_max_norm(max_norm)
        if ema_decay is not None and not 0 <= number("ema_decay", ema_decay) < 1:
            raise ArgumentError(f"ema_decay is {ema_decay}; it must be in [0, 1), or None")
        self._options = Options(max_norm, flag("masters", masters), moments, ema_decay, Philox(seed).seed)
        super().__init__(params, *arguments, **keywords)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; a group may have "max_norm"."""
        _check_max_norm(dict(param_group).get("max_norm"))
        super().add_param_group(param_group)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        """Drops the buckets and the prepared steps; the next step makes them again from `state` and `param_groups`.

        A bucket has the parameters of one group that have had equally many updates.
        """
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._prepared: dict[Any, HostStep] = {}
        self._captured: list[Any] = []  # tensors that captured graphs read, and which must live as long as the graphs
        # Whether a step was captured in a graph that `lt_runtime.torch.capture` did not make. After a launch of such a
        # graph, copies of weights in FP8 may be stale.
        self.is_recorded = False
        self.grad_norm: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer`; each parameter has a "step" of its own, on the CPU."""

        def give_steps(_: Any, packed: dict[str, Any]) -> None:
            for i, state in packed["state"].items():
                packed["state"][i] = {**state, "step": torch.tensor(float(state["step"]))} if "step" in state else state

        with self.register_state_dict_post_hook(give_steps, prepend=True):  # before the caller's hooks
            packed: dict[str, Any] = super().state_dict()
        return packed

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; moments, master copies and averages have the types that this optimizer uses.

        Raises:
            ArgumentError: a parameter's state lacks a tensor of an AdamW's state. Nothing has been loaded.
            ShapeError: a tensor in a state has another shape than the parameter. Nothing has been loaded.
            ValueError: see `torch.optim.Optimizer`.
        """
        groups, loaded = self.param_groups, list[tuple[Tensor, str, Tensor]]()

        def check(_: Any, given: dict[str, Any]) -> None:
            loaded.extend(self._values_in(given))

        def convert(_: Any) -> None:
            for old, new in zip(groups, self.param_groups, strict=True):
                new |= {**old, **new}  # the loaded group may lack options, such as "max_norm"
            for parameter, name, values in loaded:
                dtype = self._options.moments_of(parameter) if name in MOMENTS else torch.float32
                self.state[parameter][name] = torch.empty_like(parameter, dtype=dtype).copy_(values)

        # The caller's hooks may change the state that is loaded: `check` runs after the pre-hooks, `convert` before the
        # post-hooks.
        with (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(convert, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _values_in(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Checks a state that is to be loaded; yields each parameter's moments, master copy and average by name."""
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, parameter in zip(ids, self._parameters(), strict=False):  # PyTorch refuses a wrong number of ids
            state = state_dict["state"].get(i, {})
            missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in state]
            if state and missing:
                found = f"state_dict['state'][{i}] has {shown([*state])}, but no {missing[0]}"
                raise ArgumentError(f"{found}; it must be the state of an AdamW, or empty")
            for name in [each for each in (*MOMENTS, *_OTHERS) if each in state]:
                if state[name].shape != parameter.shape:
                    found = f"{name} of {self._name(parameter)} has shape {tuple(state[name].shape)} in state_dict"
                    raise ShapeError(f"{found}; it must be {tuple(parameter.shape)}, the parameter's shape")
                yield parameter, name, state[name]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def apply_settings(self) -> None:
        """Writes changed learning rates and weight decays to the GPU, for graphs that were captured from `step`.

        Values that were written into parameters also go into their master copies, and into their copies in FP8.

        Raises:
            CaptureError: the current stream is being captured, and settings have been changed.
        """
        for bucket in {*self._bucket_of.values()}:
            bucket.apply_settings()
        self.refresh()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def refresh(self) -> None:
        """Writes values that were written into parameters also into their master copies and their copies in FP8."""
        for bucket in {*self._bucket_of.values()}:
            bucket.refresh_masters()
            bucket.note_versions()
        fp8_steps.refresh(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients before the update.

        Returns:
            The loss that `closure` returns; None without a `closure`.

        Raises:
            DTypeError, LayoutError, DeviceError: a parameter or gradient is not accepted. Nothing has been updated.
            CaptureError: the stream is being captured, and a parameter has never been updated, or its group or state,
                or settings, have changed since the last step.
            GpuError: the driver or the compiler failed.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        active = [[each for each in group["params"] if each.grad is not None] for group in self.param_groups]
        parameters = [*chain.from_iterable(active)]
        if not parameters:
            fp8_steps.update_scales(self)
            return loss
        captures = updates.is_capturing(parameters[0])
        copies = fp8_steps.copies_for(self, captures=captures, is_fixed=captures or bool(self._captured))
        entries = {layer.weight: copy.entry for layer, copy in copies}
        updated = entries.keys() & {*parameters} if entries else ()
        tiles = {each: entries[each] for each in updated if are_aligned([each.grad])}
        prepared = self._prepared.get(self._key(active, tiles))
        if prepared is None or any(bucket.is_step_written for bucket in prepared.buckets):
            prepared = self._prepare(active, tiles)
        fp8_steps.update_scales(self)
        for bucket in prepared.buckets:
            bucket.refresh_masters()
        read = prepared.run(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        if captures:
            self._captured.append((prepared, read, [copy for _, copy in copies]))
        torch.autograd.graph.increment_version(parameters)
        for bucket in prepared.buckets:
            bucket.note_versions()
        for layer, copy in copies:
            (copy.note if layer.weight in prepared.tiles else copy.renew)(layer)
        self.grad_norm = prepared.grad_norm
        return loss

    def _parameters(self) -> Iterator[Tensor]:
        return (each for group in self.param_groups for each in group["params"])

    def _key(self, active: list[list[Tensor]], tiles: Tiles) -> tuple[Any, ...]:
        """The key of a prepared step: groups, parameters, states, addresses of their tensors, and forms of gradients.

        Addresses of gradients are left out, because they change in many steps. Groups, parameters and states are
        compared by id: a prepared step keeps them, so that no others get their ids. Tensors in the states are compared
        by address, because keeping them would keep the memory of tensors that the caller has replaced.

        Args:
            active: for each group, the parameters with gradients.
        """
        settings = [
            (id(group), len(some), group["amsgrad"], group.get("max_norm", "shared"))
            for group, some in zip(self.param_groups, active, strict=True)
        ]
        parameters = [*chain.from_iterable(active)]
        forms = [
            (each.dtype, each.layout is torch.strided and each.stride())
            for each in _locals([each.grad for each in parameters])
        ]
        states = [self.state[each] for each in parameters]
        ids = map(id, chain(parameters, states))
        addresses = map(torch.Tensor.data_ptr, _locals([*parameters, *[each for s in states for each in s.values()]]))
        return *settings, *forms, *ids, *addresses, frozenset(tiles.items())

    def _prepare(self, active: list[list[Tensor]], tiles: Tiles) -> HostStep:
        """Sorts the parameters with gradients into buckets, and prepares the launches for their present addresses."""
        parameters = [*chain.from_iterable(active)]
        for parameter in parameters:
            self._check(parameter, parameters[0])
        for group in self.param_groups:
            _check_max_norm(group.get("max_norm"))
        self._dissolve_buckets({*parameters})
        if updates.is_capturing(parameters[0]) and not self._bucket_of.keys() >= {*parameters}:
            raise CaptureError(
                "a parameter gets its first gradient, or another group or state, in a capture; run a step with all "
                "gradients before"
            )
        self._fill_buckets()
        buckets = [*dict.fromkeys(self._bucket_of[each] for each in parameters)]
        prepared = updates.step_class(parameters[0])(buckets, self._options, tiles)
        remember(self._prepared, self._key(active, tiles), prepared)
        return prepared

    def _dissolve_buckets(self, updated: set[Tensor]) -> None:
        """Drops buckets whose groups or states the caller has changed, and buckets that are only partly in `updated`.

        All parameters of a bucket have had equally many updates, which an update of only some of them would end.
        """
        groups = {each: group for group in self.param_groups for each in group["params"]}
        for bucket in {*self._bucket_of.values()}:
            is_divided = updated & bucket.states.keys() and not bucket.states.keys() <= updated
            if is_divided or not bucket.is_unchanged(self.state, groups):
                for parameter in bucket.states:
                    del self._bucket_of[parameter]
                self._prepared = {key: each for key, each in self._prepared.items() if bucket not in each.buckets}

    def _fill_buckets(self) -> None:
        """Puts parameters that have a gradient but no bucket into new ones."""
        found: dict[Any, dict[Tensor, dict[str, Tensor]]] = {}
        for i, group in enumerate(self.param_groups):
            for parameter in [each for each in group["params"] if each.grad is not None]:
                state = self._complete_state(parameter, group)
                if parameter not in self._bucket_of:
                    kind = i, float(state["step"]), state["exp_avg"].dtype
                    found.setdefault(kind, {})[parameter] = state
        for (i, *_), states in found.items():
            # Rounding takes its random numbers by the parameter's number, so that no two parameters may have the same.
            # Small numbers save memory, because a bucket holds settings for all numbers from 0 to its last.
            first = max((each.first + len(each.states) for each in self._bucket_of.values()), default=0)
            bucket = Bucket(states, self.param_groups[i], first, self._options)
            self._bucket_of.update(dict.fromkeys(states, bucket))

    def _complete_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Adds missing tensors to a parameter's state, and returns it; a new "step" is 0."""
        options = self._options
        state: dict[str, Tensor] = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0))
        for name in [*MOMENTS][: 3 if group["amsgrad"] else 2]:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=self._moments_type(parameter))
        has_master = parameter.dtype is torch.float16 or (parameter.dtype is torch.bfloat16 and options.masters)
        for name, wanted in zip(_OTHERS, (has_master, options.ema_decay is not None), strict=True):
            if wanted and name not in state:
                state[name] = parameter.detach().to(torch.float32, copy=True)
        return state

    def _moments_type(self, parameter: Tensor) -> Any:
        """The type of a parameter's moments: of its `exp_avg`, if the state has one, else of new moments."""
        found = self.state[parameter].get("exp_avg")
        return self._options.moments_of(parameter) if found is None else found.dtype

    def _check(self, parameter: Tensor, first: Tensor) -> None:
        """Raises unless the kernel can update a parameter from its gradient; `first` is the first parameter."""
        name, value, state = self._name(parameter), local(parameter), self.state.get(parameter, {})
        for each, of in ((value, name), (parameter.grad, f"{name}.grad")):
            if each.layout is not torch.strided:
                raise LayoutError(f"{of} is {each.layout}; accepted are dense tensors: make layers with sparse=False")
            if each.dtype not in DTYPES:
                raise DTypeError(f"{of} is {each.dtype}; accepted are float32, float16 and bfloat16")
        if value.device != first.device or value.device.type not in ("cuda", "cpu"):
            raise DeviceError(f"{name} is on {value.device}; all parameters must be on one GPU or all on the CPU")
        extent = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
        if value.numel() and extent != value.numel():
            raise LayoutError(f"{name} has strides {value.stride()}; there must be no gaps between its elements")
        held = {of: state[of] for of in (*MOMENTS, *_OTHERS) if of in state}
        for of, each in {f"{name}.grad": parameter.grad, **held}.items():
            found, wanted = _form(local(each)), _form(value)
            if found != wanted:
                raise LayoutError(
                    f"{of} of {name} has shape, strides and device {found}; they must be {wanted}, as those of the "
                    "parameter: make a new optimizer if it was moved or resized"
                )
        for of, each in held.items():
            accepted = {torch.float32} if of in _OTHERS else {self._moments_type(parameter)} & _MOMENTS_TYPES
            if each.dtype not in accepted:
                raise DTypeError(f"{of} of {name} is {each.dtype}; {_ACCEPTED}")
        norms = self._options.max_norm, *[group.get("max_norm") for group in self.param_groups]
        if value is not parameter and any(norms):
            raise ArgumentError(f"{name} is sharded, of which max_norm would see a shard; use clip_grad_norm_ instead")

    def _name(self, parameter: Tensor) -> str:
        """A parameter's name for errors: the name that its group gives it, else its position in the groups."""
        places = [(i, j) for i, group in enumerate(self.param_groups) for j in range(len(group["params"]))]
        i, j = next((i, j) for i, j in places if self.param_groups[i]["params"][j] is parameter)
        names: list[str] | None = self.param_groups[i].get("param_names")
        return names[j] if names else f"param_groups[{i}]['params'][{j}]"


def _locals(tensors: list[Tensor]) -> list[Tensor]:
    """Applies `local` to each tensor. Leaves out values of other types, which a caller may have put into a state."""
    if _PLAIN.issuperset(map(type, tensors)):
        return tensors
    return [local(each) for each in tensors if isinstance(each, torch.Tensor)]


def _check_max_norm(max_norm: Any) -> None:
    if max_norm is not None and not number("max_norm", max_norm) > 0:
        raise ArgumentError(f"max_norm is {max_norm}; it must be positive, or None")


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides and device of a tensor; the strides of axes of one element have no meaning and are 0."""
    strides = tuple(s * (n > 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(tensor.shape), strides, tensor.device
