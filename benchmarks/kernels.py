"""The suite `kernels`: single kernels against the bandwidth of the fastest copy, PyTorch and torch.compile.

Contenders are CUDA graphs of repetitions of a task, whose buffers rotate through more memory than the L2 cache holds,
unless the case says otherwise. The fraction of the copy is our bandwidth, at the fewest bytes that the task moves,
divided by the bandwidth of the fastest copy kernel in the same run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np

from benchmarks import buffers, timing
from benchmarks.buffers import Sets, itemsize, normal
from benchmarks.copies import measured_copies
from benchmarks.peers import peer
from benchmarks.report import Json, Row
from benchmarks.suite import TORCH_COMPILE, Job, Suite, plan_cache
from benchmarks.timing import Builders, Contender

COPY: Final = "copy of 1 GiB"
_SHORT: Final = {"float32": "FP32", "bfloat16": "BF16"}
_RNG: Final = {"seed": 20, "layer": 1, "step": 7}

Shapes = tuple[tuple[int, ...], ...]
Builder = Callable[[], Contender]


@dataclass(frozen=True)
class Case:
    """A case of the suite: one kernel or task, and its contenders.

    Attributes:
        bytes: the fewest bytes that the task reads and writes.
        builders: for a number of buffer sets, functions by name that build the contenders; all read the same inputs.
        rotated: whether repetitions rotate through several buffer sets. False where launch latency is the point and all
            operands stay in the L2 cache, and where a single set is many times as large as that cache.
    """

    name: str
    bytes: int
    builders: Callable[[int], Builders]
    rotated: bool = True


def _torch(name: str, *arguments: Any, **options: Any) -> dict[str, Builder]:
    """Contenders that do a task by PyTorch's kernels and by torch.compile."""
    by_kernels = peer("torch_kernels", name, *arguments, **options)
    return {"torch": by_kernels, TORCH_COMPILE: peer("torch_kernels", name, *arguments, **options, compiled=True)}


def _private(name: str, made: Sets, *arguments: Any, **options: Any) -> Builder:
    """Contender of a pass that no public call runs alone: `internals` makes it for the addresses of a buffer set."""

    def build() -> Contender:
        run = getattr(import_module("benchmarks.internals"), name)(*arguments, **options)
        addresses = [tuple(each.data.ptr for each in arrays) for arrays in made]
        return Contender(lambda i, stream: run(*addresses[i], stream))

    return build


# Case: dz = dropout'(dy) · GELU'(z) and its column sums, in BF16, which moves six bytes an element.


def epilogue_backward(rows: int, cols: int, dropout: float = 0.0, *, rotated: bool = True) -> Case:
    """Contenders for the derivative of activation and dropout, with the bias gradient."""
    also = f" + dropout {dropout}" if dropout else ""
    name = f"epilogue_bwd GELU{also} BF16 {rows}×{cols}, bias gradient"
    return Case(name, 6 * rows * cols, partial(_epilogue_backward, (rows, cols), dropout), rotated)


def _epilogue_backward(shape: tuple[int, int], dropout: float, sets: int) -> Builders:
    made = buffers.matrices(shape, "bfloat16", sets, 3)
    both = {"lt": epilogue_backward_pass(made, dropout), **_torch("epilogue_backward", made, dropout)}
    if dropout:
        return {**both, "lt_without_dropout": epilogue_backward_pass(made)}
    return {
        **both,
        "torch_without_bias_gradient": peer("torch_kernels", "gelu_backward", made),
        "lt_without_bias_gradient": epilogue_backward_pass(made, db=False),
        "lt_transposed": epilogue_backward_pass(made, transposed=True),
    }


def epilogue_backward_pass(made: Sets, dropout: float = 0.0, *, db: bool = True, transposed: bool = False) -> Builder:
    """dz and db from dy and the pre-activation; with `transposed`, dz is written transposed, through shared memory."""
    return _private("backward_pass", made, made[0][0].shape, dropout, _RNG, db=db, transposed=transposed)


