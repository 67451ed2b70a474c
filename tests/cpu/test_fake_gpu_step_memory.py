"""The memory of a training step on the pretended GPU, and that arrays which share memory do not disturb each other."""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from lt_runtime.kernels.resize import TABLE_BYTES
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

_ROWS, _LOSS_BYTES = 32, 256  # Each array takes a multiple of 256 bytes.


class _Case(NamedTuple):
    """A BF16 model, and the number of elements per row of a batch that a step has in memory at its peak.

    Attributes:
        inputs: widths of the inputs of all products but the first, which are outputs of the layers below.
        kept: widths of arrays saved for derivatives, other than the inputs.
        others: widths of outputs and gradients.
        scratch: bytes of scratch memory at the peak.
    """

    dims: list[int]
    inputs: list[int]
    kept: list[int]
    others: list[int]
    loss: str = "mse"
    output_activation: str | None = None
    parts: int = 1
    scratch: int = 256  # the loss's partial sum

    @property
    def peak(self) -> int:
        """Number of bytes of the layers' and the loss's arrays at the peak of a step, and of scratch memory."""
        return _ROWS // self.parts * 2 * sum(self.inputs + self.kept + self.others) + _LOSS_BYTES + self.scratch

    @property
    def batch(self) -> int:
        """Number of bytes of the graph's buffers for the batch and of the table with the batch's addresses."""
        targets = 8 * _ROWS if self.loss == "cross_entropy" else 2 * _ROWS * self.dims[-1]
        return 2 * _ROWS * self.dims[0] + targets + TABLE_BYTES


_CASES = {
    # The gradient of the outputs is written over the outputs. A layer's weight gradient may read the layer's inputs and
    # the gradient of its outputs until the backward pass of the layer below has ended, so that the first three
    # gradients exist together. Later gradients reuse memory.
    "two blocks": _Case([32, 160, 32, 160, 32], [160, 32, 160], [160, 32, 160], [32, 160, 32]),
    "equal layers": _Case([32, 160, 160, 160, 16], [160] * 3, [160] * 3, [16, 160, 160]),
    # The metrics' tally reads the outputs during the backward pass; so the loss's gradient needs memory of its own.
    "classes": _Case([32, 160, 32, 160, 32], [160, 32, 160], [160, 32, 160], [32, 32, 160, 32], "cross_entropy"),
    "few classes": _Case([16, 160, 16, 160, 16], [160, 16, 160], [160, 16, 160], [16, 16, 160, 16], "cross_entropy"),
    # The derivative of the last layer's activation is computed from the outputs; the third gradient has their memory.
    "output activation": _Case(
        [32, 160, 32, 160, 32],
        [160, 32, 160],
        [160, 32, 160, 32],
        [32, 160],
        output_activation="sigmoid",
        scratch=2 * 32 * 32,  # the gradient of the last layer's pre-activation
    ),
    "micro-batches": _Case([32, 160, 32, 160, 32], [160, 32, 160], [160, 32, 160], [32, 160, 32], parts=2),
}


@pytest.fixture(params=_CASES.values(), ids=_CASES)
def case(request: pytest.FixtureRequest) -> _Case:
    made: _Case = request.param
    return made


def _trained(gpu: FakeGpu, case: _Case) -> tuple[Any, Any]:
    """Makes a model and its optimizer on the pretended GPU."""
    options = {"dtype": "bfloat16", "device": 0, "seed": 3, "master_weights": False}
    model = gpu.lt.MLP(case.dims, "gelu", output_activation=case.output_activation, **options)
    return model, gpu.lt.AdamW(model.parameters(), lr=1e-2, moments="bfloat16", stochastic_rounding=True)


def _step(gpu: FakeGpu, case: _Case) -> Any:
    model, optimizer = _trained(gpu, case)
    step = gpu.lt.TrainStep(model, optimizer, loss=case.loss, batch_size=_ROWS, accumulate=case.parts, tune=False)
    gpu.streams.synchronize_all()  # steps run on another stream than the default stream, on which the model was made
    return step


