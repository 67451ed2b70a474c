"""Writes the tables of the pages, and the plots, from the kept results: `python -m benchmarks report [DIR...]`.

Each DIR is the folder of another run on the same GPU, which `--out` named. The command first puts the rows of its
result files into the kept results, where they are newer.

A table of a page stands between `<!-- benchmarks:NAME -->` and `<!-- /benchmarks:NAME -->`. The table's commit, its
dates and the peers stand above it. A ratio is a peer's time divided by ours; it is bold where we are slower.

The command compares the present code with the code of each row. Rows that were measured with other code are stale:
tables mark them, and leave them out of their means.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks import digests, fp8, kept, plot, report, runner, scaling_cost, torch, tuning
from benchmarks import growth as grown
from benchmarks.__main__ import SUITES
from benchmarks.kept import WANTED, Comparison, against, comparisons, label, mark, missing_peers, result, rows_of
from benchmarks.report import COPY_FLOOR, PEAK_FLOOR, Finding, Json, geometric_mean, speedups

PAGE: Final = Path(__file__).parent / "README.md"
PAGES: Final = (PAGE, PAGE.parents[1] / "docs" / "distributed.md", report.RESULTS / "rows.md")
_BLOCK: Final = re.compile(r"(?<=<!-- benchmarks:)([\w-]+) -->\n.*?(?=<!-- /benchmarks:\1 -->)", re.DOTALL)
_VERSIONS: Final = {"PyTorch": "torch", "torch.compile": "torch", "Liger": "liger_kernel"}
"""For the first word of a peer's label, the key of its version in "machine", if it is not the word in lower case."""

_MEASURED_AGAINST: Final = "measured against"

Lines = Sequence[Sequence[str]]


def _peers(row: Json) -> str:
    return ", ".join(kept.peers_of(row))


