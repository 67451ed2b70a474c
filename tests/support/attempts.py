"""Operations on a pretended GPU, prepared so that a test can repeat them while calls of the libraries fail."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import DType, Philox
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer, layer_case
from tests.support.matmul_checks import Product, matmul_case
from tests.support.norm_checks import NormCall
from tests.support.placed import COLUMNS, ODD, host_of
from tests.support.strategies import LinearCase, MatmulCase

ROWS: Final = 8
_DIMS: Final = [12, 16, 5]


@dataclass(frozen=True)
class Attempt:
    """A public operation of the package with its arguments, ready to be called.

    Attributes:
        call: runs the operation once more.
        check: compares the results of the last call with the reference, after all work.
        kept: arrays, besides the inputs, that must be unchanged after a call that fails.
    """

    call: Callable[[], Any]
    check: Callable[[], None]
    kept: Callable[[], list[Any]] = list


Prepare = Callable[[FakeGpu], Attempt]


def _after(calls: int, prepare: Prepare) -> Prepare:
    """Wraps an operation's preparation, so that the operation is called and checked `calls` times first."""

    def prepared(gpu: FakeGpu) -> Attempt:
        attempt = prepare(gpu)
        for _ in range(calls):
            attempt.call()
            attempt.check()
        return attempt

    return prepared


# Operations: layers and products


def forward(case: LinearCase) -> Prepare:
    """Prepares a layer's forward pass into buffers."""

    def prepare(gpu: FakeGpu) -> Attempt:
        layer = Layer(gpu, case, gpu.stream)
        return Attempt(layer.forward, layer.check_forward)

    return prepare


def backward(case: LinearCase) -> Prepare:
    """Prepares a layer's backward pass into buffers; it adds to them if the case accumulates."""

    def prepare(gpu: FakeGpu) -> Attempt:
        layer, results = Layer(gpu, case, gpu.stream), list[Any]()
        _, ctx = layer.forward()

        def call() -> None:
            results.append(layer.backward(ctx))

        return Attempt(call, lambda: layer.check_backward(results[-1], len(results)))

    return prepare


def product(case: MatmulCase) -> Prepare:
    """Prepares a matrix product into a buffer."""

    def prepare(gpu: FakeGpu) -> Attempt:
        product = Product(gpu, case, gpu.stream)
        return Attempt(product.run, product.check_results)

    return prepare


def bind(case: LinearCase) -> Prepare:
    """Prepares calls that each bind a layer's forward pass."""

    def prepare(gpu: FakeGpu) -> Attempt:
        layer, bound = Layer(gpu, case, gpu.stream), list[Any]()

        def call() -> None:
            bound[:] = [_bound_forward(gpu, layer)]

        def check() -> None:
            bound[0]()
            layer.check_forward()

        return Attempt(call, check)

    return prepare


def bound_call(gpu: FakeGpu) -> Attempt:
    layer = Layer(gpu, layer_case(keep_z=True), gpu.stream)
    return Attempt(_bound_forward(gpu, layer), layer.check_forward)


def _bound_forward(gpu: FakeGpu, layer: Layer) -> Any:
    assert layer.z is not None
    given = {**layer.settings(), "out": layer.y.array, "out_z": layer.z.array, "stream": gpu.stream}
    return gpu.lt.bind(gpu.lt.linear_fwd, layer.x.array, layer.w.array, layer.bias, **given)


def _raw(*, backward: bool) -> Prepare:
    def prepare(gpu: FakeGpu) -> Attempt:
        case = layer_case(keep_z=True)
        layer = Layer(gpu, case, gpu.stream)
        assert layer.z is not None
        x, w, y, z, dy = (each.array.data.ptr for each in (layer.x, layer.w, layer.y, layer.z, layer.dy))
        dx, dw, db, bias = (each.data.ptr for each in (layer.dx.array, layer.dw.array, layer.db, layer.bias))
        options = (case.m, case.k, case.n, False, True, "gelu", True, 0.0)

        def forward() -> None:
            gpu.lt.raw.forward_raw(x, w, bias, y, *options, True, z, stream=gpu.stream)

        def call() -> None:
            gpu.lt.raw.backward_raw(x, w, 0, dy, z, dx, dw, 0, db, *options, stream=gpu.stream)

        if not backward:
            return Attempt(forward, layer.check_forward)
        forward()
        gradients = SimpleNamespace(dx=layer.dx.array, dw=layer.dw.array, db=layer.db)
        return Attempt(call, lambda: layer.check_backward(gradients))

    return prepare


