"""The suite `torch`: whole training steps of PyTorch models, with `lt_runtime.torch`, without it, and with Liger.

Rows that begin with "FP8" compare steps with products in FP8, by `lt_runtime.torch` and by torchao, with our BF16.

All contenders hold parameters and moments in the same types. They are timed in turns, called as a training script calls
them: a time includes the host's work and the copy of the batch. Steps that Python launches are also timed sustained, as
in a long training: the contender runs alone until its steps become no faster. Contenders with `graph` in their name run
the step as one CUDA graph, which `lt_runtime.torch.capture` makes for all of them; those with `compile` have forward
and loss compiled by torch.compile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from benchmarks import report
from benchmarks.report import Finding, Json, Row
from benchmarks.suite import Suite, plan_cache

WAYS: Final = ("eager", "graph", "compile", "compile_graph")
"""Ways in which steps run. A contender is named LIBRARY_WAY, such as "torch_graph"."""
_OTHER_MODES: Final = {"torch_compile": ("torch_max_autotune",), "torch_compile_graph": ("torch_max_autotune_graph",)}


_WITH_LIGER: Final = "lt", "torch", "liger"
# The model in BF16 comes first: Dynamo would not compile its code anew after it was compiled with FP8's graph breaks.
_IN_FP8: Final = "lt", "lt_fp8", "torchao"
_LEAST: Final = {"torchao_compile_graph": 1.2, "lt_graph": 0.99, "lt_compile_graph": 0.99}
"""The least ratios of other contenders' times to that of our step in FP8 that runs in the same way."""


@dataclass(frozen=True)
class TorchCase:
    """A training step of a model.

    Attributes:
        name: of the row.
        task: the function of `benchmarks.torch_tasks` that makes the model.
        sizes: arguments of that function.
        libraries: names of the libraries that take part, keys of `benchmarks.torch_tasks.KITS`.
        steps: number of first steps whose losses are kept.
        ours: the contender that the others are compared with; "lt_eager" if only the host's time counts.
        device, dtype: of the parameters and of inputs that are no integers.
    """

    name: str
    task: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    libraries: tuple[str, ...] = ("lt", "torch")
    steps: int = 4
    ours: str = "lt_graph"
    device: str = "cuda"
    dtype: str = "bfloat16"

    @property
    def is_host(self) -> bool:
        """Whether only the host's time of eager calls is measured."""
        return self.ours == "lt_eager"


_LLAMA: Final = {"rows": 4096, "width": 4096, "hidden": 14336}
_STACK: Final = {"rows": 8192, "width": 1024, "hidden": 2752, "layers": 12}
_HEAD: Final = {"rows": 4096, "width": 4096, "classes": 128256}
CASES: Final = (
    TorchCase("GPT-2 124M 8x1024", "gpt2", steps=200),
    TorchCase("GPT-2 124M 8x1024, linear_cross_entropy", "gpt2", {"chunked": True}, libraries=_WITH_LIGER),
    TorchCase("BERT-base 32x128, dropout", "bert"),
    TorchCase("ViT-L/16 64 images", "vit"),
    TorchCase("T5-small 32x256, dropout", "t5"),
    TorchCase("Llama-like block 4096x4096-14336", "stack", _LLAMA, _WITH_LIGER),
    TorchCase("stack 12 x 8192x1024-2752", "stack", _STACK, _WITH_LIGER),
    TorchCase("DLRM bottom MLP, batch 8192", "mlp", {"rows": 8192, "dims": (13, 512, 256, 64)}),
    TorchCase("DLRM top MLP, batch 8192", "mlp", {"rows": 8192, "dims": (479, 1024, 1024, 512, 256, 1)}),
    TorchCase("linear_cross_entropy 4096x128256x4096", "head", _HEAD, _WITH_LIGER),
    TorchCase("FP8 Llama-like block 4096x4096-14336", "stack", _LLAMA, _IN_FP8, ours="lt_fp8_graph"),
    TorchCase("FP8 GPT-2 124M 8x1024", "gpt2", libraries=_IN_FP8[:2], ours="lt_fp8_graph"),
    TorchCase("host: linear GELU 64x64x64", "layer", {"size": 64}, ours="lt_eager"),
)


def measure(case: TorchCase, options: argparse.Namespace, _: Any = None) -> Row:
    """Tunes in an empty plan cache and lets all contenders take turns; those that fail are left out."""
    from benchmarks import torch_training

    with plan_cache(keep=options.keep_plans):
        return torch_training.measure(case, options)


def findings(rows: Sequence[Json]) -> list[Finding]:
    """Figures for each way: times of PyTorch and Liger as multiples of ours; our memory as a fraction of PyTorch's."""
    made = []
    for way in WAYS:
        for library in ("torch", "liger"):
            found = _by_case(rows, partial(ratio, way=way, library=library))
            made += [make(f"{library}_{way} / lt_{way}", found) for make in (report.mean, report.worst) if found]
        memory = _by_case(rows, partial(memory_ratio, way=way))
        made += [report.worst(f"memory of lt_{way} / torch_{way}", memory, at_most=True)] if memory else []
        for other, in_fp8 in ((f"{library}_{way}", f"lt_fp8_{way}") for library in ("lt", "torchao")):
            found = report.speedups(rows, other, in_fp8)
            made += [report.worst(f"{other} / {in_fp8}", found, _LEAST.get(other))] if found else []
    return made


def _by_case(rows: Sequence[Json], figure: Callable[[Json], float | None]) -> dict[str, float]:
    return {row["case"]: value for row in rows if (value := figure(row)) is not None}


def ratio(row: Json, way: str, library: str = "torch") -> float | None:
    """Another library's time, in torch.compile's fastest mode, as a multiple of ours; None if either is missing."""
    us, names = times_of(row), (f"{library}_{way}", *_OTHER_MODES.get(f"{library}_{way}", ()))
    theirs = min((us[name] for name in names if name in us), default=None)
    return None if theirs is None or f"lt_{way}" not in us else theirs / us[f"lt_{way}"]


def times_of(row: Json) -> dict[str, float]:
    """The times of a row's contenders in microseconds: sustained for steps that Python launches, otherwise in turns."""
    return {**row["us"], **row.get("sustained_us", {})}


def memory_ratio(row: Json, way: str) -> float | None:
    """Our peak memory as a fraction of PyTorch's; None if one of the two is not known."""
    ours, theirs = (row.get("memory_bytes", {}).get(f"{library}_{way}") for library in ("lt", "torch"))
    return ours / theirs if ours and theirs else None


SUITE: Final = Suite.of(measure, CASES, rounds=9, findings=findings)
