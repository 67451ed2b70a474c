"""Random public calls for the soak test: drawn from a seed, made a few times, and compared with the reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import ACTIVATIONS, Activation, Philox
from tests.support import attempts
from tests.support.attempts import Attempt, Prepare
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer, layer_case
from tests.support.matmul_checks import matmul_case
from tests.support.strategies import COMPUTES, LinearCase, MatmulCase, Placement

Generator = np.random.Generator

_AXES: Final = (1, 5, 8, 17, 24, 32, 40, 64, 77, 96, 128)
_GPU_TRAINING: Final = 1e-3  # absolute tolerance of a parameter: AdamW amplifies rounding errors of small gradients


def _pick(generator: Generator, values: Any) -> Any:
    return values[int(generator.integers(len(values)))]


def _chance(generator: Generator, share: float = 0.5) -> bool:
    return bool(generator.random() < share)


def _placement(generator: Generator) -> Placement:
    return Placement(_chance(generator), _pick(generator, (0, 0, 1, 3, 8)), _pick(generator, (0, 0, 0, 1, 8)))


def random_layer(generator: Generator, **fixed: Any) -> LinearCase:
    """Draws a random layer; `fixed` options are given and not drawn."""
    dtype, compute = _pick(generator, COMPUTES)
    drawn: dict[str, Any] = {name: _pick(generator, _AXES) for name in "mnk"}
    drawn |= {name: _placement(generator) for name in ("x", "w", "y", "dy", "dx", "dw")}
    drawn |= {name: _chance(generator) for name in ("bias", "accumulate", "keep_z")}
    drawn |= {"add": _placement(generator) if _chance(generator, 0.3) else None}
    drawn |= {"dtype": dtype, "compute": compute, "activation": _pick(generator, ACTIVATIONS)}
    drawn |= {"dropout": _pick(generator, (0.0, 0.0, 0.1, 0.5)), "rng": Philox(int(generator.integers(1 << 40)), 2, 5)}
    drawn |= {"need": tuple(_chance(generator, 0.8) for _ in range(3)), "data_seed": int(generator.integers(1 << 30))}
    drawn |= fixed
    drawn.setdefault("accumulate_dx", drawn["accumulate"] and _chance(generator))
    if drawn["compute"] == "tf32" and drawn["activation"] == "gelu":
        drawn["activation"] = "gelu_erf"  # the error of cuBLASLt's GELU of TF32 operands has no simple bound
    return layer_case(**drawn)


def random_product(generator: Generator, **fixed: Any) -> MatmulCase:
    """Draws a random matrix product; `fixed` options are given and not drawn."""
    dtype, compute = _pick(generator, COMPUTES)
    batches = _pick(generator, ((None, None, None), (None, None, None), (3, 3, 3), (2, None, 2)))
    epilogue = _pick(generator, tuple(Epilogue))
    d, with_c = _placement(generator), _chance(generator, 0.3)
    drawn: dict[str, Any] = {name: _pick(generator, _AXES) for name in "mnk"}
    drawn |= {"dtype": dtype, "d_dtype": dtype, "compute": compute, "epilogue": epilogue, "batches": batches}
    drawn |= {"a": _placement(generator), "b": _placement(generator), "c": d, "d": d, "with_c": with_c}
    drawn |= {"alpha": _pick(generator, (1.0, -0.5, 2.0)), "beta": _pick(generator, (0.0, 1.0, -0.5)) * with_c}
    drawn |= {"device_scalars": _chance(generator, 0.3), "data_seed": int(generator.integers(1 << 30))}
    return matmul_case(**drawn | fixed)


def _captured(generator: Generator) -> Prepare:
    """Captures forward and backward of a layer into a graph as a user does, by CuPy's capture of a stream."""
    case = random_layer(generator, accumulate=False, keep_z=True)

    def prepare(gpu: FakeGpu) -> Attempt:
        layer = Layer(gpu, case, gpu.stream)
        # This call makes the plans, which cannot be made during a capture.
        results = [layer.backward(layer.forward()[1])]
        gpu.stream.begin_capture()
        try:
            contexts = [layer.forward()[1]]
            results.append(layer.backward(contexts[0]))
        finally:
            graph = gpu.stream.end_capture()

        def check() -> None:
            assert contexts  # keeps the arrays alive that the graph writes
            layer.check_forward()
            layer.check_backward(results[-1])

        return Attempt(lambda: graph.launch(gpu.stream), check)

    return prepare