# Operations: losses, dropout and the optimizer


def against_host(name: str, arrays: tuple[Any, ...], **options: Any) -> Prepare:
    """Prepares a call of the public function `name`, which returns one or several arrays.

    The check compares the returned arrays with those of the same call on NumPy arrays.
    """

    def prepare(gpu: FakeGpu) -> Attempt:
        results: list[Any] = []
        with gpu.others_package() as lt:
            expected = getattr(lt, name)(*arrays, **_options(lt, options))
        placed = [gpu.cp.asarray(each) for each in arrays]

        def call() -> None:
            results[:] = [getattr(gpu.lt, name)(*placed, **_options(gpu.lt, options), stream=gpu.stream)]

        def check() -> None:
            gpu.synchronize(gpu.stream.ptr)
            pairs = zip(_parts(results[0]), _parts(expected), strict=True)
            for made, right in pairs:
                np.testing.assert_allclose(host_of(gpu, made), right, atol=1e-6)

        return Attempt(call, check)

    return prepare


def gated(activation: str, rows: int = ROWS, cols: int = 3, p: float = 0.5, seed: int = 3) -> Prepare:
    """Prepares a gated activation with dropout, and its gradient, both into new arrays."""
    arrays = numbers(seed, rows, 2 * cols), numbers(seed + 1, rows, cols)

    def run(lt: Any, h: Any, dy: Any, **stream: Any) -> tuple[Any, Any]:
        y, ctx = lt.gated_fwd(h, activation=activation, dropout=p, rng=lt.Philox(seed), **stream)
        return y, lt.gated_bwd(dy, ctx, **stream)

    def prepare(gpu: FakeGpu) -> Attempt:
        results = list[Any]()
        with gpu.others_package() as lt:
            expected = run(lt, *arrays)
        placed = [gpu.cp.asarray(each) for each in arrays]

        def call() -> None:
            results[:] = run(gpu.lt, *placed, stream=gpu.stream)

        def check() -> None:
            gpu.synchronize(gpu.stream.ptr)
            for made, right in zip(results, expected, strict=True):
                np.testing.assert_allclose(host_of(gpu, made), right, rtol=1e-5, atol=1e-5)

        return Attempt(call, check)

    return prepare


def norm(kind: str) -> Prepare:
    """Prepares the forward and the backward pass of LayerNorm or RMSNorm into buffers."""

    def prepare(gpu: FakeGpu) -> Attempt:
        made = NormCall(gpu, kind, (ROWS, 24))
        return Attempt(lambda: made.backward(made.forward()), made.check)

    return prepare


