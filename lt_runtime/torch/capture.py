"""`capture`: a training step of PyTorch's as CUDA graphs, one for each set of shapes and types of a batch's tensors."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from lt_runtime.arguments import Uncopied, flag, integer, shown
from lt_runtime.errors import ArgumentError, CaptureError, KindError, LayoutError, LtError, OperandError
from lt_runtime.gpu.graphs import no_collection
from lt_runtime.nn.run import Met
from lt_runtime.ops.first_use import before_first_step, is_step_tuned, not_tuning, within
from lt_runtime.torch.fp8_steps import followed
from lt_runtime.torch.tensors import Tensor

_INNER: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders of PyTorch and of this package: an error quotes the traceback's last line that is in neither folder."""
_REMEDIES: Final = (
    "a graph holds work on the GPU only: a step must not read a tensor's value (item(), float(), print, `if` on a "
    "tensor), wait for the GPU, or copy from the host"
)
_COMPILED: Final = (
    "torch.compile compiled a function during the capture, though it had not in the eager call before, or compiles in "
    "each call; TORCH_LOGS=recompiles tells why"
)
_FOLLOWED: Final = {"lr", "weight_decay"}
"""Optimizer options that `AdamW.apply_settings` writes to the GPU, so that captured graphs follow their changes."""
_MOST_COMPILING: Final = 16
"""Most eager calls of a shape after its `warm_up` calls: the step runs eagerly as long as torch.compile compiles."""
_one_at_a_time: Final = threading.Lock()
_is_inner: Final[ContextVar[bool]] = ContextVar("lt_runtime_is_inner_step", default=False)
"""Whether the calling thread is within the step of a `CapturedStep`. Other captured steps are then called eagerly."""


def capture(
    step: Callable[..., Any], *example_batch: Any, keep: int = 8, warm_up: int = 2, tune: bool | None = None
) -> CapturedStep:
    """Makes a training step run as one CUDA graph: `loss = captured(*batch)` does what `step(*batch)` does.

    Each call is one step, from the first on. The first `warm_up` calls with tensors of new shapes run `step` eagerly;
    the next call captures it. From then on a call copies the batch into the graph's inputs and launches the graph. So
    a shape that is rare, such as that of an epoch's last batch, needs no graph. If torch.compile has compiled anything
    in the last eager call or since, up to 16 more calls are eager, because it may have to compile `step` anew.

    Python runs in the eager calls and during the capture. Later calls repeat the work on the GPU: what Python decided
    then (branches, numbers, train or eval mode) stays as it was, and a tensor that lives from call to call must be
    written in place. Two kinds of work on the host go on: schedulers of `torch.optim.lr_scheduler` that `step` calls
    are called after each launch, and `lt_runtime.torch.AdamW` reads its learning rate and weight decay before it. Other
    optimizers need `capturable=True` where they have it, and a learning rate that changes must be a tensor on the GPU.
    A step that adds up gradients over several calls must zero them by `zero_grad(set_to_none=False)`. In other steps
    `.grad` is undefined after a call.

    Parameters may be written between calls. If the state of an optimizer was loaded or replaced, or a parameter that an
    optimizer holds was moved, frozen or unfrozen, the graphs are captured anew. If `step` calls another captured step,
    the graph of `step` includes its work. Without a GPU all calls run eagerly.

    Args:
        step: takes a batch; zeroes gradients, and runs forward, backward, optimizer and scheduler. It returns tensors,
            None, or tuples, lists or dicts of these.
        example_batch: a batch as `step` takes it, which is checked. Nothing is run. Its first tensor on a GPU decides
            the GPU of all calls; without one it is PyTorch's current GPU.
        keep: the number of shapes whose inputs and graphs are kept, at least 1; the least recently used are dropped.
        warm_up: the number of eager calls for each shape, at least 1. `DistributedDataParallel` needs 11.
        tune: whether the package's layers are measured in a shape's first call; see `lt_runtime.TrainStep`.

    Raises:
        ArgumentError: `keep` or `warm_up` is less than 1.
        KindError: `step` is not callable; `tune` is neither a bool nor None.
        OperandError: see `CapturedStep`.
    """
    if not callable(step):
        raise KindError(f"step is {shown(step)}; it must be a function that takes a batch")
    for name, value in (("keep", keep), ("warm_up", warm_up)):
        if integer(name, value) < 1:
            raise ArgumentError(f"{name} is {value}; it must be at least 1")
    tune = None if tune is None else flag("tune", tune)
    leaves, _ = pytree.tree_flatten(example_batch)
    _forms(leaves, example_batch)
    device = _gpu_of(leaves)
    if device is None:
        warnings.warn("there is no GPU: capture runs each step eagerly on the CPU", stacklevel=2)
    return CapturedStep(step, device, (keep, warm_up), tune)


