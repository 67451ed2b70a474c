"""The suite `kernels`: our kernels against the memory floor and PyTorch.

Contenders are CUDA graphs of repetitions of a task, whose buffers rotate through more memory than the L2 cache holds,
unless the case says otherwise. A fraction of the copy is our bandwidth, at the fewest bytes that the task moves, as a
fraction of the bandwidth of the best copy kernel in the same run.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks import buffers, timing
from benchmarks.buffers import Sets, itemsize, normal
from benchmarks.copies import Ceiling, measure_copies
from benchmarks.peers import peer
from benchmarks.report import NO_TARGET, Json, Row, Target
from benchmarks.suite import TORCH_COMPILE, Job, Suite, plan_cache
from benchmarks.timing import Contender

COPY: Final = "copy of 1 GiB"
_SHORT: Final = {"float32": "FP32", "bfloat16": "BF16"}
_RNG: Final = {"seed": 20, "layer": 1, "step": 7}

Shapes = tuple[tuple[int, ...], ...]
Builders = Mapping[str, Callable[[], Contender]]


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        bytes: the fewest that the task reads and writes.
        builders: what builds the contenders, by name, for a number of buffer sets; all read the same inputs.
        target: what has to be reached.
        rotated: whether repetitions rotate through several buffer sets. Not where launch latency is the point and all
            operands stay in the L2 cache, nor where a single set is many times as large as that cache.
    """

    name: str
    bytes: int
    builders: Callable[[int], Builders]
    target: Target = NO_TARGET
    rotated: bool = True


# dz = dropout'(dy) · GELU'(z) and its column sums, in BF16: six bytes an element.


def epilogue_backward(
    rows: int, cols: int, dropout: float = 0.0, *, target: Target = NO_TARGET, rotated: bool = True
) -> Case:
    """The derivative of activation and dropout, with the bias gradient."""
    also = f" + dropout {dropout}" if dropout else ""
    name = f"epilogue_bwd GELU{also} BF16 {rows}×{cols}, bias gradient"
    return Case(name, 6 * rows * cols, partial(_epilogue_backward, (rows, cols), dropout), target, rotated)


def _epilogue_backward(shape: tuple[int, int], dropout: float, sets: int) -> Builders:
    made = buffers.matrices(shape, "bfloat16", sets, 3)
    both = {
        "lt": partial(epilogue_backward_pass, made, dropout),
        "torch": peer("torch_kernels", "epilogue_backward", made, dropout),
        TORCH_COMPILE: peer("torch_kernels", "epilogue_backward", made, dropout, compiled=True),
    }
    if dropout:
        return {**both, "lt_without_dropout": partial(epilogue_backward_pass, made)}
    return {
        **both,
        "torch_without_bias_gradient": peer("torch_kernels", "gelu_backward", made),
        "lt_without_bias_gradient": partial(epilogue_backward_pass, made, db=False),
        "lt_transposed": partial(epilogue_backward_pass, made, transposed=True),
    }


def epilogue_backward_pass(made: Sets, dropout: float = 0.0, *, db: bool = True, transposed: bool = False) -> Contender:
    """dz and db from dy and the pre-activation; with `transposed`, dz is written transposed, through shared memory."""
    from benchmarks.internals import backward_pass

    addresses = [tuple(each.data.ptr for each in arrays) for arrays in made]
    run = backward_pass(made[0][0].shape, dropout, _RNG, db=db, transposed=transposed)
    return Contender(lambda i, stream: run(*addresses[i], stream))


# y = dropout(GELU(z)), in BF16: four bytes an element.


def epilogue_forward(rows: int, cols: int, dropout: float, *, target: Target = NO_TARGET) -> Case:
    """Activation and dropout."""
    name = f"epilogue_fwd GELU + dropout {dropout} BF16 {rows}×{cols}"
    return Case(name, 4 * rows * cols, partial(_epilogue_forward, (rows, cols), dropout), target)


def _epilogue_forward(shape: tuple[int, int], dropout: float, sets: int) -> Builders:
    made = buffers.matrices(shape, "bfloat16", sets, 2)

    def ours() -> Contender:
        from benchmarks.internals import forward_pass

        addresses = [tuple(each.data.ptr for each in arrays) for arrays in made]
        run = forward_pass(shape, dropout, _RNG)
        return Contender(lambda i, stream: run(*addresses[i], stream))

    return {
        "lt": ours,
        "torch": peer("torch_kernels", "epilogue_forward", made, dropout),
        TORCH_COMPILE: peer("torch_kernels", "epilogue_forward", made, dropout, compiled=True),
    }


# Dropout of x and of dy: two passes, each of which reads and writes once.


