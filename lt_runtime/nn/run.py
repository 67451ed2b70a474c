"""`Pass`: one run of a model, forward and backward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self

import numpy as np

from lt_runtime import ranges
from lt_runtime.arguments import check_instance, flag, integer, shown
from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.arrays.operand import HOST, device_of, library_of
from lt_runtime.errors import ArgumentError, CaptureError
from lt_runtime.fp8 import Fp8ChainProblem, Fp8Problem
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call, is_capturing
from lt_runtime.gpu.memory import StreamMemory, deferred_joins, join
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.ops._linear import LinearContext
from lt_runtime.ops.call import PreparedCall
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.problem import MLPProblem, Philox
from lt_runtime.ranges import range_of

if TYPE_CHECKING:
    from lt_runtime.tuner.chain import LayerChain, Tunable

PLACES: Final = 1 << 16
"""Number of dropout masks of a micro-batch: the n-th mask of micro-batch b has the layer id b · 65536 + n."""

_FORBIDDEN: Final = {900, *range(902, 909)}
"""CUDA statuses of calls that a capture forbids. 901 is left out: it means that the capture had failed before."""


class Met:
    """A context manager that records, for the tuner, the problems of the operations that its thread runs meanwhile.

    Args:
        all_threads: record the problems of all threads, such as the threads in which PyTorch runs backward passes.

    Attributes:
        problems: the problems that are not in `chains`, in the order in which they ran.
        chains: groups of consecutive linear layers whose backward has run, in a `Pass` whose `met` is this object.
        choices: layers that may be in FP8 or in their own type.
    """

    def __init__(self, *, all_threads: bool = False) -> None:
        self.problems: list[Any] = []
        self.chains: list[LayerChain] = []
        self.choices: list[Fp8ChainProblem] = []
        self._thread = None if all_threads else threading.get_ident()

    def __enter__(self) -> Self:
        ranges.watchers.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        ranges.watchers.remove(self._note)

    def _note(self, work: Any) -> None:
        if self._thread not in (None, threading.get_ident()):
            return
        if isinstance(work, Fp8ChainProblem):
            self.choices.append(work)
        if isinstance(work, PreparedCall):
            problem = work.request.problem
            products = work.plan.products.values() if work.plan and isinstance(problem, Fp8Problem) else ()
            self.problems += [each.problem for each in products] or [problem]

    def taken(self, start: int) -> list[Any]:
        """Removes the problems from index `start` on, and returns them."""
        taken, self.problems[start:] = self.problems[start:], []
        return taken

    def to_tune(self) -> list[Tunable]:
        """All that was recorded, each once: choices of the precision, chains of layers, and products."""
        from lt_runtime.tuner.chain import LayerChain, chains_of  # imported late, because only tuning needs the tuner

        narrow = [LayerChain.of_narrow(each) for each in self.problems if isinstance(each, MLPProblem)]
        return [*dict.fromkeys([*self.choices, *self.chains, *narrow, *chains_of(self.problems)])]


class Surrounded(Protocol):
    """The attributes of a block that `Pass` reads; see `Block`."""

    name: str
    has_range: ClassVar[bool]
    overwrites: ClassVar[bool]

    @property
    def title(self) -> str:
        """The name with the class, for errors."""


class Pass:
    """One run of a model, forward and, in training, backward. It holds what blocks keep, and gives gradient buffers.

    Blocks keep arrays on one stack. A block's backward takes what its forward kept, so backward runs in the reverse
    order of forward, and an array is freed as soon as its last reader has run. In your own loop::

        run = lt.Pass(optimizer.steps)
        y = model.forward(x, run)
        dy = lt.mse_loss(y, target).gradient
        model.backward(dy, run)
        run.finish()
        optimizer.step()

    Args:
        step: the number of the step, from which dropout's masks are drawn: an int, or an array of one uint32 on the
            model's device, such as an optimizer's `steps`. The array must not change before backward.
        micro_batch: the index of the input among the step's micro-batches. Each micro-batch has masks of its own.
        accumulate: add to the gradients instead of replacing them.
        trains: False for inference, which keeps nothing and has no dropout.
        frozen: parameters whose gradients are not computed.
        inputs: arrays whose gradients are not computed, such as the model's inputs. Blocks compare them by identity.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that each operation's first operand comes from.

    Attributes:
        step, micro_batch, trains, stream: as given.
        running: the innermost block whose forward or backward is running.
        without_dx: the first block whose backward has returned None since a backward last returned a gradient; named in
            errors. None if the latest backward returned a gradient.
        places: number of mask indices reserved for each micro-batch, so that micro-batches draw different masks.
        met: the `Met` that records, for the tuner, groups of consecutive linear layers; None to record nothing.
        has_db: whether the loss has made the bias gradient of the linear layer whose backward runs next.
        on_written: a function that gets parameters when all work of this pass so far on their gradients has been put
            on the stream; None if nothing waits for single gradients.
        memory: the memory of the stream if `deferring` may have an effect; None otherwise.
        written: the ids of the parameters whose gradients this pass has written.
        known: the ids of the parameters that may have gradients; None for all.
    """

    def __init__(
        self,
        step: Any = 0,
        *,
        micro_batch: int = 0,
        accumulate: bool = False,
        trains: bool = True,
        frozen: Collection[Parameter] = (),
        inputs: Sequence[Any] = (),
        stream: Any = None,
    ) -> None:
        self.step, self.micro_batch, self.stream = Philox(step=step).step, integer("micro_batch", micro_batch), stream
        if not 0 <= self.micro_batch < 1 << 32:
            raise ArgumentError(f"micro_batch is {shown(micro_batch)}; it must be in [0, 2**32)")
        stream_handle(stream, HOST)  # raises if `stream` is not a stream
        for name, given, kind in (("frozen", frozen, Collection), ("inputs", inputs, Sequence)):
            check_instance(name, given, kind, "a list or a tuple")
        for each in frozen:
            check_instance("a member of frozen", each, Parameter, "an lt.Parameter")
        self.trains = flag("trains", trains)
        self.places = PLACES
        self.met: Met | None = None
        self.has_db = False
        self.known: Set[int] | None = None
        self.on_written: Callable[[Sequence[Parameter]], None] | None = None
        # The block and parameter of each gradient buffer that was given and may not have been written yet.
        self._given: list[tuple[Surrounded | None, Parameter]] = []
        self.memory: StreamMemory | None = None
        self._read: tuple[Any, ...] = ()  # arrays read by a weight-gradient kernel that may still run
        self._accumulate, self._inputs = flag("accumulate", accumulate), inputs
        self._frozen, self.written = {id(each) for each in frozen}, set[int]()
        self._kept: list[tuple[Any, ...]] = []
        # For each forward without a backward so far: the block, the lengths of `_kept` and `_ran` before it, and of
        # `_kept` after it.
        self._ran: list[tuple[Surrounded, int, int, int]] = []
        self._start = self._masks = 0
        self.running: Surrounded | None = None
        self.without_dx: Surrounded | None = None

    @property
    def inference(self) -> Pass:
        """A pass on the same stream that keeps nothing, for a part of a model that is not trained."""
        return Pass(self.step, micro_batch=self.micro_batch, trains=False, stream=self.stream)

    def keep(self, *values: Any) -> None:
        """Keeps arrays or contexts for this block's backward; does nothing in inference."""
        if self.trains:
            self._kept.append(values)

    def take(self) -> Any:
        """Pops the values of the latest `keep` that has not been taken: a single value as it is, several as a tuple.

        Raises:
            ArgumentError: the running block's backward has taken all that its forward kept, or a part's backward is
                due, which takes these values.
        """
        name = self.running.title if self.running else "a block"
        if len(self._kept) <= self._start:
            raise ArgumentError(f"{name}.backward takes more than its forward kept: one run.take() for each run.keep()")
        part, start, _, end = self._ran[-1] if self._ran else (None, 0, 0, 0)
        if part is not None and start < len(self._kept) <= end:
            raise ArgumentError(f"{name}.backward takes what {part.title}.forward kept: call {part.title}.backward")
        values = self._kept.pop()
        return values[0] if len(values) == 1 else values

    def rng(self, seed: int) -> Philox | None:
        """The source of the next dropout mask; None in inference. Every call of a pass has a mask of its own."""
        if not self.trains:
            return None
        self._masks += 1
        return Philox(seed, self.micro_batch * self.places + self._masks - 1, self.step)

    @contextlib.contextmanager
    def array_module(self, x: Any) -> Iterator[Any]:
        """For a block that computes with NumPy or CuPy: yields the module for arrays on the device of `x`.

        Within, this pass's stream is CuPy's current one, so that CuPy's work is ordered with the operations' work::

            with run.array_module(x) as xp:
                y = xp.sin(x)
        """
        device = device_of("x", x)
        if device == HOST:
            yield np
            return
        with cupy_stream(device, stream_handle(self.stream, device, library_of(x).current_stream)) as module:
            yield module

    def needs_gradient(self, x: Any) -> bool:
        """Whether the gradient with respect to x is read: not if x is one of the model's inputs."""
        return all(x is not each for each in self._inputs)

    def trains_parameter(self, parameter: Parameter | None) -> bool:
        """Whether the parameter's gradient is computed: False if the parameter is None or frozen."""
        return parameter is not None and id(parameter.owner) not in self._frozen

    def grad(self, parameter: Parameter) -> tuple[Any, bool]:
        """The buffer for a parameter's gradient, None if it is frozen; and whether to add to the buffer's values.

        The first gradient of a pass replaces the values unless the pass accumulates; later ones, of tied weights, add.

        Raises:
            ArgumentError: the model of the training step does not have the parameter, so that nothing would train it.
        """
        if not self.trains_parameter(parameter):
            return None, False
        owner = id(parameter.owner)
        if self.known is not None and owner not in self.known:
            name = self.running.title if self.running else "the model"
            found = f"{name} has a parameter of shape {tuple(parameter.data.shape)}, which the step did not find"
            raise ArgumentError(
                f"{found}: keep parts in attributes, lists, tuples or dicts, and make them before the step"
            )
        adds = self._accumulate or owner in self.written
        if owner in self.written:
            self.join()  # the first gradient must be complete before another one is added
        self.written.add(owner)
        if self.on_written is not None:
            self._given.append((self.running, parameter.owner))
        return parameter.grad, adds

    def wrote(self) -> None:
        """Tells `on_written` that the running block has written all gradients whose buffers it got so far.

        `on_written` is also called at the end of each block's backward. The first call in a backward pass also
        reports the gradients that the loss has written: their buffers were given while no block was running.
        """
        if self.on_written is not None:
            self.join()
            done = [parameter for block, parameter in self._given if block in (None, self.running)]
            self._given = [each for each in self._given if each[0] not in (None, self.running)]
            self.on_written(done)

    def grads(self, *parameters: Parameter | None) -> tuple[list[Any], bool]:
        """The buffers of several gradients that one call writes, None for absent ones; and whether the call adds.

        If some gradients add and others replace, the others' buffers become zero, and the call adds to all.
        """
        found = [(None, False) if each is None else self.grad(each) for each in parameters]
        adds = any(each for _, each in found)
        for buffer, is_added in found:
            if adds and not is_added and buffer is not None:
                _clear(buffer, self.stream)
        return [buffer for buffer, _ in found], adds

    @contextlib.contextmanager
    def deferring(self, *read: Any) -> Iterator[None]:
        """Context manager around a layer's backward: in a graph, the weight gradient may run on after the `with` block.

        The stream waits for the weight gradient at the end of the next `deferring` block, around the next layer's
        backward, or in `join` if that comes first. Until then the weight gradient's matrix product uses multiprocessors
        that other kernels leave idle.

        Args:
            read: the arrays that the weight gradient is computed from, which are kept until then.
        """
        if self.memory is None:
            yield
            return
        with deferred_joins(self.memory):
            yield
        self._read = read

    def join(self) -> None:
        """Makes the stream wait for weight gradients that still run, see `deferring`."""
        if self.memory is not None and self._read:
            join(self.memory)
            self._read = ()

    def may_overwrite(self, y: Any) -> bool:
        """Whether outputs y that were just computed may be overwritten, because no backward reads their values."""
        contexts = self._kept[-1][0] if self._kept else None
        last = contexts[-1] if isinstance(contexts, list) and contexts else None
        # although the context of a linear layer refers to y, its backward may not read the values
        return isinstance(last, LinearContext) and last.y is y and last.saved is not y

    def release(self, y: Any) -> None:
        """Drops the context's reference to outputs y that were just computed, if no backward reads their values."""
        if self.may_overwrite(y):
            self._kept[-1][0][-1].y = None

    @contextlib.contextmanager
    def forward_of(self, block: Surrounded) -> Iterator[None]:
        """Context manager around a block's forward: opens its range, and adds the block's name to errors."""
        starts = len(self._kept), len(self._ran)
        with self._inside(block), _range("forward", block):
            yield
        if self.trains:
            self._ran.append((block, *starts, len(self._kept)))

    @contextlib.contextmanager
    def backward_of(self, block: Surrounded) -> Iterator[None]:
        """Context manager around a block's backward: opens its range, and adds the block's name to errors.

        It also checks that the backward takes all that the block's forward kept.

        Raises:
            ArgumentError: another block's backward is due; or this block's backward has not taken all that its forward
                kept, or has not called the backward of a part.
        """
        if not self.trains:
            raise ArgumentError(f"{block.title}.backward was called in a pass for inference; make it with trains=True")
        if not self._ran or self._ran[-1][0] is not block:
            due = f"{self._ran[-1][0].title}.backward is due" if self._ran else "no part.forward(x, run) is left"
            why = "backwards run in the reverse order of forwards, once each"
            raise ArgumentError(f"{block.title}.backward was called, but {due}: {why}")
        outer, (_, self._start, ran, _) = self._start, self._ran.pop()
        with self._inside(block):
            with _range("backward", block):
                yield
            self.wrote()
        if self.running is not None and self.running.overwrites:
            self.join()
        if len(self._ran) > ran:
            raise ArgumentError(f"{block.title}.backward has not called {self._ran[-1][0].title}.backward")
        if left := len(self._kept) - self._start:
            raise ArgumentError(f"{block.title}.backward has left {left} of what its forward kept: call run.take()")
        self._start = outer

    @contextlib.contextmanager
    def _inside(self, block: Surrounded) -> Iterator[None]:
        outer, self.running = self.running, block
        try:
            yield
        except Exception as error:
            if self._is_refused(error):
                rule = "a block must neither wait for the GPU, nor read its values, nor call cudaMalloc"
                raise CaptureError(f"{block.title} failed during the capture of a step: {error}; {rule}") from error
            if not hasattr(error, "__notes__"):  # only the innermost block adds its name to an error
                error.add_note(f"in {block.title}")
                if self.without_dx is not None and "NoneType" in str(error):
                    error.add_note(f"{self.without_dx.title}.backward has returned None")
            raise
        finally:
            self.running = outer

    def _is_refused(self, error: Exception) -> bool:
        """Whether CUDA or CuPy has raised an error because this pass's stream is being captured."""
        is_forbidden = type(error) is RuntimeError or getattr(error, "status", 0) in _FORBIDDEN
        return is_forbidden and isinstance(self.stream, int) and self.stream != 0 and is_capturing(self.stream)

    def clear_unwritten(self, parameters: Iterable[Parameter]) -> None:
        """Sets the gradient of each parameter to zero unless a backward of this pass has written the gradient."""
        for each in parameters:
            if id(each.owner) not in self.written:
                _clear(each.grad, self.stream)

    def finish(self) -> None:
        """Raises `ArgumentError` if a block's backward has not run."""
        if self._ran:
            raise ArgumentError(
                f"the forward of {self._ran[-1][0].title} has had no backward; for a part that shall not be trained, "
                "call its forward with run.inference"
            )


def _range(phase: str, block: Surrounded) -> contextlib.AbstractContextManager[Any]:
    return range_of(f"{phase}/{block.name}") if block.has_range and block.name else contextlib.nullcontext()


def _clear(buffer: Any, stream: Any) -> None:
    """Sets all bytes of a gradient to zero, in order on the stream."""
    device = device_of("gradient", buffer)
    if device == HOST:
        buffer[...] = 0
        return
    with activated(device):
        library = library_of(buffer)
        handle = stream_handle(stream, device, library.current_stream)
        size = buffer.size * buffer.dtype.itemsize
        call("cuMemsetD8Async", library.address(buffer), 0, size, handle)