def _batch(gpu: FakeGpu, case: _Case, seed: int) -> tuple[Any, Any]:
    generator, bfloat16 = np.random.default_rng(seed), gpu.cp.bfloat16
    x = generator.standard_normal((_ROWS, case.dims[0])).astype(bfloat16)
    if case.loss == "cross_entropy":
        return gpu.cp.asarray(x), gpu.cp.asarray(generator.integers(0, case.dims[-1], _ROWS))
    return gpu.cp.asarray(x), gpu.cp.asarray(generator.standard_normal((_ROWS, case.dims[-1])).astype(bfloat16))


def _taken(gpu: FakeGpu, make: Callable[[], Any], batch: tuple[Any, Any]) -> int:
    """Bytes that the graph of a new step holds."""
    first = make()
    first(*batch, stream=gpu.stream)  # The first step on a stream also allocates the stream's workspace.
    gc.collect()  # Garbage of other tests would otherwise be freed during the measurement.
    step, before = make(), gpu.memory_used()
    step(*batch, stream=gpu.stream)
    taken = gpu.memory_used() - before
    gpu.synchronize(gpu.stream.ptr)
    return taken


def test_the_peak(gpu: FakeGpu, case: _Case) -> None:
    assert _taken(gpu, lambda: _step(gpu, case), _batch(gpu, case, 0)) == case.peak + case.batch


_WIDTH, _HIDDEN = 32, 96


def _ones(gpu: FakeGpu, width: int) -> Any:
    return gpu.cp.asarray(np.ones((_ROWS, width), gpu.cp.bfloat16))


@pytest.mark.parametrize("recompute", [True, False])
def test_the_peak_of_gated_blocks(gpu: FakeGpu, recompute: bool) -> None:
    """From forward to backward each gated block keeps its normalised input, the gate and the value. It keeps the gated
    product too, unless backward recomputes the product."""
    options = {"dtype": "bfloat16", "device": 0, "master_weights": False}

    def block() -> Any:
        gated = gpu.lt.SwiGLU(_WIDTH, _HIDDEN, recompute=recompute, **options)
        return gpu.lt.Residual(gpu.lt.Chain(gpu.lt.RMSNorm(_WIDTH, **options), gated))

    def make() -> Any:
        model = gpu.lt.Chain(*(block() for _ in range(3)))
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", batch_size=_ROWS, tune=False)
        gpu.streams.synchronize_all()
        return step

    x, target = _ones(gpu, _WIDTH), _ones(gpu, _WIDTH)
    # The first block keeps no copy of x, which is the batch's array.
    kept = 3 * (_WIDTH + 2 * _HIDDEN + (0 if recompute else _HIDDEN)) + 2 * _WIDTH
    # These are the outputs and the gradient of the gated product. Without that product the peak comes later: the
    # gradients of the normalised input and of the last block's input exist as well, which is computed while the weight
    # gradient may still read the normalised input.
    others = _WIDTH + _HIDDEN + 2 * _WIDTH * recompute
    statistics, scratch = 3 * 256, 256  # of the norms; the partial sums of the loss, or of a norm's weight gradient
    expected = 2 * _ROWS * (kept + others + 2 * _WIDTH) + statistics + _LOSS_BYTES + scratch + TABLE_BYTES
    assert _taken(gpu, make, (x, target)) == expected


def test_the_peak_of_towers(gpu: FakeGpu) -> None:
    """The towers' outputs exist only as columns of the array that the layer above them reads."""
    options = {"dtype": "bfloat16", "device": 0, "master_weights": False, "activation": "gelu"}

    def tower() -> Any:
        return gpu.lt.Chain(gpu.lt.Linear(_WIDTH, _HIDDEN, **options), gpu.lt.Linear(_HIDDEN, _HIDDEN, **options))

    def make() -> Any:
        head = gpu.lt.Linear(2 * _HIDDEN, _WIDTH, **{**options, "activation": "none"})
        model = gpu.lt.Chain(gpu.lt.Parallel(tower(), tower(), split=False), head)
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", batch_size=_ROWS, tune=False)
        gpu.streams.synchronize_all()
        return step

    # Each tower keeps two pre-activations and an output; the layer above keeps the array of both towers' columns.
    kept = 2 * 3 * _HIDDEN + 2 * _HIDDEN
    # The model's outputs, and the gradients of the array of both towers' columns and of one tower's first output.
    others = _WIDTH + 2 * _HIDDEN + _HIDDEN
    scratch = 2 * _ROWS * _HIDDEN  # the gradient of a pre-activation
    expected = 2 * _ROWS * (kept + others + 2 * _WIDTH) + _LOSS_BYTES + scratch + TABLE_BYTES
    assert _taken(gpu, make, (_ones(gpu, _WIDTH), _ones(gpu, _WIDTH))) == expected


