"""Describes problems, strategies, algorithms and the results of tuning in words, and in a table."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lt_runtime.cublaslt import ClusterShape, MatmulInnerShape, MatmulStages, MatmulTile, ReductionScheme
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu.compiler import watchers
from lt_runtime.plans.cache import FUSED_MLP, IN_FP8
from lt_runtime.plans.strategies import MadeBy
from lt_runtime.problem import Compute, ForwardProblem, MatmulProblem, MLPProblem, Saved
from lt_runtime.products.methods import METHODS
from lt_runtime.store.entries import Alternative, Entry, ProductEntry, RejectedAlgorithm, RejectedStrategy
from lt_runtime.store.keys import Remembered, problem_key
from lt_runtime.tables import rendered, table

if TYPE_CHECKING:
    import rich.progress
    from rich.table import Table

Progress: TypeAlias = Callable[[int, int, str], None]
"""Callback that shows progress: takes the number of finished groups of problems, the total number, and a text that
names the next group.
"""

_shown: ContextVar[rich.progress.Progress | None] = ContextVar("lt_runtime_progress", default=None)
"""The progress display now on the terminal, to which nested progress bars are added; None if there is none."""

_PARTS: Final[Mapping[str, tuple[str, type[int]]]] = {
    "ID": ("id", int),
    "TILE_ID": ("tile", MatmulTile),
    "STAGES_ID": ("stages", MatmulStages),
    "SPLITK_NUM": ("split-K", int),
    "REDUCTION_SCHEME": ("reduction", ReductionScheme),
    "CTA_SWIZZLING": ("swizzle", int),
    "CUSTOM_OPTION": ("option", int),
    "INNER_SHAPE_ID": ("inner shape", MatmulInnerShape),
    "CLUSTER_SHAPE_ID": ("cluster", ClusterShape),
}
_PREFIXES: Final = ("TILE_", "STAGES_", "SHAPE_")


def describe(problem: Remembered) -> str:
    """A short description of a problem with M×N×K, such as "matmul 8192x3072x768 bfloat16 gelu_aux_bias"."""
    dtype = "tf32" if problem.compute is Compute.TF32 else problem.dtype.value
    if isinstance(problem, MatmulProblem):
        times = f" batch {problem.batch}" if problem.batch > 1 else ""
        return f"matmul {problem.m}x{problem.n}x{problem.k}{times} {dtype} {problem.epilogue.value}"
    if isinstance(problem, MLPProblem):
        kind = ("training with loss" if problem.loss else "training") if problem.backward else "inference"
        return f"{kind} {problem.rows}x{'-'.join(map(str, problem.dims))} {dtype} {problem.activation.name}"
    if isinstance(problem, Fp8ChainProblem):
        activations = ", ".join(dict.fromkeys(each.name for each in problem.activations))
        sizes = f"{problem.rows}x{'-'.join(map(str, problem.dims))}"
        written = ", optimizer writes weights in FP8" if problem.written else ""
        return f"precision {sizes} {dtype} {activations}{'' if problem.dx else ' without dx'}{written}"
    if isinstance(problem, ForwardProblem):
        added = "" if problem.addend is None else " and an addend"
        kind, out, words = "forward", problem.y, f"{problem.activation.name}{added}"
    else:
        below = "" if problem.input_derivative is None else f" through {problem.input_derivative.activation.name}"
        kind, out, words = "backward", problem.dy, f"{problem.output_derivative.activation.name}{below}"
    rows, cols = out.layout.shape
    return f"{kind} {rows}x{cols}x{problem.x.layout.cols} {dtype} {words}"


def strategy_in_words(strategy: Mapping[str, object]) -> str:
    """A strategy from the plan cache in words, such as "gelu_aux_bias, keeps preactivation"."""
    if strategy.keys() == {FUSED_MLP}:
        return "fused kernels" if strategy[FUSED_MLP] else "layer by layer"
    if strategy.keys() == {IN_FP8}:
        return "products in FP8" if strategy[IN_FP8] else "own type"
    if strategy.keys() >= {"epilogue", "saved"}:
        keeps = "" if strategy["saved"] == Saved.NOTHING.value else f", keeps {strategy['saved']}"
        return f"{strategy['epilogue']}{keeps}{', adds C' if 'product_adds' in strategy else ''}"
    makers = {name.replace("_", " "): maker for name, maker in strategy.items() if isinstance(maker, str)}
    parts = [f"{name} by {maker}" for name, maker in makers.items() if maker != MadeBy.NOBODY.value]
    beside = ", dw beside dx" if strategy.get("dw_concurrent") else ""
    return (", ".join(parts) or "products alone") + beside


def algorithm_in_words(config: Mapping[str, int]) -> str:
    """An algorithm's configuration: its method, and cuBLASLt's attributes, such as "id 66, tile 128x256, split-K 1"."""
    words = [each.words for each in METHODS if each.name in config]
    attributes = [name for name in config if name not in {each.name for each in METHODS}]
    known = [name for name in _PARTS if name in config]
    return ", ".join([*words, *(_part(name, config[name]) for name in dict.fromkeys((*known, *attributes)))])


def choice_in_words(choice: Entry | RejectedAlgorithm | RejectedStrategy | Alternative) -> str:
    """In words, the algorithm or strategy of an entry, of a rejected candidate or of an alternative."""
    if isinstance(choice, ProductEntry | RejectedAlgorithm):
        return algorithm_in_words(choice.config)
    return strategy_in_words(choice.strategy)


def rejection_in_words(rejected: RejectedAlgorithm | RejectedStrategy) -> str:
    """A rejected candidate and the reason in words, such as "none, keeps mask: wrong: y is off by 1"."""
    return f"{choice_in_words(rejected)}: {rejected.reason}"


def time_in_words(entry: Entry) -> str:
    """The measured time of an entry in words; for a product with the untuned algorithm's time."""
    if not isinstance(entry, ProductEntry):
        return f"{entry.us:.2f} µs"
    gain = f", {entry.first_us / entry.us:.2f} times as fast as untuned" if entry.us else ""
    return f"{entry.us:.2f} µs, spread {entry.spread:.2f} µs; best of {entry.candidates} measured{gain}"