def us(value: float | None) -> str:
    """Formats microseconds with three digits; returns "" for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(ratio: float) -> str:
    """Formats a ratio, in bold where lt_runtime is slower."""
    return f"**{ratio:.2f}×**" if ratio < 1 else f"{ratio:.2f}×"


def peer(found: Comparison | None) -> str:
    """The cells about the fastest other library: its time, its name and the ratio; empty cells for None."""
    return "" if found is None else f"{us(found.theirs)} {label(found.peer)}, {times(found.ratio)}"


def markdown(headings: Sequence[str], lines: Lines) -> str:
    """Formats headings and rows as a Markdown table."""
    every = [headings, ["---"] * len(headings), *lines]
    return "\n".join(" ".join(["|", *(f"{cell} |".lstrip() for cell in line)]) for line in every)


def source(suites: Iterable[str]) -> str:
    """The line above a table: commits, dates, machine and peers of the results of some suites."""
    return "; ".join(_source(suite) for suite in suites)


def _source(suite: str) -> str:
    rows, machine = rows_of(suite), result(suite)["machine"]
    dates = sorted(row["when"][:10] for row in rows)
    told = f"`{suite}`, {_at_commit(rows)}, from {dates[0]} to {dates[-1]}"
    told += f" on {machine['gpu']} with driver {machine['driver']}"
    told += f" and cuBLASLt {machine['cublaslt'] // 10000}.{machine['cublaslt'] // 100 % 100}"
    names = dict.fromkeys(name for row in rows for name in kept.peers_of(row))
    versions = [
        f"{name} {machine.get(_VERSIONS.get(name, name.lower()), 'of a version that was not recorded')}"
        for name in names
    ]
    return told + (f", against {', '.join(versions)}" if versions else "")


def _at_commit(rows: Sequence[Json]) -> str:
    """How many rows were measured with the code of the commit for which `report` ran last."""
    return f"{sum(not row['stale'] for row in rows)} of {len(rows)} rows at {kept.code()['commit'][:7]}"


# One function for each table.


def kernels() -> str:
    """Table of kernels: every kernel against the copy and the fastest peer."""
    lines = []
    for row in rows_of("kernels"):
        if "lt" not in row["us"]:
            continue  # this row has no time of lt_runtime's: it measures the fastest copy
        less = row["us"].get("torch_without_bias_gradient")
        also = "" if less is None else f" ({us(less)} without the bias gradient)"
        fraction = f"{100 * row['fraction_of_copy']:.0f} %"
        cells = [us(row["us"]["lt"]), fraction, peer(against(row)) + also]
        lines.append([row["case"] + mark(row), *cells, _peers(row)])
    copy = result("kernels")["copy_gb_s"]
    return markdown(["Kernel", "µs", f"of the copy's {copy:.0f} GB/s", "fastest peer, µs", _MEASURED_AGAINST], lines)


_ACTIVATIONS: Final = {"gelu": "GELU", "relu": "ReLU"}
_PEER: Final = "the fastest peer"
_AGAINST: Final = {
    _PEER: "the fastest peer of each block",
    "torch_graph": "PyTorch's kernels in a graph",
    "torch_compile": "torch.compile, default",
    "torch_max_autotune": "torch.compile, max-autotune",
    "lt_fused_top1": "everything fused that cuBLASLt can fuse, its first algorithms",
    "lt_split_top1": "nothing fused, first algorithms",
    "lt_priors": "lt_runtime untuned",
}


def layers() -> str:
    """Table of layers: mean and worst block against each contender, and tuned plans against the best candidates."""
    rows = rows_of("layers")
    made = _means("layers", lambda row: "")
    losses = [row["chosen_vs_best"] for row in rows if "chosen_vs_best" in row and not row["stale"]]
    seconds = [row["tuning_s"] for row in rows if "tuning_s" in row and not row["stale"]]
    if not (losses and seconds):
        return made
    near = f"{100 * sum(loss <= 1.03 for loss in losses) / len(losses):.0f} % of {len(losses)} blocks"
    slowest, tuning = f"{100 * (max(losses) - 1):.1f} % slower", f"{statistics.median(seconds):.2f} s at the median"
    told = f"The tuned plan is within 3 % of the best candidate in {near}, and at most {slowest}."
    return f"{made}\n\n{told} Tuning a block takes {tuning}."


def wide() -> str:
    """The table of `layers` for the shapes of the suite `wide`: a line for each stratum."""
    return _means("wide", lambda row: f" {row['stratum']}")


def _means(suite: str, group: Callable[[Json], str]) -> str:
    """A line for each contender, type and group; stale rows have lines of their own."""
    lines, rows = [], [_with_fastest(suite, row) for row in rows_of(suite)]
    groups = sorted({(row["stale"], row["type"], group(row)) for row in rows})
    for contender, told_as in _AGAINST.items():
        for each in groups:
            of_group = [row for row in rows if (row["stale"], row["type"], group(row)) == each]
            if some := [row for row in of_group if contender in row["us"]]:
                activations = " and ".join(sorted({_ACTIVATIONS[row["activation"]] for row in some}))
                found = speedups(some, contender)
                where = min(found, key=found.__getitem__)
                told = f"{len(some)}{each[2]} {each[1].upper()} {activations}{mark(some[0])}"
                figures = times(geometric_mean(found.values())), f"{times(found[where])} ({where})"
                lines.append([told_as, told, *figures, str(sum(value < 1 for value in found.values()))])
    return markdown(["Against", "blocks", "geometric mean", "worst", "slower"], lines)


def _with_fastest(suite: str, row: Json) -> dict[str, Any]:
    """The row, with the time of the fastest peer if it was measured against all of them."""
    found = None if missing_peers(suite, row) else against(row)
    return {**row} if found is None else {**row, "us": {**row["us"], _PEER: found.theirs}}


def steps() -> str:
    """Table of whole training steps."""
    lines = []
    for row in rows_of("steps"):
        if "lt" not in row["us"]:
            continue  # the row that measures prefetching has other contenders
        masters = ", FP32 masters" if row["type"] == "bf16" and row["master"] else ""
        of_layers = f"{_ACTIVATIONS[row['activation']]}, {row['loss'].replace('_', '-')}"
        what = f"{'-'.join(map(str, row['dims']))}, batch {row['rows']}, {of_layers}, {row['type'].upper()}{masters}"
        untuned = f"{us(row['us']['lt_untuned'])}, {times(row['us']['lt_untuned'] / row['us']['lt'])}"
        called = us(row["us"].get("lt_call")), peer(against(row, ours="lt_call"))
        cells = us(row["us"]["lt"]), peer(against(row)), *called, untuned, _memory(row), _peers(row)
        lines.append([what + mark(row), *cells])
    called = "called", "fastest peer, called"
    others = "lt_runtime untuned", _MEMORY, _MEASURED_AGAINST
    return markdown(["MLP", "lt_runtime", "fastest peer", *called, *others], lines)


_MEMORY: Final = "memory / PyTorch's"


def _memory(row: Json) -> str:
    return f"{row['memory_ratio']:.2f}" if "memory_ratio" in row else ""


def models() -> str:
    """Table of the suite `models`: training steps of models such as those of examples/."""
    lines = []
    for row in rows_of("models"):
        graph = row["ratio"].get("torch_graph")
        cells = peer(against(row)), "" if graph is None else times(graph), _memory(row), _peers(row)
        lines.append([row["case"] + mark(row), us(row["us"].get("lt")), *cells])
    headings = "model", "lt_runtime", "fastest peer", "PyTorch in a graph", _MEMORY, _MEASURED_AGAINST
    return markdown(headings, lines)


def torch_models() -> str:
    """Table of training steps of PyTorch models: our time in each way, with PyTorch's in the same way as a multiple."""
    lines = []
    for row in (each for each in rows_of("torch") if not _has_fp8(each)):
        found = {way: (torch.times_of(row).get(f"lt_{way}"), torch.ratio(row, way)) for way in torch.WAYS}
        cells = [us(ours) + ("" if ratio is None else f", {times(ratio)}") for ours, ratio in found.values()]
        liger = min((ratio for way in torch.WAYS if (ratio := torch.ratio(row, way, "liger"))), default=None)
        memory = [f"{ratio:.2f}" if (ratio := torch.memory_ratio(row, way)) else "" for way in torch.WAYS[1::2]]
        lines.append([row["case"] + mark(row), *cells, "" if liger is None else times(liger), *memory, _peers(row)])
    headings = "eager", "in a graph", "compiled", "compiled, in a graph", "Liger at best"
    return markdown(("model", *headings, f"{_MEMORY} in a graph", "compiled, in a graph", _MEASURED_AGAINST), lines)