def _options(lt: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Chooses options; `rng` is made by `lt`, the copy of the package on the pretended GPU."""
    return {name: lt.Philox(value.seed) if name == "rng" else value for name, value in options.items()}


def _parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def numbers(seed: int, rows: int = ROWS, cols: int = 5) -> Any:
    """Draws a matrix of normal numbers."""
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def labels(seed: int, rows: int = ROWS, classes: int = 5) -> Any:
    """Draws a label for each row."""
    return np.random.default_rng(seed).integers(0, classes, rows)


def _optimizer(lt: Any, asarray: Callable[[Any], Any], **options: Any) -> Any:
    generator = np.random.default_rng(5)
    drawn = [[generator.standard_normal(shape).astype(np.float32) for _ in range(2)] for shape in ((9, 7), (7,))]
    if options.pop("scaled", False):
        options["scaler"] = lt.GradScaler(4.0, growth_interval=2)
    return lt.AdamW([lt.Parameter(*map(asarray, pair)) for pair in drawn], lr=1e-2, **options)


def _optimizer_state(gpu: FakeGpu, optimizer: Any) -> list[Any]:
    arrays = [each.data for each in optimizer.parameters] + [each.master for each in optimizer.parameters]
    arrays += [moment for moments in optimizer.moments for moment in moments]
    arrays += [optimizer.steps, optimizer.skipped_steps]
    arrays += [] if optimizer.scaler is None else [optimizer.scaler.scale, optimizer.scaler.growth_tracker]
    return [host_of(gpu, array).copy() for array in arrays if array is not None]


def _assert_equal(gpu: FakeGpu, optimizer: Any, host: Any, kind: str = "data", tolerance: float = 1e-6) -> None:
    """Compares the values or gradients of two optimizers' parameters; the second optimizer is on the host."""
    for one, other in zip(optimizer.parameters, host.parameters, strict=True):
        np.testing.assert_allclose(host_of(gpu, getattr(one, kind)), getattr(other, kind), atol=tolerance)


def adamw(*firsts: float, **options: Any) -> Prepare:
    """Prepares steps of an optimizer.

    One element of the gradient takes the values `firsts` in the first steps, and 0.5 later.
    """

    def prepare(gpu: FakeGpu) -> Attempt:
        optimizer = _optimizer(gpu.lt, gpu.cp.asarray, **options)
        with gpu.others_package() as lt:
            host = _optimizer(lt, np.asarray, **options)
        gradient, other_gradient = optimizer.parameters[0].grad, host.parameters[0].grad
        values = iter(firsts)

        def call() -> None:
            host_of(gpu, gradient)[0, 0] = next(values, 0.5)
            optimizer.step(stream=gpu.stream)

        def check() -> None:
            gpu.synchronize(gpu.stream.ptr)
            other_gradient[...] = host_of(gpu, gradient)
            with gpu.others_package():
                host.step()
            _assert_equal(gpu, optimizer, host)
            for one, other in ((optimizer.steps, host.steps), (optimizer.skipped_steps, host.skipped_steps)):
                assert int(host_of(gpu, one)[0]) == int(other[0])

        return Attempt(call, check, lambda: _optimizer_state(gpu, optimizer))

    return prepare


def _made_optimizer(**options: Any) -> Prepare:
    """Prepares calls that each make an optimizer and its first step."""

    def prepare(gpu: FakeGpu) -> Attempt:
        made: list[Any] = []

        def call() -> None:
            optimizer = _optimizer(gpu.lt, gpu.cp.asarray, **options)
            optimizer.step(stream=gpu.stream)
            made[:] = [optimizer]

        def check() -> None:
            with gpu.others_package() as lt:
                host = _optimizer(lt, np.asarray, **options)
                host.step()
            gpu.synchronize(gpu.stream.ptr)
            _assert_equal(gpu, made[0], host)

        return Attempt(call, check)

    return prepare


# Operations: training


def _run_of(lt: Any, device: str, **options: Any) -> tuple[Any, Any, Any]:
    """Makes a model, its optimizer and its training step."""
    model = lt.MLP(_DIMS, seed=3, device=device, dropout=0.25)
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, max_norm=1.0)
    return model, optimizer, lt.TrainStep(model, optimizer, **options)


def _batch(seed: int = 0) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((ROWS, _DIMS[0])).astype(np.float32), generator.integers(0, _DIMS[-1], ROWS)


def training(*, other_stream: bool = False, tolerance: float = 2e-5, **options: Any) -> Prepare:
    """Prepares training steps on one batch; with `other_stream` the first step is on a stream of its own."""

    def prepare(gpu: FakeGpu) -> Attempt:
        _, optimizer, step = _run_of(gpu.lt, "cuda", **options)
        with gpu.others_package() as lt:
            _, host_optimizer, host_step = _run_of(lt, "cpu", **options | {"graph": True})
        gpu.synchronize_all()  # initialises the model on the default stream; calls run on other streams
        batch = _batch()
        placed, losses = [gpu.cp.asarray(each) for each in batch], []
        streams = [gpu.other_stream] * other_stream + [gpu.stream] * 100

        def call() -> None:
            losses[:] = [step(*placed, stream=streams[0])]

        def check() -> None:
            gpu.synchronize(streams.pop(0).ptr)
            with gpu.others_package():
                expected = float(host_step(*batch))
            np.testing.assert_allclose(host_of(gpu, losses[0]), expected, rtol=tolerance)
            _assert_equal(gpu, optimizer, host_optimizer, tolerance=tolerance)

        return Attempt(call, check, lambda: _optimizer_state(gpu, optimizer))

    return prepare


