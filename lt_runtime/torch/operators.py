"""Differentiable operators for PyTorch. Tracers see them in PyTorch's dispatcher; eager calls bypass the dispatcher."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.autograd import forward_ad

from lt_runtime.arrays.operand import fp64_on_host
from lt_runtime.errors import LtError
from lt_runtime.ops.call import AUTOGRAD_THREAD
from lt_runtime.ops.first_use import asked_for, is_tuning
from lt_runtime.torch.repeats import repeated
from lt_runtime.torch.tensors import Tensor, Tensors

Options: TypeAlias = tuple[Any, ...]
Needs: TypeAlias = Sequence[bool]
"""Whether each operand needs a gradient."""

LIBRARY: Final = torch.library.Library("lt_runtime", "DEF")
is_compiling: Final = torch.compiler.is_dynamo_compiling
_PLAIN: Final = {torch.Tensor, torch.nn.Parameter, type(None)}


class SecondDerivativeError(LtError, NotImplementedError):
    """The operators support no second or forward-mode derivatives, `torch.func` transforms or `torch.jit.trace`."""


class Operator(ABC):
    """A functional operator with a first derivative: NAME_fwd(operands, options, training) and NAME_bwd.

    PyTorch's dispatcher takes about 30 µs for an operator that is written in Python and has a gradient: longer than a
    small layer. So eager calls bypass it. Only tracers, dispatch modes and tensor subclasses see the registered
    operators.

    Attributes:
        name: the operator's name.
        options: the schema of its options. A last option, `training`, is appended. In forward it says whether a
            gradient will be computed; in backward, whether the saved tensors must stay intact: if not, results may be
            written over them, because the caller did not get them, and autograd frees them.
        visible: how many of the first outputs the caller gets; the others are kept for backward.
        is_repeatable: whether all its work on a GPU is calls of the package, so that `repeats` may record them.
    """

    name: str
    options: str
    visible: int = 1
    is_repeatable: bool = False

    def __init__(self) -> None:
        options = f"{self.options}, bool training"
        forward = f"{self.name}_fwd(Tensor?[] operands, {options}) -> Tensor[]"
        backward = f"{self.name}_bwd(Tensor?[] gradients, Tensor?[] saved, bool[] needs, {options}) -> Tensor[]"
        self._forward: Callable[..., list[Tensor]] = _define(forward, 1, self.run, self._fake)
        self._backward: Callable[..., list[Tensor]] = _define(backward, 3, self.run_backward, self.gradients)
        LIBRARY.impl(f"{self.name}_fwd", self._traced, "Autograd")
        self._apply: Callable[..., Tensors] = applied(_Differentiable, self.name)

    @abstractmethod
    def check(self, operands: Tensors, options: Options) -> None:
        """Raises an `LtError` that names the operand as the caller knows it, unless all operands are accepted."""

    @abstractmethod
    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """Makes the outputs, uninitialised: first those for the caller, then those that backward needs."""

    def compute(self, operands: Tensors, options: Options) -> list[Tensor]:
        """Computes the outputs of operands on a GPU or on the CPU."""
        outputs = self.outputs(operands, options)
        self.fill(outputs, operands, options)
        return outputs

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """Computes the outputs into tensors, for `compute`."""
        raise NotImplementedError

    def saved(self, operands: Tensors, outputs: Tensors, needs: Needs, options: Options) -> Tensors:
        """Chooses the tensors that backward reads. `needs` says which operands need a gradient."""
        return operands

    @abstractmethod
    def gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """Makes the gradients of the operands, uninitialised; None for operands that need none."""

    def compute_gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """Computes the gradients of the operands; None for operands that need none.

        Args:
            dys: the gradients of the visible outputs, None for one that is zero.
        """
        made = self.gradients(dys, saved, needs, options)
        self.fill_gradients(made, dys, saved, needs, options)
        return made

    def fill_gradients(self, made: Tensors, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> None:
        """Computes the gradients into tensors, for `compute_gradients`."""
        raise NotImplementedError

    def __call__(self, operands: tuple[Any, ...], options: Options) -> Any:
        """The visible outputs: a tensor, or a list if there are several.

        Raises:
            SecondDerivativeError: see `is_eager`.
            LtError: see `check`.
        """
        if is_eager(operands):
            device = operands[0].get_device()  # The result is -1 for the CPU.
            # Calls on a GPU that is not current would be planned anew each time.
            if device >= 0 and device != torch._C._cuda_getDevice():
                with torch.cuda.device(device):
                    return self(operands, options)
            training = torch.is_grad_enabled() and torch._C._any_requires_grad(*operands)
            outputs = self.eager(operands, options, training=training)
        else:
            if operands[0] is None or not all(map(_is_dense, operands)):
                self.check(operands, (*options, False))
            if not is_compiling():
                operands = tuple([each if each is None else each.resolve_neg() for each in operands])
            needed = [each is not None and each.requires_grad for each in operands]
            outputs = self._forward([*operands], *options, torch.is_grad_enabled() and True in needed)
        return outputs[0] if self.visible == 1 else outputs[: self.visible]

    def eager(self, operands: Tensors, options: Options, *, training: bool) -> Tensors:
        """Computes all outputs without the dispatcher; `training` says whether a gradient will be computed."""
        options = (*options, training)
        return self._apply(self, self.run, options, *operands) if training else self.run(operands, options)

    def run(self, operands: Tensors, options: Options) -> list[Tensor]:
        """Computes all outputs without the dispatcher."""
        if not operands[0].is_cuda:
            self.check(operands, options)
        elif self.is_repeatable:
            return repeated((self, options), operands, lambda: (self._computed(operands, options), None))[0]
        return self._computed(operands, options)

    def _computed(self, operands: Tensors, options: Options) -> list[Tensor]:
        token = fp64_on_host.set(True)
        try:
            return self.compute(operands, options)
        except Exception:  # for operands on a GPU `check` raises the error anew with the caller's names of the operands
            self.check(operands, options)
            raise
        finally:
            fp64_on_host.reset(token)

    def _fake(self, operands: Tensors, options: Options) -> list[Tensor]:
        self.check(operands, options)
        return self.outputs(operands, options)

    def run_backward(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """Computes the gradients without the dispatcher; see `compute_gradients`."""
        _name_autograds_thread()  # compiled code does not call `begin_backward`
        if self.is_repeatable and dys[0] is not None and dys[0].is_cuda:
            key, tensors = (self, options, tuple(needs), len(dys)), (*dys, *saved)
            return repeated(key, tensors, lambda: (self._gradients(dys, saved, needs, options), None))[0]
        return self._gradients(dys, saved, needs, options)

    def _gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        token = fp64_on_host.set(True)
        try:
            return self.compute_gradients(dys, saved, needs, options)
        finally:
            fp64_on_host.reset(token)

    def differentiate(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """The gradients of all operands, None where there is none."""
        if is_eager((*dys, *saved)):
            return self.run_backward(dys, saved, needs, options)
        dys = [dy if dy is None else dy.resolve_neg() for dy in dys]
        found = iter(self._backward(dys, [*saved], [*needs], *options[:-1], True))
        return [next(found) if need else None for need in needs]

    def _traced(self, operands: Tensors, *options: Any) -> list[Tensor]:
        """The function that PyTorch's dispatcher calls for the key Autograd: it records a node in autograd's graph."""
        if not torch.is_grad_enabled() and is_eager(operands):  # call by compiled code, whose backward is compiled too
            return _present(self.run(operands, _hashable(options)))
        if not options[-1]:
            return self._below_autograd(operands, options)
        return [*self._apply(self, self._below_autograd, _hashable(options), *operands)]

    def _below_autograd(self, operands: Tensors, options: Options) -> list[Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return self._forward([*operands], *options)


def _define(schema: str, leading: int, run: Any, make: Any) -> Any:
    """Defines an operator of the dispatcher, and returns it.

    Args:
        leading: the number of arguments before the options, which become one tuple.
        run: computes the outputs, of which those that are None are left out.
        make: makes the outputs uninitialised, for tracers.
    """
    name = schema.partition("(")[0]

    def over_options(function: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> list[Tensor]:
            return _present(function(*arguments[:leading], _hashable(arguments[leading:])))

        return call

    def fake(*arguments: Any) -> list[Tensor]:
        # For an operator outside `FALLBACK_ALLOW_LIST` PyTorch 2.11's Inductor makes a text of each input's whole
        # expression, whose length grows exponentially with the number of residual layers.
        if (inductor := sys.modules.get("torch._inductor.lowering")) is not None:
            inductor.FALLBACK_ALLOW_LIST.add(f"lt_runtime::{name}")
        return make_all(*arguments)

    make_all: Callable[..., list[Tensor]] = over_options(make)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, over_options(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lt_runtime::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lt_runtime, name).default


def _present(tensors: Tensors) -> list[Tensor]:
    return [each for each in tensors if each is not None]


class _Differentiable(torch.autograd.Function):
    """A call of an `Operator` as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, run: Any, options: Options, *operands: Tensor) -> tuple[Tensor, ...]:
        """Runs the operator by `run`, which takes the operands and the options."""
        outputs = run(operands, options)
        ctx.operator, ctx.options, ctx.is_tuning = operator, options[:-1], is_tuning()
        ctx.is_eager = run == operator.run
        ctx.save_for_backward(*operator.saved(operands, outputs, ctx.needs_input_grad[3:], options))
        ctx.set_materialize_grads(False)
        if ctx.is_eager:  # the caller gets the visible outputs only
            return tuple(outputs[: operator.visible])
        ctx.mark_non_differentiable(*outputs[operator.visible :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the operands."""
        operator: Operator = ctx.operator
        begin_backward(operator.name, ctx, *dys)
        dys, needs = dys[: operator.visible], ctx.needs_input_grad[3:]
        if not [dy for dy in dys if dy is not None]:
            return (None,) * (3 + len(needs))
        keeps = not ctx.is_eager or torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, None, *operator.differentiate(dys, ctx.saved_tensors, needs, (*ctx.options, keeps))


def applied(function: Any, name: str) -> Any:
    """The `apply` of an autograd function, which profilers show under the given name.

    `is_eager` has refused tensors of `torch.func`, so that this `apply` can skip PyTorch's search for them (5 µs).
    """
    return super(torch.autograd.Function, type(f"lt_runtime::{name}", (function,), {})).apply


class _Thread(threading.local):
    """`is_autograds` tells whether autograd has started the current thread.

    Python calls a thread that it did not start "Dummy-1" and so on. The new name tells the package that the thread
    synchronises only in backward passes: its existence then does not prevent repeated calls from becoming graphs.
    """

    def __init__(self) -> None:
        thread = threading.current_thread()
        self.is_autograds = thread.name.startswith("Dummy-")
        if self.is_autograds:
            thread.name = AUTOGRAD_THREAD


_thread: Final = _Thread()


def _name_autograds_thread() -> bool:
    """Names the current thread if autograd has started it; returns whether it has."""
    return _thread.is_autograds


def begin_backward(name: str, ctx: Any, *dys: Tensor) -> None:
    """Prepares a thread that autograd has started.

    The thread is within `lt.tuning()` if the forward pass was, as `ctx.is_tuning` says.

    Raises:
        SecondDerivativeError: autograd records this backward, or runs it for several gradients at once.
    """
    if _name_autograds_thread():
        asked_for.set(ctx.is_tuning)
    if torch.is_grad_enabled():
        raise SecondDerivativeError(
            f"backward with create_graph=True reached lt_runtime's {name}, which has no second derivative; "
            "use PyTorch's own layer where one is needed"
        )
    for dy in () if is_compiling() else dys:  # the compiler cannot trace the check
        if dy is not None and torch._C._functorch.is_legacy_batchedtensor(dy):
            raise SecondDerivativeError(
                f"is_grads_batched=True or vectorize=True reached lt_runtime's {name}; give one gradient at a time"
            )


def is_eager(tensors: Tensors) -> bool:
    """Whether a call may bypass the dispatcher: nothing traces it, and all tensors are plain ones that hold values.

    The memory of a lazily negated view, such as `z.conj().imag`, holds the values with the other sign. Only the first
    tensor is checked for this; `placed` negates the others, except contiguous tensors on a GPU.

    Raises:
        SecondDerivativeError: a transform of `torch.func` or `torch.jit.trace` is active, or a tensor has a
            forward-mode derivative.
    """
    if is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        raise SecondDerivativeError(
            "transforms of torch.func, such as grad and vmap, do not reach into lt_runtime's layers; use PyTorch's own"
        )
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise SecondDerivativeError(
            "lt_runtime's layers have no forward-mode derivative (torch.autograd.forward_ad); use PyTorch's own"
        )
    if torch._C._get_tracing_state() is not None:  # the trace would record memory that nothing fills
        raise SecondDerivativeError(
            "torch.jit.trace cannot record lt_runtime's layers; use torch.export, or PyTorch's own layers (ltt.restore)"
        )
    is_plain = _PLAIN.issuperset(map(type, tensors)) and not torch._C._len_torch_dispatch_stack()
    return is_plain and tensors[0] is not None and not (tensors[0].is_meta or tensors[0].is_neg())


def _has_tangent(operand: Any) -> bool:
    return isinstance(operand, torch.Tensor) and forward_ad.unpack_dual(operand).tangent is not None


def _is_dense(operand: Any) -> bool:
    is_strided = isinstance(operand, torch.Tensor) and operand.layout is torch.strided
    return operand is None or (is_strided and not operand.is_nested)


def _hashable(options: Sequence[Any]) -> Options:
    """Options as the dispatcher gives them, with tuples for lists."""
    return tuple([tuple(each) if isinstance(each, list) else each for each in options])