def torch_fp8() -> str:
    """Table of training steps of PyTorch models in FP8: our time in a graph, with the others' as multiples."""
    lines = []
    for row in filter(_has_fp8, rows_of("torch")):
        line, found = [row["case"] + mark(row)], row["us"]
        for way in torch.WAYS[1::2]:
            ours, others = found.get(f"lt_fp8_{way}"), (found.get(f"{name}_{way}") for name in ("lt", "torchao"))
            line += [us(ours), *("" if None in (ours, each) else times(each / ours) for each in others)]
        lines.append(line)
    others = "our BF16", "torchao"
    return markdown(("model", "FP8 in a graph", *others, "compiled, in a graph", *others), lines)


def _has_fp8(row: Json) -> bool:
    return any(name.startswith("lt_fp8") for name in row["us"])


def narrow() -> str:
    """Training steps of narrow MLPs beside their floors, with each floor as a fraction of our time."""
    lines = []
    for each in comparisons("narrow"):
        least = each.row.get("floors_us", {})
        found = (least.get(name) for name in (COPY_FLOOR, PEAK_FLOOR))
        floors = ("" if floor is None else f"{us(floor)}, {100 * floor / each.ours:.1f} %" for floor in found)
        cells = [us(each.ours), *floors, peer(each)]
        lines.append([each.marked, *cells, _peers(each.row)])
    headings = "MLP", "lt_runtime", "least by copy", "least by peak", "fastest peer", _MEASURED_AGAINST
    return markdown(headings, lines)


