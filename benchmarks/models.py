"""The suite `models`: training steps of models such as those of examples/, against PyTorch's and JAX's.

Each step is one CUDA graph, measured as in the suite `steps`. Every contender holds parameters and moments in BF16,
without FP32 masters, and the averages of a target network in FP32.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from benchmarks import report
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row
from benchmarks.steps import Peer, Setup, StepCase, StepContender, contender, memory_of, timed_row
from benchmarks.suite import GRAPH, JAX, MAX_AUTOTUNE, TORCH_COMPILE, Suite, modes, plan_cache
from benchmarks.timing import built

NORM_EPSILON: Final = 1e-6
TAKEN: Final = "taken"
"""Name of DQN's loss: the squared error of the taken actions' values, `loss_of_taken` in examples/dqn.py."""
_TYPES: Final = {"parameters": "bfloat16", "masters": None, "moments": "bfloat16"}
_ACTIVATIONS: Final = {"stack": "silu", "feed_forward": "silu", "dqn": "relu"}  # Models of other forms use GELU.
_DECAY: Final = 0.995  # The decay of the moving average of DQN's parameters.


@dataclass(frozen=True)
class ModelCase(StepCase):
    """Forward, loss, backward and AdamW of a model of blocks.

    Attributes:
        dims: numbers of columns of the inputs and of the outputs.
        form: "stack": residual blocks x + SwiGLU(RMSNorm(x)); "feed_forward": a stack over tokens, then a norm and a
            layer; "towers": two towers of two layers over the same inputs, and a layer over their outputs side by side;
            "autoencoder": two layers that share one weight; "mixture": two experts of two layers, which a soft gate
            weighs; "dqn": an MLP with two hidden layers, `TAKEN` as its loss, and a target network, the moving average
            of the parameters. The values that the target network gives to the next states are in the batch.
        hidden: the width inside the blocks, of the towers, of the code, of the experts, or of the hidden layers.
        layers: number of blocks of a stack.
        tokens: number of rows that each element of a batch has, on an axis of its own if there are several.
    """

    form: str = "stack"
    hidden: int = 0
    layers: int = 1
    tokens: int = 1
    # The step tunes its layers in its first call, because `lt.tune` takes only MLPs by their dims.
    tune: ClassVar[bool | None] = True

    @property
    def _weights(self) -> tuple[int, int, int]:
        """Numbers of elements: of all weights of products, of all other parameters, and of the first layers' weights.

        A tied weight counts as often as it is multiplied.
        """
        (inputs, outputs), hidden = self.dims, self.hidden
        first, stack = inputs * hidden, self.layers * 3 * inputs * hidden
        return {
            "stack": (stack, self.layers * inputs, 0),
            "feed_forward": (stack + inputs * outputs, (self.layers + 1) * inputs + outputs, 0),
            "towers": (2 * (first + hidden * hidden + hidden * outputs), 4 * hidden + outputs, 2 * first),
            "autoencoder": (2 * first, hidden + inputs, first),
            "mixture": (2 * (inputs + first + hidden * outputs), 2 * (1 + hidden + outputs), 2 * (inputs + first)),
            "dqn": (first + hidden * hidden + hidden * outputs, 2 * hidden + outputs, first),
        }[self.form]

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        weights, others, _ = self._weights
        return others + (weights // 2 if self.form == "autoencoder" else weights)

    @property
    def flops(self) -> int:
        """Floating-point operations of a step's matrix products; none computes the gradient of the model's inputs."""
        weights, _, first = self._weights
        return self.rows * (6 * weights - 2 * first)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The axes of a batch before its columns."""
        return (self.rows,) if self.tokens == 1 else (self.rows // self.tokens, self.tokens)

    @property
    def decay(self) -> float | None:
        """The decay of the target network, if there is one."""
        return _DECAY if self.form == "dqn" else None

    @property
    def objective(self) -> Any:
        """The option `loss` of the training steps."""
        if self.loss != TAKEN:
            return self.loss
        from examples.dqn import loss_of_taken

        return loss_of_taken

    def model(self, device: str = "cuda:0", seed: int = 0) -> Any:
        """A new model, with other initial values for each seed."""
        import lt_runtime as lt

        (inputs, outputs), hidden, seeds = self.dims, self.hidden, itertools.count(100 * seed)
        place: dict[str, Any] = {"dtype": self.dtype, "master_weights": self.master, "device": device}

        def linear(*sizes: int, **options: Any) -> Any:
            return lt.Linear(*sizes, seed=next(seeds), **place, **options)

        def norm() -> Any:
            return lt.RMSNorm(inputs, eps=NORM_EPSILON, **place)

        def gated() -> Any:
            gated = lt.SwiGLU(inputs, hidden, recompute=True, seed=next(seeds), **place)
            return lt.Residual(lt.Chain(norm(), gated))

        active = partial(linear, activation=self.activation)
        if self.form in ("stack", "feed_forward"):
            last = (norm(), linear(inputs, outputs)) if self.form == "feed_forward" else ()
            return lt.Chain(*(gated() for _ in range(self.layers)), *last)
        if self.form == "towers":
            towers = (lt.Chain(active(inputs, hidden), active(hidden, hidden)) for _ in range(2))
            return lt.Chain(lt.Parallel(*towers, split=False), linear(2 * hidden, outputs))
        if self.form == "mixture":
            from examples.mixture import Mixture

            experts = (lt.Chain(active(inputs, hidden), linear(hidden, outputs)) for _ in range(2))
            return Mixture(linear(inputs, 2), *experts)
        if self.form == "dqn":
            return lt.Chain(active(inputs, hidden), active(hidden, hidden), linear(hidden, outputs))
        encoder = active(inputs, hidden)
        return lt.Chain(encoder, linear(hidden, outputs, weight=encoder.weight.T))

    def target(self) -> Any:
        """Random targets of a batch, on the GPU; for `TAKEN` a 1 for the taken action, and then its value."""
        if self.loss != TAKEN:
            return super().target()
        import cupy as cp

        rng, actions = np.random.default_rng(0), self.dims[-1]
        taken = np.eye(actions)[rng.integers(0, actions, self.rows)]
        return cp.asarray(np.c_[taken, rng.standard_normal(self.rows)].astype(np.float32))

    def as_json(self) -> dict[str, Any]:
        """The case's fields as entries of its row, and the types of parameters, masters, moments and averages."""
        facts = {"form": self.form, "hidden": self.hidden, "layers": self.layers, "tokens": self.tokens}
        averages = {} if self.decay is None else {"averages": "float32"}
        return super().as_json() | facts | {"types": _TYPES | averages}


def case(
    form: str,
    rows: int,
    width: int,
    hidden: int,
    outputs: int = 0,
    *,
    layers: int = 1,
    tokens: int = 1,
    kind: str = "bf16",
) -> ModelCase:
    """A case without FP32 masters, with `width` outputs if left at 0; its loss is "mse", or `TAKEN` for "dqn"."""
    dims, loss = (width, outputs or width), TAKEN if form == "dqn" else "mse"
    sizes = f"{layers} x {width}-{hidden}" if form in ("stack", "feed_forward") else f"{width}-{hidden}-{dims[1]}"
    activation = _ACTIVATIONS.get(form, "gelu")
    return ModelCase(f"{form} {sizes}", kind, rows, dims, activation, loss, False, form, hidden, layers, tokens)


CASES: Final = (
    case("stack", 8192, 1024, 2752, layers=12),
    case("stack", 4096, 512, 1376, layers=6),
    case("stack", 4096, 4096, 14336),
    case("feed_forward", 8192, 768, 2048, layers=8, tokens=512),
    case("towers", 8192, 1024, 2048, 256),
    case("autoencoder", 8192, 4096, 2048),
    case("mixture", 8192, 1024, 4096),
    case("dqn", 8192, 512, 4096, 32),
)


def measure(case: ModelCase, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step in an empty plan cache and lets all contenders take turns; those that fail are left out."""
    setup = Setup(case, stream)
    with plan_cache(keep=options.keep_plans):
        theirs = {} if options.ours else dict(peers(setup, options))
        contenders, left_out = built({"lt": partial(_ours, setup), **theirs})
        calls = {"lt"} & {*contenders}
        return timed_row(case, contenders, options, stream, left_out=left_out, calls=calls)


def _ours(setup: Setup) -> StepContender:
    """Our step, which is tuned when it is made."""
    return contender(setup)._replace(memory=memory_of(setup.case, setup.stream))


def peers(setup: Setup, options: argparse.Namespace) -> Iterator[Peer]:
    """Functions that build the contenders of other libraries, by contender."""
    for name, mode in modes(options, compiled=True).items():
        yield name, peer("torch_steps", "contender", setup, "bf16", compiled=mode)
    if options.jax:
        yield JAX, peer("jax", "step", setup)


def findings(rows: Sequence[Json]) -> list[Finding]:
    """Figures: every contender's time against ours, and our memory against PyTorch's."""
    memory = {row["case"]: row["memory_ratio"] for row in rows if "memory_ratio" in row}
    made = report.against_ours(rows, (GRAPH, TORCH_COMPILE, MAX_AUTOTUNE, JAX))
    return [*made, report.worst("memory of a step / PyTorch's", memory, at_most=True)] if memory else made


SUITE: Final = Suite.of(measure, CASES, rounds=9, findings=findings)