@dataclass(eq=False)
class _Shape:
    """The shapes and types of a batch: the inputs of their graph, and the graph once it is captured.

    Attributes:
        inputs: the graph's input tensors, into which each batch is copied; None where the batch has None.
        calls: the number of eager calls.
        compilations: the number of graphs that torch.compile had compiled before the last eager call; None if the next
            call must be eager and measured as well.
        outputs: the result of `step`, which each launch of the graph fills.
        schedules: the calls of schedulers that `step` makes, to be made after each launch.
    """

    inputs: list[Tensor]
    calls: int = 0
    compilations: int | None = 0
    graph: Any = None
    outputs: Any = None
    schedules: list[Callable[[], Any]] = field(default_factory=list)


class CapturedStep(Uncopied):
    """The step that `capture` returns; call it with batches.

    A batch consists of tensors on any device, or None, in tuples, lists and dicts. Tensors in page-locked memory are
    copied while the host goes on: do not overwrite them before the GPU has read them. Results are new tensors without
    a gradient, which belong to the caller.

    Raises:
        OperandError: a batch has something else, or a tensor that is sparse or requires a gradient. Nothing was run.
        ArgumentError: an optimizer is not capturable, or an option that a graph holds as a number was changed.
        KindError: `step` returned something other than tensors.
        CaptureError: `step` does what a graph cannot hold; the message names the line.
    """

    _instead = "capture the step again"

    def __init__(self, step: Callable[..., Any], device: Any, limits: tuple[int, int], tune: bool | None) -> None:
        self._is_uncopied = device is not None
        self._step, self._device, self._tune = step, device, tune
        self._keep, self._warm_up = limits
        self._shapes: collections.OrderedDict[Any, _Shape] = collections.OrderedDict()
        self._optimizers = _Optimizers()
        self._stream: Any = None if device is None else torch.cuda.Stream(device)

    def __repr__(self) -> str:
        return f"CapturedStep({_name_of(self._step)}, {self.graphs} graphs)"

    @property
    def graphs(self) -> int:
        """The number of graphs, one for each captured shape."""
        return sum(each.graph is not None for each in self._shapes.values())

    def __call__(self, *batch: Any) -> Any:
        """Takes one step with a batch; see `capture`."""
        leaves, structure = pytree.tree_flatten(batch)
        key = structure, _forms(leaves, batch)
        if self._device is None or _is_inner.get():
            return self._results(self._step(*batch))
        with torch.cuda.device(self._device):
            if self._optimizers.have_changed():
                self.forget()
            shape = self._shapes.get(key) or self._new_shape(key, leaves)
            self._shapes.move_to_end(key)
            for into, each in zip(shape.inputs, leaves, strict=True):
                if each is not None:
                    into.copy_(each, non_blocking=True)
            if shape.graph is None:
                arguments = pytree.tree_unflatten(shape.inputs, structure)
                compiles = shape.compilations != _compilations() and shape.calls < self._warm_up + _MOST_COMPILING
                if compiles or shape.calls < self._warm_up:
                    return self._run(shape, arguments)
                self._capture(shape, arguments)
            return self._launch(shape)

    def forget(self) -> None:
        """Drops all graphs. Call it after a change that they do not follow, such as `model.eval()`."""
        self._shapes.clear()
        self._optimizers = _Optimizers()

    def _new_shape(self, key: Any, leaves: list[Tensor]) -> _Shape:
        while len(self._shapes) >= self._keep:
            self._shapes.popitem(last=False)
        made = [None if each is None else torch.empty_like(each, device=self._device) for each in leaves]
        return self._shapes.setdefault(key, _Shape(made))

    def _run(self, shape: _Shape, arguments: Any) -> Any:
        """Makes an eager call, on the stream of the captures, because the package's workspace belongs to a stream."""
        tunes = (not shape.calls or shape.compilations is None) and is_step_tuned(self._tune)
        shape.compilations = _compilations()
        with self._beside(), self._optimizers.noted(), not_tuning(), Met(all_threads=True) as met:
            made = self._step(*arguments)
        results = self._results(made)
        del made  # deleting the result also frees autograd's graph of the step
        shape.calls += 1
        if tunes and met.problems:
            torch.cuda.empty_cache()  # frees memory for the tuner, which does not use PyTorch's allocator
            measured = before_first_step(met.to_tune(), self._device.index, self._stream.cuda_stream)
            if measured and any(each.is_open for each in met.choices):
                shape.compilations = None  # layers that now run in FP8, or no longer, run other kernels than before
        return results

    def _launch(self, shape: _Shape) -> Any:
        self._optimizers.prepare()
        shape.graph.replay()
        results = self._results(shape.outputs)
        for each in shape.schedules:
            each()
        return results

    def _capture(self, shape: _Shape, arguments: Any) -> None:
        graph, schedules = torch.cuda.CUDAGraph(), list[Callable[[], Any]]()
        self._optimizers.hold_numbers()
        self._optimizers.prepare()
        # Graphs share a memory pool, because only one runs at a time. A pool whose graphs were all freed is unusable.
        pool = next((each.graph.pool() for each in self._shapes.values() if each.graph is not None), None)
        # In the mode "thread_local" other threads, such as those of a DataLoader, may allocate memory during the
        # capture.
        capturing = torch.cuda.graph(graph, pool, self._stream, "thread_local")
        compilations = _compilations()
        try:
            optimizers = self._optimizers.captured()
            with _one_at_a_time, self._beside(), _schedules_noted(schedules), no_collection(), capturing, optimizers:
                outputs = self._step(*arguments)
        except Exception as error:
            _forget_failed(graph, self._stream)
            raise self._explained(error, compiled=compilations != _compilations()) from error
        shape.outputs = pytree.tree_map(lambda each: each if each is None else each.detach(), outputs)
        shape.graph, shape.schedules = graph, schedules
        torch.cuda.empty_cache()  # the gradients of the last eager call are no longer used

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Makes the capture stream current within a `with` block, and orders it with the caller's stream.

        The block runs the step: see also `_is_inner` and `_no_needless_masks`.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), within(_is_inner), _no_needless_masks():
                yield
        finally:
            current.wait_stream(self._stream)

    def _results(self, made: Any) -> Any:
        """Copies of the tensors that `step` returned."""
        leaves, structure = pytree.tree_flatten(made)
        for each in leaves:
            if each is not None and not isinstance(each, torch.Tensor):
                found = f"{_name_of(self._step)} returned {shown(each)}"
                raise KindError(f"{found}; accepted are tensors and None, because a graph repeats other values")
        return pytree.tree_unflatten([each if each is None else each.detach().clone() for each in leaves], structure)

    def _explained(self, error: Exception, *, compiled: bool) -> CaptureError:
        """The error for a step that cannot be captured. It quotes the first error, which PyTorch's last one hides."""
        cause = error.__context__ or error
        frames = [each for each in traceback.extract_tb(cause.__traceback__) if not each.filename.startswith(_INNER)]
        place = f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
        remedies = "" if isinstance(cause, LtError) else f"; {_COMPILED if compiled else _REMEDIES}"
        summary = str(cause).partition("\n")[0]
        return CaptureError(f"{_name_of(self._step)} cannot be captured{place}: {summary}{remedies}")