def fp8_steps() -> str:
    """Table of training steps in FP8 against BF16 and other libraries: of bursts and sustained."""
    lines = []
    for row in rows_of("fp8"):
        if "lt" in row.get("sustained_us", {}):
            cells = [cell for times_of in ("us", "sustained_us") for cell in _fp8_cells(row[times_of])]
            lines.append([f"{row['case']}, batch {row['rows']}{mark(row)}", *cells, _memory(row)])
    others = "our BF16", "PyTorch in BF16", "torchao"
    headings = "MLP", "FP8, bursts", *others, "FP8, sustained", *others, "memory / BF16's"
    return markdown(headings, lines)


def _fp8_cells(found: Mapping[str, float]) -> list[str]:
    theirs = "torch_autocast" if "torch_autocast" in found else "torch_bf16"
    others = (found.get(name) for name in ("lt_bf16", theirs, "torchao"))
    return [us(found["lt"]), *("" if other is None else times(other / found["lt"]) for other in others)]


def fp8_widths() -> str:
    """Tables of training steps over widths and batches, and of inference: our time in FP8, and BF16's as a multiple."""
    rows = [row for row in rows_of("fp8") if {"lt", "lt_bf16"} <= row["us"].keys()]
    found, marks = {row["case"]: row["us"] for row in rows}, {row["case"]: mark(row) for row in rows}
    lines = dict[str, list[str]]()
    for case in fp8.GRID:
        each = found.get(case.name)
        cell = "" if each is None else f"{us(each['lt'])}, {times(each['lt_bf16'] / each['lt'])}{marks[case.name]}"
        lines.setdefault("-".join(map(str, case.dims)), []).append(cell)
    batches = [f"batch {rows}" for rows in dict.fromkeys(case.rows for case in fp8.GRID)]
    made = markdown(["MLP", *batches], [[name, *cells] for name, cells in lines.items()])
    cases = [(str(case.rows) + marks[case.name], found[case.name]) for case in fp8.INFERENCE if case.name in found]
    inference = [[rows, us(each["lt"]), times(each["lt_bf16"] / each["lt"])] for rows, each in cases]
    told = markdown(["rows in inference, 4096-14336-4096", "FP8", "our BF16"], inference)
    return f"{made}\n\n{told}" if inference else made


def host() -> str:
    """Table of the host's time for a call."""
    lines = [[each.marked, us(each.ours), peer(each), _peers(each.row)] for each in comparisons("host")]
    return markdown(["Call", "lt_runtime", "fastest peer", _MEASURED_AGAINST], lines)


def slower() -> str:
    """Every row of every suite in which some peer is faster, the worst first."""
    found = sorted((each for suite in WANTED for each in comparisons(suite)), key=lambda each: each.ratio)
    lines = [[each.suite, each.marked, us(each.ours), peer(each)] for each in found if each.ratio < 1]
    return markdown(["Suite", "row", "lt_runtime", "fastest peer"], lines)


def cold() -> str:
    """Table of the times of a new process, in milliseconds."""
    lines = []
    for row in rows_of("cold"):
        found = {name: f"{value / 1e3:.1f}" for name, value in row["us"].items()}
        lines.append([row["case"] + mark(row), found["lt"], found.get("lt_empty_cache", "")])
        if "lt_all_names" in found:
            lines.append([f"{row['case']}, and the use of all its names{mark(row)}", found["lt_all_names"], ""])
    # Results of older versions were measured with a filled cache of CuPy.
    caches = "empty caches" if any("cupy_cache" in row for row in rows_of("cold")) else "an empty kernel cache"
    return markdown(["Process", "ms", f"with {caches}"], lines)