def _loss(generator: Generator) -> Prepare:
    rows, classes, seed = _pick(generator, _AXES), _pick(generator, (2, 10, 100)), int(generator.integers(1 << 30))
    scores = attempts.numbers(seed, rows, classes)
    if _chance(generator):
        name = _pick(generator, ("mse_loss", "huber_loss", "bce_with_logits"))
        targets = attempts.numbers(seed + 1, rows, classes)
        return attempts.against_host(name, (scores, np.abs(targets) if name == "bce_with_logits" else targets))
    return attempts.against_host("cross_entropy", (scores, attempts.labels(seed, rows, classes)))


def _add(generator: Generator) -> Prepare:
    seed, shape = int(generator.integers(1 << 30)), [_pick(generator, _AXES) for _ in range(2)]
    return attempts.against_host("add", (attempts.numbers(seed, *shape), attempts.numbers(seed + 1, *shape)))


def _dropout(generator: Generator) -> Prepare:
    seed = int(generator.integers(1 << 30))
    x = attempts.numbers(seed, _pick(generator, _AXES), _pick(generator, _AXES))
    return attempts.against_host("dropout", (x,), p=_pick(generator, (0.1, 0.5)), rng=Philox(seed))


def _gated(generator: Generator) -> Prepare:
    activation, sizes = _pick(generator, ("relu", "gelu", "silu")), [_pick(generator, _AXES) for _ in range(2)]
    return attempts.gated(activation, *sizes, p=_pick(generator, (0.0, 0.5)), seed=int(generator.integers(1 << 30)))


def _training(generator: Generator) -> Prepare:
    options = {"graph": _chance(generator, 0.7), "accumulate": _pick(generator, (1, 2))}
    return attempts.training(tolerance=_GPU_TRAINING, **options)


def _small_product(generator: Generator) -> MatmulCase:
    return random_product(generator, **{name: _pick(generator, (8, 16, 24)) for name in "mnk"})


def _small_layer(generator: Generator) -> LinearCase:
    """Tunes a small layer with the default options of `lt.tune`."""
    sizes = {name: _pick(generator, (8, 16, 24)) for name in "mnk"}
    return layer_case(**sizes, activation=Activation(_pick(generator, ("relu", "gelu", "tanh")), 0.25).name)


def _merge(_: Generator) -> Prepare:
    """Merges the plan file into itself, while other threads may add entries to it."""

    def prepare(gpu: FakeGpu) -> Attempt:
        plans = importlib.import_module(f"{gpu.lt.__name__}.store.plan_store")
        documents = importlib.import_module(f"{gpu.lt.__name__}.store.document")
        store = plans.plan_store(0)

        def call() -> None:
            if store.path.exists():
                _, is_saved = store.merge(documents.Document.read(store.path))
                assert is_saved

        def check() -> None:
            if store.path.exists():
                documents.Document.read(store.path)  # reading fails if an entry is damaged

        return Attempt(call, check)

    return prepare


OPERATIONS: Final[dict[str, Callable[[Generator], Prepare]]] = {
    "forward": lambda generator: attempts.forward(random_layer(generator)),
    "backward": lambda generator: attempts.backward(random_layer(generator)),
    "product": lambda generator: attempts.product(random_product(generator)),
    "bound": lambda generator: attempts.bind(random_layer(generator, keep_z=True, dropout=0.0)),
    "captured": _captured,
    "loss": _loss,
    "add": _add,
    "dropout": _dropout,
    "gated": _gated,
    "training": _training,
    "saved": lambda _: attempts.checkpoint(loads=False),
    "loaded": lambda _: attempts.checkpoint(loads=True),
    "prefetch": lambda _: attempts.prefetch,
    "tuned layer": lambda generator: attempts.tune(_small_layer(generator)),
    "tuned product": lambda generator: attempts.tuned_product(_small_product(generator)),
    "merged plans": _merge,
}
ALONE: Final = ("saved", "loaded")
"""Names of operations that synchronise the device, which the driver forbids while another thread captures."""
WEIGHTS: Final = {"forward": 6, "backward": 6, "product": 6, "bound": 3, "captured": 3}
"""Relative frequency of an operation; 1 for operations that are not named."""


def run(name: str, seed: int, gpu: Any) -> int:
    """Runs an operation one to six times on the GPU's test stream; returns the number of compared results.

    Raises:
        Exception: any error of the operation or of the comparison.
    """
    generator = np.random.default_rng(seed)
    with gpu.stream:
        attempt = OPERATIONS[name](generator)(gpu)
        calls = int(generator.integers(1, 7))
        for _ in range(calls):
            attempt.call()
            attempt.check()
    return calls