def _forget_failed(graph: Any, stream: Any) -> None:
    """Ends what PyTorch leaves open after a failed capture: its allocator's pool, and its generator's capture.

    If the generator's capture stayed open, later calls that draw random numbers would fail. The next capture that
    succeeds ends it, so an empty graph is captured here.
    """
    with contextlib.suppress(RuntimeError):  # PyTorch may have ended the pool already
        torch._C._cuda_endAllocateToPool(stream.device_index, graph.pool())
    # Suppresses an error of the empty capture, which would hide the error of the step.
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), None, stream, "thread_local"):
            pass


class _Optimizers:
    """The optimizers that a step has run in eager calls, with the addresses and options that its graphs hold.

    Attributes:
        _found: for each optimizer the dicts of its state, and the result of `_form_of`, both after the first eager call
            that ran the optimizer. No other dict can get the id of a dict that is kept here.
        _numbers: for each optimizer the options that graphs hold as numbers, by index of the group and name.
    """

    def __init__(self) -> None:
        self._found: dict[Any, tuple[list[Any], list[int]]] = {}
        self._numbers: dict[Any, dict[tuple[int, str], Any]] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within a `with` block for an eager call, notes the optimizers that take a step and are not noted yet.

        An optimizer's step raises `ArgumentError` if the optimizer cannot be captured.
        """
        new: list[Any] = []

        def note(optimizer: Any, *_: Any) -> None:
            for i, group in enumerate(optimizer.param_groups):
                if not group.get("capturable", True) and not hasattr(optimizer, "apply_settings"):
                    found = f"param_groups[{i}] of {type(optimizer).__name__} has capturable=False"
                    raise ArgumentError(f"{found}; make it with capturable=True, or use lt_runtime.torch.AdamW")
            new.append(optimizer)

        try:
            with register_optimizer_step_pre_hook(note):
                yield
        finally:
            for each in new:
                self._found.setdefault(each, ([each.state, *each.state.values()], _form_of(each)))

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Wraps a capture in `followed`. In the `with` block an optimizer's first step raises `CaptureError`."""

        def check(optimizer: Any, *_: Any) -> None:
            if optimizer not in self._found:
                found = f"{type(optimizer).__name__} takes its first step in the capture"
                raise CaptureError(
                    f"{found}, and each launch of the graph would make its state anew; let every call of the captured "
                    "step run it, or raise warm_up until an eager call has run it"
                )

        with register_optimizer_step_pre_hook(check), followed(self.followed):
            yield

    def have_changed(self) -> bool:
        """Whether `_form_of` of an optimizer has changed since the first eager call that ran the optimizer."""
        return any(_form_of(optimizer) != form for optimizer, (_, form) in self._found.items())

    @property
    def followed(self) -> list[Any]:
        """The optimizers whose `apply_settings` is called before each launch."""
        return [each for each in self._found if hasattr(each, "apply_settings")]

    def hold_numbers(self) -> None:
        """Notes the options that the next graph will hold as numbers, for optimizers that no graph holds yet."""
        for optimizer in self._found.keys() - self._numbers.keys():
            self._numbers[optimizer] = {
                (i, name): group.get(name)
                for i, group in enumerate(optimizer.param_groups)
                for name in {*optimizer.defaults, "max_norm"} - (_FOLLOWED if optimizer in self.followed else set())
                if not isinstance(group.get(name), torch.Tensor)
            }

    def prepare(self) -> None:
        """Prepares a capture or a launch: writes changed options of optimizers that have `apply_settings` to the GPU.

        Raises:
            ArgumentError: an option was changed after `hold_numbers` noted it.
        """
        for optimizer, numbers in self._numbers.items():
            for (i, name), old in numbers.items():
                new = optimizer.param_groups[i].get(name)
                if new is not old and (isinstance(new, torch.Tensor) or new != old):
                    found = f"{name} of param_groups[{i}] of {type(optimizer).__name__} has changed from {shown(old)}"
                    raise ArgumentError(
                        f"{found}, which a graph holds as a number; make it a tensor on the GPU, use "
                        "lt_runtime.torch.AdamW, or call forget() after the change"
                    )
        for each in self.followed:
            each.apply_settings()