def tuning_figures() -> str:
    """Table of the figures over all rows of the suite `tuning`, current and stale ones apart."""
    return _figures("tuning", tuning.findings)


def growth() -> str:
    """Table of the figures over all rows of the suite `growth`, and its picture."""
    if not rows_of("growth"):
        return "Not measured yet."
    picture = plot.GROWTH.relative_to(PAGE.parent).as_posix()
    return f"![Times by rows, parameters and layers]({picture})\n\n{_figures('growth', grown.findings)}"


def _figures(suite: str, findings: Callable[[Sequence[Json]], Sequence[Finding]]) -> str:
    lines = []
    for stale in (False, True):
        some = [row for row in rows_of(suite) if row["stale"] == stale]
        found = [each for each in findings(some) if each.value is not None] if some else []
        lines += [[each.what + mark(some[0]), f"{each.value:.3g}", each.where or ""] for each in found]
    return markdown(["Figure", "", "where"], lines)


def scaling() -> str:
    """Table of training steps of a group: one process, and two on two GPUs."""
    lines = []
    for row in rows_of("scaling"):
        found = row["us"]
        one = f"{us(found['lt_group_of_one'])}, {found['lt_group_of_one'] / found['lt']:.2f}×"
        two = [us(found["lt_two"]), f"{row['samples_ratio']:.2f}×"] if "lt_two" in found else ["", ""]
        sums = [us(found["lt_sums"]), f"{100 * max(0.0, row['hidden']):.0f} %"] if "lt_two" in found else ["", ""]
        lines.append([f"{row['case']}, batch {row['rows']}{mark(row)}", us(found["lt"]), one, *two, *sums])
    headings = "alone", "group of one", "two GPUs", "samples of two / of one", "sums alone", "of these hidden"
    return markdown(["MLP", *headings], lines)


_SHOWS: Final = 0.05
"""Share of a step's time from which on communication is said to show."""


def scaling_predicted() -> str:
    """Table of predicted samples a second of each GPU, relative to one GPU alone, for two networks.

    The last column has the rows of each process at which communication takes `_SHOWS` of the step with the fewest and
    the most GPUs, if the step's time without it is proportional to the rows.
    """
    lines, known = [], {row["case"]: row for row in rows_of("scaling")}
    for network, cases in (result("scaling")["predicted_us"] if known else {}).items():
        for case, found in cases.items():
            alone, rows = known[case]["us"]["lt"], known[case]["rows"]
            shares = [f"{100 * alone / value:.0f} %" for value in found.values()]
            ends = min(found.values()), max(found.values())
            below = " to ".join(f"{rows * (each / alone - 1) * (1 / _SHOWS - 1) / 1e3:.0f}" for each in ends)
            lines.append([network, case + mark(known[case]), *shares, below])
    counts = [f"{gpus} GPUs" for gpus in scaling_cost.GPUS]
    return markdown(["network", "MLP", *counts, "shows below this batch, thousands"], lines)


def code() -> str:
    """Table of suites: how many rows are current, stale, and measured against every peer, and when."""
    lines = []
    for suite, rows in ((suite, rows_of(suite)) for suite in SUITES):
        dates = sorted(row["when"][:10] for row in rows) or [""]
        stale = sum(row["stale"] for row in rows)
        complete = sum(not missing_peers(suite, row) for row in rows) if suite in WANTED else ""
        lines.append([f"`{suite}`", *map(str, (len(rows), len(rows) - stale, stale, complete)), dates[0], dates[-1]])
    every = [row for suite in SUITES for row in rows_of(suite)]
    made = markdown(["Suite", "rows", "current", "stale", "against every peer", "first", "last"], lines)
    return f"Measured on this code: {_at_commit(every)}.\n\n{made}"