def dropout(dtype: str, rows: int, cols: int, p: float = 0.1, *, target: Target = NO_TARGET) -> Case:
    """Dropout forward and backward."""
    name = f"dropout {p} {_SHORT[dtype]} {rows}×{cols}, forward + backward"
    return Case(name, 4 * itemsize(dtype) * rows * cols, partial(_dropout, dtype, (rows, cols), p), target)


def _dropout(dtype: str, shape: tuple[int, int], p: float, sets: int) -> Builders:
    made = buffers.matrices(shape, dtype, sets, 4)

    def ours() -> Contender:
        import lt_runtime as lt

        rng = lt.Philox(**_RNG)

        def run(i: int, stream: int) -> None:
            x, dy, y, dx = made[i]
            lt.dropout(x, p, rng, out=y, stream=stream)
            lt.dropout(dy, p, rng, out=dx, stream=stream)

        return Contender(run)

    return {"lt": ours, "torch": peer("torch_kernels", "dropout", made, p)}


# AdamW: reads the gradient; reads and writes both moments and the FP32 parameter; writes the BF16 parameter, if any.


def adamw_step(
    model: str, shapes: Shapes, dtype: str, max_norm: float | None = None, *, target: Target = NO_TARGET
) -> Case:
    """One update of all tensors.

    Args:
        dtype: of parameters and gradients; BF16 parameters have FP32 masters.
        max_norm: gradients are clipped to this global norm, for which they are read once more.
    """
    is_fp32, clipping = dtype == "float32", ", clipped" if max_norm is not None else ""
    tensors = f"{len(shapes)} tensors" if len(shapes) > 1 else "one tensor"
    name = f"AdamW {'FP32' if is_fp32 else 'BF16 + FP32 master'}{clipping}, {model}, {tensors}"
    reads = 1 if max_norm is None else 2
    moved = 6 * 4 + (0 if is_fp32 else itemsize(dtype)) + reads * itemsize(dtype)
    builders = partial(_adamw, shapes, dtype, max_norm)
    return Case(name, moved * sum(map(math.prod, shapes)), builders, target, rotated=False)


def _adamw(shapes: Shapes, dtype: str, max_norm: float | None, _: int) -> Builders:
    def ours() -> Contender:
        step = optimizer_step(shapes, dtype, max_norm)
        return Contender(lambda _, stream: step(stream=stream))

    return {
        "lt": ours,
        "torch": peer("torch_kernels", "adamw", shapes, dtype, max_norm),
        TORCH_COMPILE: peer("torch_kernels", "flat_adamw", shapes, dtype, max_norm),
    }


def optimizer_step(shapes: Shapes, dtype: str = "float32", max_norm: float | None = None) -> Callable[..., object]:
    """The `step` of an AdamW over random parameters of those shapes."""
    import lt_runtime as lt

    parameters = [lt.Parameter(normal(shape, dtype), normal(shape, dtype)) for shape in shapes]
    return lt.AdamW(parameters, lr=1e-5, **({} if max_norm is None else {"max_norm": max_norm})).step


# Softmax cross-entropy and its gradient: the floor is one read of the logits and one write.


def cross_entropy(
    rows: int,
    classes: int,
    dtype: str = "bfloat16",
    *,
    weighted: bool = False,
    target: Target = NO_TARGET,
    rotated: bool = True,
) -> Case:
    """The loss and its gradient.

    Args:
        weighted: by class, and by row.
    """
    weights = ", class and row weights," if weighted else ""
    name = f"cross_entropy{weights} + gradient {_SHORT[dtype]} {rows}×{classes}"
    builders = _weighted_cross_entropy if weighted else _cross_entropy
    moved = 2 * itemsize(dtype) * rows * classes
    return Case(name, moved, partial(builders, dtype, (rows, classes)), target, rotated)


def _weighted_cross_entropy(dtype: str, shape: tuple[int, int], sets: int) -> Builders:
    made, targets = buffers.matrices(shape, dtype, sets, 2), buffers.labels(*shape)
    weights = {"row_weights": normal(shape[:1], "float32"), "class_weights": abs(normal(shape[1:], "float32"))}
    return {
        "lt": partial(our_cross_entropy, made, targets, **weights),
        "torch": peer("torch_kernels", "weighted_cross_entropy", made, targets, **weights),
        TORCH_COMPILE: peer("torch_kernels", "weighted_cross_entropy", made, targets, **weights, compiled=True),
    }


def _cross_entropy(dtype: str, shape: tuple[int, int], sets: int) -> Builders:
    made, targets = buffers.matrices(shape, dtype, sets, 2), buffers.labels(*shape)
    return {
        "lt": partial(our_cross_entropy, made, targets),
        "torch": peer("torch_kernels", "cross_entropy", made, targets),
        "torch_log_softmax": peer("torch_kernels", "log_softmax_gradient", made, targets),
        TORCH_COMPILE: peer("torch_kernels", "cross_entropy", made, targets, compiled=True),
    }