def _form_of(optimizer: Any) -> list[int]:
    """Numbers that change if a state of an optimizer is replaced, or a parameter is added, moved, frozen or unfrozen.

    They are the ids of the states, and the parameters' addresses, which are negated for frozen parameters.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    # This runs before each launch: calls of `local` would take too long.
    addresses = [
        address if each.requires_grad else -address
        for each in parameters
        for address in [getattr(each, "_local_tensor", each).data_ptr()]
    ]
    return [id(optimizer.state), *map(id, optimizer.state.values()), *addresses]


@contextlib.contextmanager
def _exchanged(owners: Iterable[Any], name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Within a `with` block, the attribute `name` of each owner is what `made` returns for its former value."""
    with contextlib.ExitStack() as restored:
        for owner in owners:
            former = getattr(owner, name)
            restored.callback(setattr, owner, name, former)
            setattr(owner, name, made(former))
        yield


def _schedules_noted(schedules: list[Callable[[], Any]]) -> contextlib.AbstractContextManager[None]:
    """Within a `with` block, calls of learning-rate schedulers' `step` are put into a list instead of being made."""

    def noting(original: Callable[..., Any]) -> Callable[..., None]:
        return lambda *arguments, **more: schedules.append(lambda: original(*arguments, **more))

    kinds = [LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return _exchanged([kind for kind in kinds if "step" in vars(kind)], "step", noting)


def _no_needless_masks() -> contextlib.AbstractContextManager[None]:
    """Within a `with` block, models of transformers make no attention mask where they are given none.

    In a capture, transformers 5.17 and older make a mask, with which PyTorch's attention may compute in FP32: a
    captured step of ViT-L takes twice as long. Warm-up calls run within the block too: torch.compile guards the
    identity of the replaced function, and would compile anew in the capture.
    """
    masks = sys.modules.get("transformers.masking_utils")
    return _exchanged([] if masks is None else [masks], "is_tracing", _tracing_of)


@functools.cache
def _tracing_of(is_tracing: Callable[[Any], bool]) -> Callable[..., bool]:
    return lambda mask=None: mask is not None and is_tracing(mask)


def _compilations() -> int:
    """The number of graphs that torch.compile has compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _gpu_of(leaves: list[Tensor]) -> Any:
    """The GPU of the first tensor that is on a GPU, else PyTorch's current GPU; None on a machine without a GPU."""
    if not torch.cuda.is_available():
        return None
    devices = (each.device for each in leaves if each is not None and each.is_cuda)
    return next(devices, None) or torch.device("cuda", torch.cuda.current_device())


def _forms(leaves: list[Any], batch: Any) -> tuple[Any, ...]:
    """Shape and type of each tensor of a batch; None for None.

    Raises:
        OperandError: the batch contains something else than tensors and None, or a tensor that cannot be copied into a
            graph's input.
    """
    for i, leaf in enumerate(leaves):
        is_tensor = isinstance(leaf, torch.Tensor)
        if leaf is None or (is_tensor and leaf.layout is torch.strided and not leaf.requires_grad):
            continue
        where = f"batch{pytree.keystr(pytree.tree_flatten_with_path(batch)[0][i][0])}"
        if not is_tensor:
            raise OperandError(f"{where} is {shown(leaf)}; accepted are tensors and None, in tuples, lists and dicts")
        if leaf.layout is not torch.strided:
            raise LayoutError(f"{where} is {leaf.layout}; accepted are dense tensors: {where}.to_dense()")
        raise OperandError(f"{where} requires a gradient, which a copy would not pass on; give {where}.detach()")
    return tuple([each if each is None else (each.shape, each.dtype) for each in leaves])


def _name_of(step: Callable[..., Any]) -> str:
    return getattr(step, "__qualname__", type(step).__name__)