def metrics(gpu: FakeGpu) -> Attempt:
    """Makes one step and returns its metrics. The metrics include earlier steps whose metrics a failing call did not
    return.
    """
    _, _, step = _run_of(gpu.lt, "cuda")
    gpu.synchronize_all()
    placed, read = [gpu.cp.asarray(each) for each in _batch()], list[Any]()
    steps = Counter[str]()

    def call() -> None:
        steps["begun"] += 1
        step(*placed, stream=gpu.stream)
        steps["done"] += 1
        read[:] = [step.metrics(stream=gpu.stream)]

    def check() -> None:
        assert steps["done"] <= read[0].steps <= steps["begun"]
        steps.clear()

    step(*placed, stream=gpu.stream)
    step.metrics(stream=gpu.stream)
    return Attempt(call, check)


def evaluation(gpu: FakeGpu) -> Attempt:
    """Prepares an evaluation: the metrics of a model over two batches."""
    model, _, _ = _run_of(gpu.lt, "cuda")
    batch, made = _batch(), list[Any]()
    with gpu.others_package() as lt:
        host_model, _, _ = _run_of(lt, "cpu")
        expected = lt.evaluate(host_model, [batch, batch])
    gpu.synchronize_all()
    placed = [gpu.cp.asarray(each) for each in batch]

    def call() -> None:
        made[:] = [gpu.lt.evaluate(model, [placed, placed], stream=gpu.stream)]

    def check() -> None:
        assert made[0].steps == 2
        np.testing.assert_allclose(made[0], expected, rtol=1e-5)

    return Attempt(call, check)


def model_gradients(gpu: FakeGpu) -> Attempt:
    """Prepares a model's forward and backward pass, called directly and not by a training step."""
    model, optimizer, _ = _run_of(gpu.lt, "cuda")
    (x, _), dy, made = _batch(), numbers(1), list[Any]()
    with gpu.others_package() as lt:
        host_model, host_optimizer, _ = _run_of(lt, "cpu")
        expected = host_model.backward(dy, host_model.forward(x, host_optimizer.steps)[1], need_dx=True)
    gpu.synchronize_all()
    placed = [gpu.cp.asarray(each) for each in (x, dy)]

    def call() -> None:
        _, contexts = model.forward(placed[0], optimizer.steps, stream=gpu.stream)
        made[:] = [model.backward(placed[1], contexts, need_dx=True, stream=gpu.stream)]

    def check() -> None:
        gpu.synchronize(gpu.stream.ptr)
        np.testing.assert_allclose(host_of(gpu, made[0]), expected, atol=2e-5)
        _assert_equal(gpu, optimizer, host_optimizer, "grad", 2e-5)

    return Attempt(call, check, lambda: _optimizer_state(gpu, optimizer))


def checkpoint(*, loads: bool) -> Prepare:
    """Prepares saving a training run, or loading its state into another run."""

    def prepare(gpu: FakeGpu) -> Attempt:
        path = Path(tempfile.mkdtemp(dir=gpu.directory)) / "run.safetensors"
        runs = [_run_of(gpu.lt, "cuda") for _ in range(2)]
        placed = [gpu.cp.asarray(each) for each in _batch()]
        for number, (_, _, step) in enumerate(runs):
            for _ in range(2 - number):
                step(*placed)
        gpu.synchronize_all()
        (model, optimizer, _), (other, other_optimizer, _) = runs
        gpu.lt.save_checkpoint(path, model, optimizer)
        written = path.read_bytes()

        def save() -> None:
            path.unlink(missing_ok=True)
            gpu.lt.save_checkpoint(path, model, optimizer)

        def check() -> None:
            assert path.read_bytes() == written
            assert [*path.parent.iterdir()] == [path]
            if loads:
                gpu.synchronize_all()
                pairs = zip(*(_optimizer_state(gpu, each) for each in (optimizer, other_optimizer)), strict=True)
                assert all(one.tobytes() == another.tobytes() for one, another in pairs)

        if loads:
            load = gpu.lt.load_checkpoint
            return Attempt(
                lambda: load(path, other, other_optimizer), check, lambda: _optimizer_state(gpu, other_optimizer)
            )
        return Attempt(save, check)

    return prepare