def our_cross_entropy(made: Sets, targets: Any, **weights: Any) -> Contender:
    """Loss and gradient, each into a given buffer."""
    import cupy as cp

    import lt_runtime as lt

    loss = cp.empty((), cp.float32)

    def run(i: int, stream: int) -> None:
        logits, gradient = made[i]
        lt.cross_entropy(logits, targets, **weights, out_gradient=gradient, out_loss=loss, stream=stream)

    return Contender(run)


# Means over all elements, and their gradients, in BF16: the floor is one read of both operands and one write.


def elementwise_loss(loss: str, rows: int, cols: int, *, weighted: bool = False, target: Target = NO_TARGET) -> Case:
    """The loss of that name and its gradient.

    Args:
        weighted: by row, and by column where there are weights of positive targets.
    """
    name = f"{loss}{', weighted,' if weighted else ''} + gradient BF16 {rows}×{cols}"
    return Case(name, 6 * rows * cols, partial(_elementwise_loss, loss, (rows, cols), weighted), target)


def _elementwise_loss(loss: str, shape: tuple[int, int], weighted: bool, sets: int) -> Builders:
    made, weights = buffers.matrices(shape, "bfloat16", sets, 3), dict[str, Any]()
    if weighted:
        weights["row_weights"] = normal(shape[:1], "float32")
        if loss == "bce_with_logits":
            weights["pos_weight"] = abs(normal(shape[1:], "float32"))

    def ours() -> Contender:
        import cupy as cp

        import lt_runtime as lt

        number, function = cp.empty((), cp.float32), getattr(lt, loss)

        def run(i: int, stream: int) -> None:
            prediction, wanted, gradient = made[i]
            function(prediction, wanted, **weights, out_gradient=gradient, out_loss=number, stream=stream)

        return Contender(run)

    return {
        "lt": ours,
        "torch": peer("torch_kernels", "elementwise_loss", loss, made, **weights),
        TORCH_COMPILE: peer("torch_kernels", "elementwise_loss", loss, made, **weights, compiled=True),
    }


# A layer for a few rows: the floor is one read of the weights.


def inference(rows: int, outputs: int, inputs: int, *, target: Target = NO_TARGET) -> Case:
    """y = GELU(x · wᵀ + bias) in BF16, tuned, and nothing kept for backward."""
    moved = 2 * (outputs * inputs + rows * inputs + outputs + rows * outputs)
    shape = rows, outputs, inputs
    return Case(f"linear GELU BF16 {rows}×{outputs}×{inputs}", moved, partial(_inference, shape), target)


def _inference(shape: tuple[int, int, int], sets: int) -> Builders:
    rows, outputs, inputs = shape
    shapes = (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)
    made = [tuple(normal(each, "bfloat16") for each in shapes) for _ in range(sets)]

    def ours() -> Contender:
        import lt_runtime as lt

        def run(i: int, stream: int) -> None:
            x, w, bias, y = made[i]
            lt.linear(x, w, bias, activation="gelu", out=y, stream=stream)

        with plan_cache(), lt.tuning():
            run(0, 0)
        timing.synchronize()
        return Contender(run)

    return {
        "lt": ours,
        "torch": peer("torch_kernels", "linear", made),
        "torch_addmm_activation": peer("torch_kernels", "addmm_activation", made),
        TORCH_COMPILE: peer("torch_kernels", "linear", made, compiled=True),
    }


_WIDTH: Final = 768
_GPT2_BLOCK: Final[Shapes] = (
    *((_WIDTH,), (_WIDTH,)),  # layer norm
    *((3 * _WIDTH, _WIDTH), (3 * _WIDTH,), (_WIDTH, _WIDTH), (_WIDTH,)),  # attention
    *((_WIDTH,), (_WIDTH,)),  # layer norm
    *((4 * _WIDTH, _WIDTH), (4 * _WIDTH,), (_WIDTH, 4 * _WIDTH), (_WIDTH,)),  # MLP
)
GPT2: Final[Shapes] = ((50257, _WIDTH), (1024, _WIDTH), *(_GPT2_BLOCK * 12), (_WIDTH,), (_WIDTH,))
"""The tensors of GPT-2 with 124 million parameters."""
GPT2_NAME: Final = "GPT-2 124M"
GPT2_IN_ONE: Final[Shapes] = ((sum(map(math.prod, GPT2)),),)
"""GPT-2's parameters as one flat tensor, which is what torch.compile updates in all rows of AdamW."""
SMALL: Final[Shapes] = ((64, 64), (64,)) * 3

_DROPOUT_IS_CHEAP: Final = Target(ratio={"lt_without_dropout": 1 / 1.04})