def test_the_peak_in_fp8(gpu: FakeGpu) -> None:
    """The peak is in the last layer's backward, which computes the gradient of the hidden layer's outputs in BF16.

    The model's outputs are freed before, because the loss has written their gradient in FP8, in both orientations.
    """
    inputs, hidden, outputs = 256, 512, 128
    model = gpu.lt.MLP([inputs, hidden, outputs], "gelu", dtype="bfloat16", device=0, precision=gpu.lt.FP8())
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", batch_size=_ROWS, tune=False)
    gpu.streams.synchronize_all()
    step(_ones(gpu, inputs), _ones(gpu, outputs))
    gpu.synchronize_all()
    # x's transpose; the pre-activation, the hidden outputs' transpose and their gradient; dy and its transpose.
    arrays = _ROWS * (inputs + (2 + 1 + 2) * hidden + 2 * outputs)
    assert arrays < step._gpu._latest.arena.size < arrays + 2048, "partial sums and copies of scales take little"


def test_the_same_as_by_single_calls(gpu: FakeGpu, case: _Case) -> None:
    """A step, whose arrays share memory, gives the same bits as single calls with new arrays for every result.

    The kernel of its loss also adds the loss to the step's metrics, except that of cross-entropy with many classes.
    """
    gpu.kernels.launched.clear()
    step, (model, optimizer) = _step(gpu, case), _trained(gpu, case)
    loss = getattr(gpu.lt, {"mse": "mse_loss"}.get(case.loss, case.loss))
    gpu.streams.synchronize_all()
    size, right = _ROWS // case.parts, 0
    for seed in range(3):
        x, target = _batch(gpu, case, seed)
        mean = step(x, target, stream=gpu.stream)
        losses = []
        for part in range(case.parts):
            rows = slice(part * size, (part + 1) * size)
            outputs, contexts = model.forward(x[rows], micro_batch=part, stream=gpu.stream)
            made = loss(outputs, target[rows], share=1 / case.parts, stream=gpu.stream)
            model.backward(made.gradient, contexts, accumulate=part > 0, stream=gpu.stream)
            losses.append(made.loss)
            if case.loss == "cross_entropy":
                gpu.synchronize(gpu.stream.ptr)
                scores = host_of(gpu, outputs).astype(np.float32)
                right += int((scores.argmax(axis=1) == host_of(gpu, target[rows])).sum())
        optimizer.step(stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        expected = sum((host_of(gpu, each) / np.float32(case.parts) for each in losses), np.float32(0))
        assert host_of(gpu, mean) == expected
        for one, other in zip(step.model.parameters(), model.parameters(), strict=True):
            assert host_of(gpu, one.data).tobytes() == host_of(gpu, other.data).tobytes(), one.name
    assert ("tally" in gpu.kernels.launched) == (case is _CASES["classes"])
    if case.loss == "cross_entropy":
        assert step.metrics(stream=gpu.stream).accuracy == right / (3 * _ROWS)


def test_a_call_that_a_block_binds_in_a_rehearsal_has_scratch_memory_of_its_own(gpu: FakeGpu) -> None:
    """A rehearsal's scratch memory is freed with its arrays; the graph of a bound call keeps using its own, 1 MiB."""
    lt, cp = gpu.lt, gpu.cp
    stream = importlib.import_module("lt_runtime.gpu.streams").private_stream(0, "training")
    importlib.import_module("lt_runtime.gpu.memory").release(0, stream)  # The stream has no memory before a first step.

    class Projection(lt.Block):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.x, self.y, self.bound, self.kept = _ones(gpu, _HIDDEN), _ones(gpu, _HIDDEN), None, 0
            self.target, self.loss = _ones(gpu, _HIDDEN), cp.asarray(np.ones((), np.float32))
            self.last = lt.Linear(_HIDDEN, _WIDTH, dtype="bfloat16", device=0)

        def forward(self, x: Any, run: Any) -> Any:
            lt.add(x, x, out=self.x, stream=run.stream)
            if self.bound is None:
                buffers = {"out_loss": self.loss, "out_gradient": self.y}
                lt.mse_loss(self.x, self.target, **buffers, stream=run.stream)
                used = gpu.memory_used()
                self.bound = lt.bind(lt.mse_loss, self.x, self.target, **buffers, stream=run.stream)
                self.kept = gpu.memory_used() - used
            self.bound()
            return self.last.forward(self.y, run)

        def backward(self, dy: Any, run: Any) -> None:
            self.last.backward(dy, run)

    model = Projection()
    step = lt.TrainStep(model, lt.AdamW(model.last.parameters()), loss="mse", batch_size=_ROWS, tune=False)
    step(_ones(gpu, _HIDDEN), _ones(gpu, _WIDTH))
    gpu.synchronize_all()
    assert model.kept == 1 << 20


def test_a_rehearsal_s_memory_is_freed_before_the_graph_s_is_allocated(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, allocate, used = _CASES["two blocks"], gpu.memory.allocate, list[int]()
    _step(gpu, case)(*_batch(gpu, case, 0), stream=gpu.stream)  # the first step on a stream allocates its workspace
    gc.collect()
    step, before = _step(gpu, case), gpu.memory_used()

    def watched(*given: Any) -> int:
        address = allocate(*given)
        used.append(gpu.memory_used() - before)
        return address

    monkeypatch.setattr(gpu.memory, "allocate", watched)
    step(*_batch(gpu, case, 1), stream=gpu.stream)
    gpu.synchronize(gpu.stream.ptr)
    assert max(used) < 1.2 * (gpu.memory_used() - before)


def test_smaller_batches_share_the_memory_of_larger_ones(gpu: FakeGpu) -> None:
    case = _CASES["two blocks"]
    step = gpu.lt.TrainStep(*_trained(gpu, case), loss=case.loss, batch_size=None, tune=False)
    gpu.streams.synchronize_all()
    x, target = _batch(gpu, case, 0)
    step(x, target, stream=gpu.stream)
    gc.collect()
    before = gpu.memory_used()
    step(x[:16], target[:16], stream=gpu.stream)
    gpu.synchronize(gpu.stream.ptr)
    assert gpu.memory_used() - before == 2 * 16 * (case.dims[0] + case.dims[-1]) + TABLE_BYTES


def test_an_array_that_a_block_holds_keeps_its_values_when_other_batches_are_trained_on(gpu: FakeGpu) -> None:
    """Each size is captured once: replacing an array of the rehearsal frees no memory, which would end the capture."""
    is_captured = importlib.import_module("lt_runtime.gpu.streams").is_captured

    class Held(gpu.lt.Block):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.layer = gpu.lt.Linear(_HIDDEN, _WIDTH, dtype="bfloat16", device=0)
            self.outputs, self.captures = None, 0

        def forward(self, x: Any, run: Any) -> Any:
            self.captures += is_captured(run.stream)
            y = self.layer.forward(x, run)
            self.outputs = gpu.lt.add(y, y, stream=run.stream)
            return y

        def backward(self, dy: Any, run: Any) -> None:
            self.layer.backward(dy, run)

    model = Held()
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=0.1), loss="mse", batch_size=None, tune=False)
    gpu.streams.synchronize_all()
    x, target = _ones(gpu, _HIDDEN), _ones(gpu, _WIDTH)
    held: Any = None
    for number, rows in enumerate((32, 24, 16, 12, 8), 1):
        before = None if held is None else host_of(gpu, held).copy()
        step(x[:rows], target[:rows])
        gpu.synchronize_all()
        assert before is None or host_of(gpu, held).tobytes() == before.tobytes()
        assert model.captures == number
        held = model.outputs


