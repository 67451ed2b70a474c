"""The suite `models`: training steps of residual, tied and two-tower models, against PyTorch's and JAX's.

Each step is one CUDA graph, measured as in the suite `steps`. Every contender holds parameters and moments in BF16,
without FP32 masters.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from benchmarks import report
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row
from benchmarks.steps import (
    AUTOTUNE,
    GRAPH,
    Setup,
    StepCase,
    StepContender,
    contender,
    graph_turn,
    memory_facts,
    memory_of,
    timed_calls,
)
from benchmarks.suite import JAX, MAX_AUTOTUNE, TORCH_COMPILE, Job, Suite, plan_cache
from benchmarks.timing import built, take_turns

NORM_EPSILON: Final = 1e-6
_TYPES: Final = {"parameters": "bfloat16", "masters": None, "moments": "bfloat16"}


@dataclass(frozen=True)
class ModelCase(StepCase):
    """Forward, loss, backward and AdamW of a model of blocks.

    Attributes:
        dims: numbers of columns of the inputs and of the outputs.
        form: "stack": residual blocks x + SwiGLU(RMSNorm(x)); "towers": two towers of two layers over the same inputs,
            and a layer over their outputs side by side; "autoencoder": two layers that share one weight.
        hidden: the width inside the blocks, of the towers, or of the code.
        layers: number of blocks of a stack.
    """

    form: str = "stack"
    hidden: int = 0
    layers: int = 1
    tune: ClassVar[bool | None] = True  # in the first rehearsal, because `lt.tune` knows only MLPs

    @property
    def _weights(self) -> tuple[int, int, int]:
        """Numbers of elements: of all weights of products, of all other parameters, and of the first layers' weights.

        A tied weight counts as often as it is multiplied.
        """
        (inputs, outputs), hidden = self.dims, self.hidden
        if self.form == "stack":
            return self.layers * 3 * inputs * hidden, self.layers * inputs, 0
        if self.form == "autoencoder":
            return 2 * inputs * hidden, hidden + inputs, inputs * hidden
        first = 2 * inputs * hidden
        return first + 2 * hidden * hidden + 2 * hidden * outputs, 4 * hidden + outputs, first

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        weights, others, _ = self._weights
        return others + (weights // 2 if self.form == "autoencoder" else weights)

    @property
    def flops(self) -> int:
        """Floating-point operations of the products, without the gradient of the model's inputs."""
        weights, _, first = self._weights
        return self.rows * (6 * weights - 2 * first)

    def model(self, device: str = "cuda:0") -> Any:
        """A new model."""
        import lt_runtime as lt

        (inputs, outputs), hidden = self.dims, self.hidden
        place: dict[str, Any] = {"dtype": self.dtype, "master_weights": self.master, "device": device}
        linear = partial(lt.Linear, **place)
        if self.form == "stack":
            norm, gated = partial(lt.RMSNorm, inputs, eps=NORM_EPSILON), partial(lt.SwiGLU, inputs, hidden)
            return lt.Chain(*(lt.Residual(lt.Chain(norm(**place), gated(**place))) for _ in range(self.layers)))
        gelu = partial(linear, activation=self.activation)
        if self.form == "towers":
            towers = (lt.Chain(gelu(inputs, hidden), gelu(hidden, hidden)) for _ in range(2))
            return lt.Chain(lt.Parallel(*towers, split=False), linear(2 * hidden, outputs))
        encoder = gelu(inputs, hidden)
        return lt.Chain(encoder, linear(hidden, outputs, weight=encoder.weight.T))

    def as_json(self) -> dict[str, Any]:
        """The case's fields as entries of its row, and the types of what every contender holds."""
        return super().as_json() | {"form": self.form, "hidden": self.hidden, "layers": self.layers, "types": _TYPES}


def case(form: str, rows: int, width: int, hidden: int, outputs: int | None = None, layers: int = 1) -> ModelCase:
    """A case in BF16, with mean squared error."""
    kind, dims = "silu" if form == "stack" else "gelu", (width, outputs or width)
    sizes = f"{layers} x {width}-{hidden}" if form == "stack" else "-".join(map(str, (width, hidden, dims[1])))
    return ModelCase(f"{form} {sizes}", "bf16", rows, dims, kind, "mse", False, form, hidden, layers)


CASES: Final = (
    case("stack", 8192, 1024, 2752, layers=12),
    case("stack", 4096, 512, 1376, layers=6),
    case("stack", 4096, 4096, 14336),
    case("towers", 8192, 1024, 2048, 256),
    case("autoencoder", 8192, 4096, 1024),
)


def measure(case: ModelCase, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step in an empty plan cache and lets all contenders take turns; those that fail are left out."""
    setup = Setup(case, stream)
    with plan_cache(keep=options.keep_plans):
        theirs = {} if options.ours else dict(peers(setup, options))
        contenders, left_out = built({"lt": partial(_ours, setup), **theirs})
        turns = {name: graph_turn(each, case.replays, stream) for name, each in contenders.items()}
        if "lt" in contenders:
            turns["lt_call"] = timed_calls(contenders["lt"].calls, case.replays, stream)
        timings = take_turns(turns, options.rounds)
    setting = case.as_json() | {"rounds": options.rounds, "replays": case.replays} | memory_facts(contenders)
    setting |= {"first_loss": {name: round(each.first_loss, 6) for name, each in contenders.items()}}
    return Row(case.name, timings, setting=setting, left_out=left_out, flops=case.flops)


def _ours(setup: Setup) -> StepContender:
    """Our step, which is tuned when it is made."""
    return contender(setup)._replace(memory=memory_of(setup.case, setup.stream))


def peers(setup: Setup, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], StepContender]]]:
    """Functions that build the contenders of other libraries, by contender."""
    modes = {GRAPH: None, TORCH_COMPILE: "default"} | ({MAX_AUTOTUNE: AUTOTUNE} if options.max_autotune else {})
    for name, mode in modes.items():
        yield name, peer("torch_models", "contender", setup, mode)
    if options.jax:
        yield JAX, peer("jax_models", "contender", setup)


def findings(rows: Sequence[Json]) -> list[Finding]:
    """Figures: every contender's time against ours, and our memory against PyTorch's."""
    memory = {row["case"]: row["memory_ratio"] for row in rows if "memory_ratio" in row}
    made = report.against_ours(rows, (GRAPH, TORCH_COMPILE, MAX_AUTOTUNE, JAX))
    return [*made, report.worst("memory of a step / PyTorch's", memory, at_most=True)] if memory else made


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    return {case.name: partial(measure, case, options) for case in CASES}


SUITE: Final = Suite(rounds=9, order=[case.name for case in CASES], jobs=_jobs, findings=findings)