def prefetch(gpu: FakeGpu) -> Attempt:
    """Prepares prefetching of batches, one of them partly in page-locked memory."""
    batches, given = [_batch(seed) for seed in range(5)], list[Any]()
    batches.append((gpu.pin(64).view(np.float32), batches[0][1]))

    def call() -> None:
        given.clear()
        with gpu.lt.prefetch(iter(batches), device=0, stream=gpu.stream) as prefetched:
            for batch in prefetched:
                gpu.synchronize(gpu.stream.ptr)
                given.append([host_of(gpu, each).copy() for each in batch])

    def check() -> None:
        assert len(given) == len(batches)
        for made, right in zip(given, batches, strict=True):
            for one, other in zip(made, right, strict=True):
                np.testing.assert_array_equal(one, other)

    return Attempt(call, check)


# Operations: tuning


def tune(case: LinearCase) -> Prepare:
    """Prepares calls that each tune a layer."""

    def prepare(gpu: FakeGpu) -> Attempt:
        layer = Layer(gpu, case, gpu.stream)

        def call() -> None:
            gpu.lt.tune([case.k, case.n], case.m, activation=case.activation.name, progress=False)

        return Attempt(call, layer.check)

    return prepare


def tuned_product(case: MatmulCase) -> Prepare:
    """Prepares calls that each run a product within `lt.tuning()`, which tunes it first."""

    def prepare(gpu: FakeGpu) -> Attempt:
        product = Product(gpu, case, gpu.stream)

        def call() -> None:
            with gpu.lt.tuning():
                product.run()

        return Attempt(call, product.check_results)

    return prepare


_SMALL: Final = {"m": 16, "n": 8, "k": 16}


def _tuned(gpu: FakeGpu) -> Attempt:
    """Prepares the first run of a layer after it was tuned."""
    case = layer_case(**_SMALL, activation="relu")
    tune(case)(gpu).call()
    return forward(case)(gpu)


_HALF: Final = {"dtype": DType.BFLOAT16, "d_dtype": DType.BFLOAT16}
OPERATIONS: Final[dict[str, Prepare]] = {
    "linear_fwd": forward(layer_case(keep_z=True)),
    "linear_fwd by a pass": forward(layer_case(y=COLUMNS, activation="silu", dropout=0.5)),
    "linear_fwd, bound at its third call": _after(2, forward(layer_case())),
    "linear_bwd": backward(layer_case(dropout=0.5, rng=Philox(7, 3, 6))),
    "matmul": product(matmul_case(epilogue=Epilogue.GELU_AUX_BIAS)),
    "matmul with device scalars": product(matmul_case(with_c=True, alpha=2.0, beta=-0.5, device_scalars=True)),
    "matmul on padded copies": product(matmul_case(**_HALF, m=31, n=37, k=29, a=ODD)),
    "matmul with a bias gradient": product(matmul_case(epilogue=Epilogue.DRELU_BGRAD)),
    "matmul of nothing": product(matmul_case(k=0, with_c=True, beta=-0.5)),
    "bind": bind(layer_case(keep_z=True)),
    "a bound call": bound_call,
    "raw forward": _raw(backward=False),
    "raw backward": _raw(backward=True),
    "cross_entropy": against_host("cross_entropy", (numbers(3), labels(3))),
    "bce_with_logits": against_host("bce_with_logits", (numbers(3), np.abs(numbers(4)))),
    "add": against_host("add", (numbers(3), numbers(4))),
    "dropout": against_host("dropout", (numbers(3),), p=0.5, rng=Philox(4)),
    "gated_fwd and gated_bwd": gated("silu"),
    "layer_norm": norm("layer_norm"),
    "rms_norm": norm("rms_norm"),
    "AdamW": _made_optimizer(max_norm=1.0, scaled=True),
    "AdamW.step": adamw(max_norm=0.5, weight_decay=0.1),
    "AdamW.step with infinite gradients": _after(1, adamw(0.5, np.inf, scaled=True)),
    "TrainStep, captured": training(),
    "TrainStep, replayed": _after(1, training()),
    "TrainStep, replayed on another stream": _after(1, training(other_stream=True)),
    "TrainStep without a graph": training(graph=False, accumulate=2),
    "TrainStep.metrics": metrics,
    "MLP.forward and MLP.backward": model_gradients,
    "evaluate": evaluation,
    "prefetch": prefetch,
    "tune": tune(layer_case(**_SMALL, activation="relu")),
    "tuning": tuned_product(matmul_case(**_SMALL, epilogue=Epilogue.GELU_BIAS)),
    "a tuned layer": _tuned,
}