def each_row() -> str:
    """Table of all rows: date, commit, whether they are current, and the peers that they have and lack."""
    lines = []
    for suite, row in ((name, each) for name in SUITES for each in rows_of(name)):
        origin = row["when"][:10], row["commit"][:7], "stale" if row["stale"] else "current"
        lines.append([suite, row["case"], *origin, _peers(row), ", ".join(missing_peers(suite, row))])
    return markdown(["Suite", "row", "date", "commit", "code", _MEASURED_AGAINST, "not against"], lines)


TABLES: Final[Mapping[str, tuple[Callable[[], str], Sequence[str]]]] = {
    "code": (code, ()),
    "each-row": (each_row, ()),
    "slower": (slower, ()),
    "steps": (steps, ("steps",)),
    "models": (models, ("models",)),
    "torch": (torch_models, ("torch",)),
    "torch-fp8": (torch_fp8, ("torch",)),
    "layers": (layers, ("layers",)),
    "wide": (wide, ("wide",)),
    "kernels": (kernels, ("kernels",)),
    "narrow": (narrow, ("narrow",)),
    "fp8": (fp8_steps, ("fp8",)),
    "fp8-widths": (fp8_widths, ("fp8",)),
    "host": (host, ("host",)),
    "cold": (cold, ("cold",)),
    "tuning": (tuning_figures, ("tuning",)),
    "growth": (growth, ("growth",)),
    "scaling": (scaling, ("scaling",)),
    "scaling-predicted": (scaling_predicted, ("scaling",)),
}
"""Maps the name of a table to the function that makes it, and to the suites whose source stands above it."""


def table(name: str) -> str:
    """A table with the line that says where its numbers are from.

    Raises:
        KeyError: no table has this name.
    """
    make, suites = TABLES[name]
    return f"*{source(suites)}.*\n\n{make()}" if any(map(rows_of, suites)) else make()


def rendered(text: str) -> str:
    """The text of the page with every table written anew.

    Raises:
        KeyError: no table has this name.
    """
    return _BLOCK.sub(lambda block: f"{block[1]} -->\n\n{table(block[1])}\n\n", text)


def note_code(found: Mapping[str, str]) -> None:
    """Writes the digests of the present code, by suite, and its commit beside the results.

    Also writes the commit into rows of the same digest whose commit is unknown, as on a machine without git.
    """
    commit = report.clean_commit(digests.SOURCES)
    report.write_json(kept.RESULTS / kept.CODE, {"commit": commit, "digests": found})
    for suite in filter(rows_of, SUITES):
        content, own = result(suite), {"digest": found[suite], "commit": report.UNKNOWN}
        if unknown := [row for row in content["rows"] if own.items() <= row.items()]:
            for row in unknown:
                row["commit"] = commit
            report.write_json(kept.RESULTS / f"{suite}.json", content)


def main(argv: Sequence[str]) -> None:
    """Takes over the rows of other runs, notes the present code, and writes the tables of all pages, and the plots.

    Raises:
        SystemExit: a folder has no result file, or rows of another GPU.
    """
    made = report.command("report", __doc__)
    made.add_argument("runs", nargs="*", type=Path, metavar="DIR", help="the folder of another run")
    files = digests.working_files()
    found = {suite: digests.digest(suite, files) for suite in SUITES}
    for folder in made.parse_args(argv).runs:
        suites = [suite for suite in SUITES if (folder / f"{suite}.json").exists()]
        if not suites:
            made.error(f"{folder} has no result file of a suite")
        for suite in suites:
            count = runner.merge(suite, import_module(f"benchmarks.{suite}").SUITE, folder, found[suite])
            print(f"{count} newer rows of {suite} from {folder}")
    note_code(found)
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    for file in (*PAGES, plot.write(), *plot.write_losses(), *plot.write_growth()):
        print(f"written to {file}")
    print(code())