CASES: Final[Sequence[Case]] = (
    epilogue_backward(8192, 3072, target=Target(0.88, {"torch": 1.5})),
    epilogue_backward(8192, 12288, target=Target(0.93, {"torch": 1.33})),
    epilogue_backward(8192, 3071, target=Target(0.6, {"torch": 1.0})),
    epilogue_backward(8192, 3072, 0.1, target=_DROPOUT_IS_CHEAP),
    epilogue_backward(8192, 12288, 0.1, target=_DROPOUT_IS_CHEAP),
    epilogue_backward(256, 512, target=Target(ratio={"torch_without_bias_gradient": 1.0}), rotated=False),
    epilogue_forward(8192, 3072, 0.1, target=Target(0.88)),
    dropout("bfloat16", 8192, 8192, target=Target(0.9, {"torch": 1.2})),
    dropout("float32", 8192, 8192, target=Target(0.9, {"torch": 1.2})),
    adamw_step(GPT2_NAME, GPT2, "float32", target=Target(0.96, {"torch": 1.15})),
    adamw_step(GPT2_NAME, GPT2, "bfloat16", 1.0, target=Target(0.92)),
    adamw_step("124 M parameters", GPT2_IN_ONE, "float32", target=Target(ratio={TORCH_COMPILE: 1.0})),
    adamw_step("124 M parameters", GPT2_IN_ONE, "bfloat16", 1.0, target=Target(ratio={TORCH_COMPILE: 1.0})),
    adamw_step("12 k parameters", SMALL, "float32", target=Target(ratio={"torch": 1.0})),
    cross_entropy(8192, 50304, target=Target(0.85)),
    cross_entropy(8192, 50304, "float32", target=Target(0.85)),
    cross_entropy(4096, 128256, target=Target(0.85)),
    cross_entropy(65536, 1000),
    cross_entropy(8192, 10, rotated=False),
    cross_entropy(8192, 50304, weighted=True, target=Target(0.85)),
    elementwise_loss("mse_loss", 8192, 4096),
    elementwise_loss("huber_loss", 8192, 4096),
    elementwise_loss("bce_with_logits", 8192, 4096),
    elementwise_loss("bce_with_logits", 8192, 4096, weighted=True),
    *(
        inference(rows, *layer, target=Target(0.9 if rows <= 64 else None, {"torch_addmm_activation": 1.0}))
        for layer in ((14336, 4096), (4096, 14336))
        for rows in (1, 16, 64, 128)
    ),
)


def measure_case(
    case: Case,
    rounds: int,
    copies: Callable[[Any], Ceiling],
    stream: Any,
    *,
    ours: bool = False,
    compiled: bool = False,
) -> Row:
    """One row.

    Args:
        copies: measures the ceiling, or knows it already.
        ours: no other library takes part.
        compiled: torch.compile does, which takes a minute.
    """
    ceiling = copies(stream)
    sets = timing.buffer_sets(case.bytes, timing.cache_size()) if case.rotated else 1
    count = timing.repetitions(case.bytes, sets)
    builders = {name: build for name, build in case.builders(sets).items() if compiled or name != TORCH_COMPILE}
    if ours:
        builders = {name: build for name, build in builders.items() if name.startswith("lt")}
    timings, left_out = timing.measure(builders, sets, count, rounds, stream)
    setting = {"buffer_sets": sets, "repetitions": count, "rounds": rounds}
    return Row(case.name, timings, "lt", case.bytes, ceiling.gb_s, case.target, setting, left_out)


def _copy_row(copies: Callable[[Any], Ceiling], stream: Any) -> Row:
    ceiling = copies(stream)
    return Row(COPY, ceiling.timings, ceiling.best, setting={"copy_gb_s": round(ceiling.gb_s, 1), "copy": ceiling.best})


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    """The copies are measured once in a run, by the first row that needs them."""
    copies = functools.cache(measure_copies)
    made: dict[str, Job] = {
        case.name: partial(
            measure_case, case, options.rounds, copies, ours=options.ours, compiled=options.torch_compile
        )
        for case in CASES
    }
    return made | {COPY: partial(_copy_row, copies)}


def _facts(rows: Sequence[Json]) -> Json:
    """The ceiling, which readers of a file look for at its top."""
    return {name: row[name] for row in rows if row["case"] == COPY for name in ("copy_gb_s", "copy") if name in row}


_NAMES: Final = [case.name for case in CASES]
_OPTIONAL: Final = {TORCH_COMPILE: [name for name in _NAMES if not name.startswith("dropout")]}
SUITE: Final = Suite(rounds=21, order=[*_NAMES, COPY], jobs=_jobs, facts=_facts, optional=_OPTIONAL)