# Case: y = dropout(GELU(z)), in BF16, which moves four bytes an element.


def epilogue_forward(rows: int, cols: int, dropout: float) -> Case:
    """Contenders for activation and dropout."""
    name = f"epilogue_fwd GELU + dropout {dropout} BF16 {rows}×{cols}"
    return Case(name, 4 * rows * cols, partial(_epilogue_forward, (rows, cols), dropout))


def _epilogue_forward(shape: tuple[int, int], dropout: float, sets: int) -> Builders:
    made = buffers.matrices(shape, "bfloat16", sets, 2)
    ours = _private("forward_pass", made, shape, dropout, _RNG)
    return {"lt": ours, **_torch("epilogue_forward", made, dropout)}


# Case: dropout of x and of dy by two kernels, each of which reads and writes every element once.


def dropout(dtype: str, rows: int, cols: int, p: float = 0.1) -> Case:
    """Contenders for dropout forward and backward."""
    name = f"dropout {p} {_SHORT[dtype]} {rows}×{cols}, forward + backward"
    return Case(name, 4 * itemsize(dtype) * rows * cols, partial(_dropout, dtype, (rows, cols), p))


def _dropout(dtype: str, shape: tuple[int, int], p: float, sets: int) -> Builders:
    import lt_runtime as lt

    made, rng = buffers.matrices(shape, dtype, sets, 4), lt.Philox(**_RNG)

    def run(i: int, stream: int) -> None:
        x, dy, y, dx = made[i]
        lt.dropout(x, p, rng, out=y, stream=stream)
        lt.dropout(dy, p, rng, out=dx, stream=stream)

    return {"lt": partial(Contender, run), **_torch("dropout", made, p)}


# Case: SwiGLU in BF16. Forward moves six bytes an element of y, and backward ten.


def gated(rows: int, cols: int, dropout: float = 0.0, *, backward: bool = False) -> Case:
    """Contenders for y = dropout(SiLU(gate) · value), or for the gradients of gate and value."""
    direction, also = "bwd" if backward else "fwd", f" + dropout {dropout}" if dropout else ""
    builders = partial(_gated_backward if backward else _gated_forward, (rows, cols), dropout)
    return Case(f"gated_{direction} SiLU{also} BF16 {rows}×{cols}", (10 if backward else 6) * rows * cols, builders)


def _gated_forward(shape: tuple[int, int], dropout: float, sets: int) -> Builders:
    import lt_runtime as lt

    made = [_normals((shape[0], 2 * shape[1]), shape) for _ in range(sets)]
    rng = lt.Philox(**_RNG)

    def run(i: int, stream: int) -> None:
        h, y = made[i]
        lt.gated_fwd(h, dropout=dropout, rng=rng, out=y, stream=stream)

    return {"lt": partial(Contender, run), **_torch("gated_forward", made, dropout)}


def _gated_backward(shape: tuple[int, int], dropout: float, sets: int) -> Builders:
    import lt_runtime as lt

    wide, rng = (shape[0], 2 * shape[1]), lt.Philox(**_RNG)
    made = [_normals(wide, shape, wide) for _ in range(sets)]
    contexts = [lt.gated_fwd(h, dropout=dropout, rng=rng)[1] for h, _, _ in made]

    def run(i: int, stream: int) -> None:
        _, dy, dh = made[i]
        lt.gated_bwd(dy, contexts[i], out=dh, stream=stream)

    return {"lt": partial(Contender, run), **_torch("gated_backward", made, dropout)}