@pytest.mark.parametrize(("rows", "parts"), [([64] * 3, 2), ([32, 16, 8, 32, 16], 1)], ids=["micro-batches", "sizes"])
@pytest.mark.parametrize("binds", [True, False])
def test_a_call_of_a_block_on_its_own_buffers_trains_as_without_a_graph(
    gpu: FakeGpu, binds: bool, rows: list[int], parts: int
) -> None:
    """The call needs scratch memory, because a pass adds the addend after tanh, and the block makes it again."""
    options = {"dtype": "bfloat16", "device": 0}

    class Own(gpu.lt.Block):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.first = gpu.lt.Linear(_WIDTH, _HIDDEN, activation="gelu", seed=1, **options)
            self.last = gpu.lt.Linear(_HIDDEN, _WIDTH, seed=2, **options)
            self.x, self.w, self.a, self.y = (_random(gpu, seed, size) for seed, size in enumerate((32, 96, 32, 32)))
            self.call: Any = None

        def forward(self, x: Any, run: Any) -> Any:
            h = self.first.forward(x, run)
            twice = gpu.lt.add(h, h, stream=run.stream)
            given = {"add": self.a, "activation": "tanh", "out": self.y, "stream": run.stream}
            if binds and self.call is None:
                self.call = gpu.lt.bind(gpu.lt.linear, self.x, self.w, **given)
            (self.call if binds else functools.partial(gpu.lt.linear, self.x, self.w, **given))()
            return self.last.forward(gpu.lt.add(self.y[: len(h)], twice, stream=run.stream), run)

        def backward(self, dy: Any, run: Any) -> None:
            dh = self.last.backward(dy, run)
            self.first.backward(gpu.lt.add(dh, dh, stream=run.stream), run)

    def losses(*, graph: bool) -> list[float]:
        cache = importlib.import_module("lt_runtime.plans.cache")
        cache.repeats.clear()
        cache.calls.clear()
        model = Own()
        how = {"loss": "mse", "batch_size": None, "accumulate": parts, "tune": False, "graph": graph}
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW([*model.parameters()], lr=0.01), **how)
        gpu.streams.synchronize_all()
        found = []
        for i, count in enumerate(rows):
            batch = (_random(gpu, seed, count)[:, :_WIDTH].copy() for seed in (i, 9 + i))
            loss = step(*batch)
            gpu.synchronize_all()
            found.append(float(host_of(gpu, loss)))
        return found

    importlib.import_module("lt_runtime.ops.call").allowance._seconds = 1.0
    assert losses(graph=True) == losses(graph=False)