def _part(name: str, value: int) -> str:
    word, kind = _PARTS.get(name, (name, int))
    try:
        member = getattr(kind(value), "name", None) or str(value)
    # A value that the bindings do not know, from a newer version of cuBLASLt, is shown as a number.
    except ValueError:
        member = str(value)
    for prefix in _PREFIXES:
        member = member.removeprefix(prefix)
    return f"{word} {'any' if member == 'UNDEFINED' else member.lower()}"


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of tuning one group of problems, which are decided together.

    Attributes:
        problems: a forward problem and the backward problem that reads its saved tensor, or one of them alone; a narrow
            MLP; the choice of a layer's precision; or a product.
        before_us: microseconds of the group as it would run untuned, timed in the same rounds as the other candidates;
            0.0 if it cannot run untuned.
        after_us: microseconds of the group as decided. If the result comes from the plan cache, both times are those
            measured for it.
        strategy: the chosen strategy or algorithm, in words.
        measured: number of plans and algorithms that were timed.
        rejected: rejected candidates in words, with reasons: refused, wrong, not reproducible, or slow.
        seconds: duration of the tuning.
    """

    problems: tuple[Remembered, ...]
    before_us: float
    after_us: float
    strategy: str
    measured: int = 0
    rejected: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def gain(self) -> float | None:
        """Speedup: time before divided by time after; None for a result from the plan cache."""
        return self.before_us / self.after_us if self.measured and self.before_us and self.after_us else None


Decided: TypeAlias = tuple[Tuned, Mapping[Any, Entry]]
"""Result of deciding a group: its row of the report, and the entries of its problems for the plan cache."""


class TuningReport(tuple[Tuned, ...]):
    """One `Tuned` for each group of problems; `str` gives a table."""

    __slots__ = ()

    @property
    def gain(self) -> float:
        """Geometric mean of the gains of all groups that were measured by this call; 1.0 if none was measured."""
        gains = [each.gain for each in self if each.gain is not None]
        return math.exp(math.fsum(map(math.log, gains)) / len(gains)) if gains else 1.0

    @property
    def seconds(self) -> float:
        """Total duration of the tuning, in seconds."""
        return math.fsum(each.seconds for each in self)

    def table(self) -> Table:
        """The report as a table: each group with its times before and after, the gain, and the strategy."""
        lines = []
        for each in self:
            names = "\n".join(dict.fromkeys(map(describe, each.problems)))
            times = [f"{us:.2f}" if us else "" for us in (each.before_us, each.after_us)]
            gain = f"{each.gain:.2f}×" if each.gain is not None else "known" if each.after_us else ""
            lines.append((names, *times, gain, str(each.measured or ""), each.strategy))
        headings = ("Problem", "Before µs", "After µs", "Gain", "Tried", "Strategy")
        return table(None, headings, lines, {"Problem", "Strategy"})

    @property
    def summary(self) -> str:
        """The line that is printed under the report's table: number of problem groups, gain and duration."""
        rejected = sum(len(each.rejected) for each in self)
        count = f"{len(self)} group{'' if len(self) == 1 else 's'} of problems decided in {self.seconds:.1f} s"
        return f"{count}; {self.gain:.2f}× in the geometric mean; {rejected} candidates rejected"

    def to_json(self) -> list[dict[str, Any]]:
        """The report as JSON-compatible data; each problem has a readable name and its key in the plan cache."""
        words: dict[str, Callable[[Remembered], str]] = {"problems": describe, "keys": problem_key}
        named = [{name: [*map(word, each.problems)] for name, word in words.items()} for each in self]
        return [asdict(each) | {"gain": each.gain} | names for each, names in zip(self, named, strict=True)]

    def __str__(self) -> str:
        return f"{rendered(self.table())}\n{self.summary}"

    def __repr__(self) -> str:
        return f"<TuningReport: {self.summary}>"


@contextlib.contextmanager
def progress_bar(*, shown: bool = True) -> Iterator[Progress | None]:
    """Yields a function that updates a progress bar on the terminal, or None without a terminal.

    The bar shows the problems being measured, the time left and, once something is compiled, the kernel being compiled.
    Within another progress bar it is an additional line, which disappears at the end.
    """
    from rich import progress
    from rich.console import Console

    console, outer = Console(stderr=True), _shown.get()
    if not shown or not console.is_terminal:
        yield None
        return
    columns = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
    left = progress.TextColumn("left:"), progress.TimeRemainingColumn()
    text = progress.TextColumn("{task.description}", markup=False)
    with contextlib.ExitStack() as stack:
        bars = outer or stack.enter_context(progress.Progress(*columns, *left, text, console=console))
        task = bars.add_task("", total=None)
        if outer is None:
            stack.callback(_shown.reset, _shown.set(bars))
        else:
            stack.callback(bars.remove_task, task)
        measured = ""

        def tell(done: int, total: int, description: str) -> None:
            nonlocal measured
            measured = description
            bars.update(task, completed=done, total=total, description=description)

        def compiling(source: str) -> None:
            bars.update(task, description=f"{measured} (compiling {source})".strip())

        watchers.append(compiling)
        stack.callback(watchers.remove, compiling)
        yield tell