def _normals(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(normal(shape, "bfloat16") for shape in shapes)


# Case: BF16 to FP8 in both orientations with the largest absolute value, which moves four bytes an element.


def cast_fp8(rows: int, cols: int) -> Case:
    """Contenders for the cast to E4M3, row by row and transposed."""
    name = f"cast_fp8 BF16 to E4M3 and its transpose {rows}×{cols}"
    return Case(name, 4 * rows * cols, partial(_cast_fp8, (rows, cols)))


def _bytes(shape: tuple[int, int], dtype: Any) -> Any:
    """An array of FP8, which CuPy makes only by viewing bytes."""
    import cupy as cp

    return cp.empty(shape, cp.uint8).view(dtype)


def _cast_fp8(shape: tuple[int, int], sets: int) -> Builders:
    import cupy as cp

    import lt_runtime as lt

    dtype, scale, amax = np.dtype("float8_e4m3fn"), cp.ones(1, cp.float32), cp.zeros(1, cp.float32)
    made = [(*_normals(shape), *(_bytes(each, dtype) for each in (shape, shape[::-1]))) for _ in range(sets)]

    def run(i: int, stream: int, *, transposes: bool = True) -> None:
        x, out, transposed = made[i]
        more = {"out_transposed": transposed} if transposes else {"need_transposed": False}
        lt.cast_fp8(x, scale, out=out, amax=amax, **more, stream=stream)

    rows_alone = {"lt_without_transpose": partial(Contender, partial(run, transposes=False))}
    return {"lt": partial(Contender, run), **_torch("cast_fp8", made), **rows_alone}


# Case: GELU and the cast, in both orientations, which moves four bytes an element; or GELU's derivative, the bias
# gradient and the transposed cast, which moves five.


def epilogue_fp8(rows: int, cols: int, *, backward: bool = False) -> Case:
    """Contenders for GELU and the cast to E4M3 in both orientations.

    With `backward`, contenders for GELU's derivative, the bias gradient and the transposed cast to E5M2, which suffice
    for a first layer because it computes no dx.
    """
    what = "derivative, bias gradient and transposed E5M2" if backward else "and E4M3 in both orientations"
    builders = partial(_epilogue_fp8, (rows, cols), backward)
    return Case(f"cast_fp8 GELU {what} {rows}×{cols}", (5 if backward else 4) * rows * cols, builders)


def _epilogue_fp8(shape: tuple[int, int], backward: bool, sets: int) -> Builders:
    second = partial(normal, shape, "bfloat16") if backward else partial(_bytes, shape, np.dtype("float8_e4m3fn"))
    turned = np.dtype("float8_e5m2" if backward else "float8_e4m3fn")
    made = [(*_normals(shape), second(), _bytes(shape[::-1], turned)) for _ in range(sets)]
    ours = _private("fp8_pass", made, shape, backward=backward)
    return {"lt": ours, **_torch("epilogue_fp8", made, backward=backward)}


# Case: SwiGLU and the cast of its result to FP8, six bytes for an element of the result; or the gradients of SwiGLU and
# their casts, ten bytes. Each result is written row-major and transposed.


def gated_fp8(rows: int, cols: int, *, backward: bool = False) -> Case:
    """Contenders for a gated activation whose result, or whose gradients, are cast to FP8."""
    what = "gradients and E5M2" if backward else "and E4M3"
    builders = partial(_gated_fp8, (rows, cols), backward)
    return Case(f"cast_fp8 SwiGLU {what} {rows}×{cols}", (10 if backward else 6) * rows * cols, builders)


def _gated_fp8(shape: tuple[int, int], backward: bool, sets: int) -> Builders:
    import lt_runtime as lt

    (rows, cols), dtype = shape, np.dtype("float8_e5m2" if backward else "float8_e4m3fn")
    wide = rows, 2 * cols
    uncast = wide if backward else shape
    inputs = [_normals(*(wide, shape)[: 1 + backward]) for _ in range(sets)]
    made = [(*each, _bytes(uncast, dtype), _bytes(uncast[::-1], dtype)) for each in inputs]

    def with_a_cast() -> Contender:
        rounded, contexts = normal(uncast, "bfloat16"), [lt.gated_fwd(h)[1] for h, *_ in made]

        def run(i: int, stream: int) -> None:
            h, *dy, out, transposed = made[i]
            if dy:
                lt.gated_bwd(*dy, contexts[i], out=rounded, stream=stream)
            else:
                lt.gated_fwd(h, out=rounded, stream=stream)
            lt.cast_fp8(rounded, dtype=dtype, out=out, out_transposed=transposed, stream=stream)

        return Contender(run)

    ours = _private("gated_fp8_pass", made, shape, backward=backward)
    return {"lt": ours, "lt_with_a_cast": with_a_cast, **_torch("gated_fp8", inputs)}


# Case: LayerNorm or RMSNorm in BF16. An element takes four bytes forward and six backward, with a residual eight.


_NORMS: Final = {"layer_norm": ("layer_norm_fwd", "layer_norm_bwd"), "rms_norm": ("rms_norm_fwd", "rms_norm_bwd")}


def norm(kind: str, rows: int, cols: int, *, backward: bool = False, adds: bool = False) -> Case:
    """Contenders for a norm with weight and, in LayerNorm, bias; backward makes all gradients.

    Args:
        kind: the norm: "layer_norm" or "rms_norm".
        adds: whether a residual is added first, and the sum written; backward, whether a gradient is added to dx.
    """
    also, width = " + residual" if adds else "", 8 if adds else 6 if backward else 4
    builders = partial(_norm_backward if backward else _norm_forward, kind, (rows, cols), adds)
    return Case(f"{kind}_{'bwd' if backward else 'fwd'}{also} BF16 {rows}×{cols}", width * rows * cols, builders)


def _norm_vectors(kind: str, cols: int) -> tuple[Any, ...]:
    return _normals(*[(cols,)] * (2 if kind == "layer_norm" else 1))


def _norm_forward(kind: str, shape: tuple[int, int], adds: bool, sets: int) -> Builders:
    import lt_runtime as lt

    made, vectors = buffers.matrices(shape, "bfloat16", sets, 4 if adds else 2), _norm_vectors(kind, shape[1])
    statistics = {name: normal(shape[:1], "float32") for name in ("out_mean", "out_rstd")[-len(vectors) :]}

    def run(i: int, stream: int) -> None:
        x, y, *residual = made[i]
        more = dict(zip(("add", "out_sum"), residual, strict=False))
        getattr(lt, _NORMS[kind][0])(x, *vectors, out=y, **more, **statistics, stream=stream)

    inputs = [(x, *residual[:1]) for x, _, *residual in made]
    return {"lt": partial(Contender, run), **_torch("norm_forward", inputs, vectors)}


def _norm_backward(kind: str, shape: tuple[int, int], adds: bool, sets: int) -> Builders:
    import lt_runtime as lt

    made, vectors = buffers.matrices(shape, "bfloat16", sets, 4 if adds else 3), _norm_vectors(kind, shape[1])
    contexts = [getattr(lt, _NORMS[kind][0])(x, *vectors)[1] for x, *_ in made]
    names, results = ("out_dweight", "out_dbias"), [normal(shape[1:], "bfloat16") for _ in vectors]

    def run(i: int, stream: int) -> None:
        _, dy, dx, *add = made[i]
        more = dict(zip((*names[: len(results)], "add"), (*results, *add), strict=False))
        getattr(lt, _NORMS[kind][1])(dy, contexts[i], out_dx=dx, **more, stream=stream)

    inputs = [(x, dy, *add) for x, dy, _, *add in made]
    return {"lt": partial(Contender, run), **_torch("norm_backward", inputs, vectors)}


# Case: AdamW, which reads the gradient; reads and writes both moments and the FP32 parameter; and writes the BF16
# parameter, if any.


def adamw_step(model: str, shapes: Shapes, dtype: str, max_norm: float | None = None) -> Case:
    """Contenders for one AdamW update of all tensors.

    Args:
        dtype: of parameters and gradients; BF16 parameters have FP32 masters.
        max_norm: the global norm to which gradients are clipped; computing the norm reads all gradients once more.
    """
    is_fp32, clipping = dtype == "float32", ", clipped" if max_norm is not None else ""
    tensors = f"{len(shapes)} tensors" if len(shapes) > 1 else "one tensor"
    name = f"AdamW {'FP32' if is_fp32 else 'BF16 + FP32 master'}{clipping}, {model}, {tensors}"
    reads = 1 if max_norm is None else 2
    moved = 6 * 4 + (0 if is_fp32 else itemsize(dtype)) + reads * itemsize(dtype)
    builders = partial(_adamw, shapes, dtype, max_norm)
    return Case(name, moved * sum(map(math.prod, shapes)), builders, rotated=False)


def _adamw(shapes: Shapes, dtype: str, max_norm: float | None, _: int) -> Builders:
    def ours() -> Contender:
        step = optimizer_step(shapes, dtype, max_norm)
        return Contender(lambda _, stream: step(stream=stream))

    return {"lt": ours, **_adamws(shapes, dtype, max_norm)}


def _adamws(*arguments: Any, **options: Any) -> dict[str, Builder]:
    """AdamW by PyTorch's fused kernel, and by torch.compile over one flat tensor."""
    theirs = {"torch": "adamw", TORCH_COMPILE: "flat_adamw"}
    return {name: peer("torch_kernels", each, *arguments, **options) for name, each in theirs.items()}


def optimizer_step(shapes: Shapes, dtype: str = "float32", max_norm: float | None = None) -> Callable[..., object]:
    """The `step` of an AdamW over random parameters of the given shapes."""
    import lt_runtime as lt

    parameters = [lt.Parameter(normal(shape, dtype), normal(shape, dtype)) for shape in shapes]
    return lt.AdamW(parameters, lr=1e-5, **({} if max_norm is None else {"max_norm": max_norm})).step


# Case: AdamW that also writes the new weight in FP8, row-major and transposed.


def adamw_fp8(rows: int, cols: int, *, masters: bool = False) -> Case:
    """Contenders for one AdamW update of a BF16 weight and its copies in E4M3.

    Args:
        masters: whether weight and moments are kept in FP32; otherwise all are BF16.
    """
    kept, moved = ("BF16 + FP32 master", 30) if masters else ("BF16 and BF16 moments", 16)
    name = f"AdamW {kept}, with E4M3 and its transpose, {rows}×{cols}"
    return Case(name, moved * rows * cols, partial(_adamw_fp8, (rows, cols), masters), rotated=False)


def _adamw_fp8(shape: tuple[int, int], masters: bool, _: int) -> Builders:
    def ours(*, casts: bool = False) -> Contender:
        from benchmarks.internals import fp8_update

        update = fp8_update(normal(shape, "bfloat16"), normal(shape, "bfloat16"), masters=masters, casts=casts)
        return Contender(lambda _, stream: update(stream))

    kept = "float32" if masters else "bfloat16"
    return {
        "lt": ours,
        "lt_with_a_cast": partial(ours, casts=True),
        **_adamws((shape,), "bfloat16", kept=kept, casts=True),
    }


# Case: a loss with its gradient: one read of every operand, and one write of the gradient.


def cross_entropy(
    rows: int, classes: int, dtype: str = "bfloat16", *, weighted: bool = False, rotated: bool = True
) -> Case:
    """Contenders for softmax cross-entropy; with `weighted`, rows and classes have weights."""
    weights = ", class and row weights," if weighted else ""
    name = f"cross_entropy{weights} + gradient {_SHORT[dtype]} {rows}×{classes}"
    builders = partial(_cross_entropy, dtype, (rows, classes), weighted)
    return Case(name, 2 * itemsize(dtype) * rows * classes, builders, rotated)


def _cross_entropy(dtype: str, shape: tuple[int, int], weighted: bool, sets: int) -> Builders:
    made, targets, weights = buffers.matrices(shape, dtype, sets, 2), buffers.labels(*shape), dict[str, Any]()
    if weighted:
        weights = {"row_weights": abs(normal(shape[:1], "float32")), "class_weights": abs(normal(shape[1:], "float32"))}
    by_hand = {"torch_log_softmax": peer("torch_kernels", "log_softmax_gradient", made, targets)}
    return {
        "lt": partial(our_loss, "cross_entropy", made, targets, **weights),
        **_torch("cross_entropy", made, targets, **weights),
        **({} if weighted else by_hand),
    }


def elementwise_loss(loss: str, rows: int, cols: int, *, weighted: bool = False) -> Case:
    """The loss of that name in BF16; with `weighted`, with weights of rows and, if the loss has them, of columns."""
    name = f"{loss}{', weighted,' if weighted else ''} + gradient BF16 {rows}×{cols}"
    return Case(name, 6 * rows * cols, partial(_elementwise_loss, loss, (rows, cols), weighted))


def _elementwise_loss(loss: str, shape: tuple[int, int], weighted: bool, sets: int) -> Builders:
    made, weights = buffers.matrices(shape, "bfloat16", sets, 3), dict[str, Any]()
    if weighted:
        weights["row_weights"] = abs(normal(shape[:1], "float32"))
        if loss == "bce_with_logits":
            weights["pos_weight"] = abs(normal(shape[1:], "float32"))
    return {"lt": partial(our_loss, loss, made, **weights), **_torch("elementwise_loss", loss, made, **weights)}


def our_loss(loss: str, made: Sets, *targets: Any, **weights: Any) -> Contender:
    """Loss and gradient, each into a given buffer; targets that are not given are the second array of each set."""
    import cupy as cp

    import lt_runtime as lt

    number, function = cp.empty((), cp.float32), getattr(lt, loss)

    def run(i: int, stream: int) -> None:
        *operands, gradient = made[i]
        function(*operands, *targets, **weights, out_gradient=gradient, out_loss=number, stream=stream)

    return Contender(run)


# Case: a layer with few rows, for which the fewest bytes are one read of the weights.


def inference(rows: int, outputs: int, inputs: int) -> Case:
    """Contenders for y = GELU(x · wᵀ + bias) in BF16, tuned, storing nothing for backward."""
    moved = 2 * (outputs * inputs + rows * inputs + outputs + rows * outputs)
    shape = rows, outputs, inputs
    return Case(f"linear GELU BF16 {rows}×{outputs}×{inputs}", moved, partial(_inference, shape))


def _inference(shape: tuple[int, int, int], sets: int) -> Builders:
    rows, outputs, inputs = shape
    made = [_normals((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)) for _ in range(sets)]

    def ours() -> Contender:
        import lt_runtime as lt

        def run(i: int, stream: int) -> None:
            x, w, bias, y = made[i]
            lt.linear(x, w, bias, activation="gelu", out=y, stream=stream)

        with plan_cache(), lt.tuning():
            run(0, 0)
        timing.synchronize()
        return Contender(run)

    fused = peer("torch_kernels", "addmm_activation", made)
    return {"lt": ours, **_torch("linear", made), "torch_addmm_activation": fused}


_WIDTH: Final = 768
_GPT2_BLOCK: Final[Shapes] = (
    *((_WIDTH,), (_WIDTH,)),  # Parameters of a block of GPT-2: the layer norm,
    *((3 * _WIDTH, _WIDTH), (3 * _WIDTH,), (_WIDTH, _WIDTH), (_WIDTH,)),  # the attention,
    *((_WIDTH,), (_WIDTH,)),  # another layer norm,
    *((4 * _WIDTH, _WIDTH), (4 * _WIDTH,), (_WIDTH, 4 * _WIDTH), (_WIDTH,)),  # and the MLP.
)
GPT2: Final[Shapes] = ((50257, _WIDTH), (1024, _WIDTH), *(_GPT2_BLOCK * 12), (_WIDTH,), (_WIDTH,))
"""The tensors of GPT-2 with 124 million parameters."""
GPT2_NAME: Final = "GPT-2 124M"
GPT2_IN_ONE: Final[Shapes] = ((sum(map(math.prod, GPT2)),),)
"""GPT-2's parameters as one flat tensor; torch.compile updates it in every case of AdamW."""
SMALL: Final[Shapes] = ((64, 64), (64,)) * 3

CASES: Final[Sequence[Case]] = (
    epilogue_backward(8192, 3072),
    epilogue_backward(8192, 12288),
    epilogue_backward(8192, 3071),
    epilogue_backward(8192, 3072, 0.1),
    epilogue_backward(8192, 12288, 0.1),
    epilogue_backward(256, 512, rotated=False),
    epilogue_forward(8192, 3072, 0.1),
    *(gated(8192, 4096, p, backward=backward) for backward in (False, True) for p in (0.0, 0.1)),
    *(norm(kind, 8192, 4096, backward=backward) for backward in (False, True) for kind in ("layer_norm", "rms_norm")),
    *(norm("rms_norm", 8192, 4096, backward=backward, adds=True) for backward in (False, True)),
    *(norm("rms_norm", 8192, 1024, backward=backward) for backward in (False, True)),
    cast_fp8(4096, 4096),
    cast_fp8(8192, 14336),
    *(epilogue_fp8(8192, 14336, backward=backward) for backward in (False, True)),
    *(gated_fp8(8192, 14336, backward=backward) for backward in (False, True)),
    dropout("bfloat16", 8192, 8192),
    dropout("float32", 8192, 8192),
    adamw_step(GPT2_NAME, GPT2, "float32"),
    adamw_step(GPT2_NAME, GPT2, "bfloat16", 1.0),
    adamw_step("124 M parameters", GPT2_IN_ONE, "float32"),
    adamw_step("124 M parameters", GPT2_IN_ONE, "bfloat16", 1.0),
    adamw_step("12 k parameters", SMALL, "float32"),
    *(adamw_fp8(14336, 4096, masters=masters) for masters in (False, True)),
    cross_entropy(8192, 50304),
    cross_entropy(8192, 50304, "float32"),
    cross_entropy(4096, 128256),
    cross_entropy(65536, 1000),
    cross_entropy(8192, 10, rotated=False),
    cross_entropy(8192, 50304, weighted=True),
    elementwise_loss("mse_loss", 8192, 4096),
    elementwise_loss("huber_loss", 8192, 4096),
    elementwise_loss("bce_with_logits", 8192, 4096),
    elementwise_loss("bce_with_logits", 8192, 4096, weighted=True),
    *(inference(rows, *layer) for layer in ((14336, 4096), (4096, 14336)) for rows in (1, 16, 64, 128)),
    inference(24, 28672, 8192),
)


def measure_case(case: Case, options: argparse.Namespace, stream: Any) -> Row:
    """Measures one case, and returns its row of the result file."""
    ceiling = measured_copies(stream)
    sets = timing.buffer_sets(case.bytes, timing.cache_size()) if case.rotated else 1
    count = timing.repetitions(case.bytes, sets)
    builders = case.builders(sets)
    if options.ours:
        builders = {name: build for name, build in builders.items() if name.startswith("lt")}
    elif not options.torch_compile:
        builders = {name: build for name, build in builders.items() if name != TORCH_COMPILE}
    timings, left_out = timing.measure(builders, sets, count, options.rounds, stream)
    setting = {"buffer_sets": sets, "repetitions": count, "rounds": options.rounds}
    return Row(case.name, timings, "lt", case.bytes, ceiling.gb_s, setting, left_out)


def _copy_row(stream: Any) -> Row:
    ceiling = measured_copies(stream)
    return Row(COPY, ceiling.timings, ceiling.best, setting={"copy_gb_s": round(ceiling.gb_s, 1), "copy": ceiling.best})


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    made: dict[str, Job] = {case.name: partial(measure_case, case, options) for case in CASES}
    return made | {COPY: _copy_row}


def _facts(rows: Sequence[Json]) -> Json:
    """The fastest copy kernel and its bandwidth, as entries for the top of the result file."""
    return {name: row[name] for row in rows if row["case"] == COPY for name in ("copy_gb_s", "copy") if name in row}


_NAMES: Final = [case.name for case in CASES]
SUITE: Final = Suite(rounds=21, order=[*_NAMES, COPY], jobs=_jobs, facts=_facts)