def _random(gpu: FakeGpu, seed: int, rows: int) -> Any:
    return gpu.cp.asarray(np.random.default_rng(seed).standard_normal((rows, _HIDDEN)).astype(gpu.cp.bfloat16))


def test_arrays_of_a_block_s_own_stream_share_no_memory_with_the_step_s(gpu: FakeGpu) -> None:
    """The pretended GPU fails at the end of the test if two streams use memory at the same time."""
    streams, options = importlib.import_module("lt_runtime.gpu.streams"), {"dtype": "bfloat16", "device": 0}
    side = streams.private_stream(0, "a block's own")

    class Beside(gpu.lt.Block):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.layer, self.sums = gpu.lt.Linear(_HIDDEN, _WIDTH, **options), _ones(gpu, _HIDDEN)

        def forward(self, x: Any, run: Any) -> Any:
            streams.order_after(side, run.stream)
            made = gpu.lt.add(x, x, stream=side)
            gpu.lt.add(made, made, out=self.sums, stream=side)
            del made
            twice = gpu.lt.add(x, x, stream=run.stream)
            streams.order_after(run.stream, side)
            return self.layer.forward(gpu.lt.add(twice, self.sums, stream=run.stream), run)

        def backward(self, dy: Any, run: Any) -> None:
            self.layer.backward(dy, run)

    model = Beside()
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.layer.parameters()), loss="mse", batch_size=_ROWS, tune=False)
    gpu.streams.synchronize_all()
    step(_ones(gpu, _HIDDEN), _ones(gpu, _WIDTH))
    gpu.synchronize_all()
