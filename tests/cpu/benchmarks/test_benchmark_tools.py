"""What compares two checkouts, and what writes the tables of the READMEs: both without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import fastest, plots, readme
from benchmarks.__main__ import main
from benchmarks.compare import Comparison, Process, compared, findings, lacking

ROOT = Path(__file__).parents[3]


OLD = [{("a", "lt"): us, ("b", "lt"): 10.0, ("c", "lt"): 1.0} for us in (1.0, 2.0, 9.0)]
NEW = [{("a", "lt"): us, ("b", "lt"): 5.0, ("d", "lt"): 1.0} for us in (4.0, 3.0, 3.0)]


def test_a_ratio_is_of_medians_over_processes() -> None:
    rows = compared("host", OLD, NEW)
    assert [(row["case"], row["ratio"], row["old_us"], row["new_us"]) for row in rows] == [
        ("a", 1.5, 2.0, 3.0),
        ("b", 0.5, 10.0, 5.0),
    ]
    assert rows[0]["old"] == [1.0, 2.0, 9.0]
    assert lacking(OLD, NEW) == ["c: lt", "d: lt"]
    assert compared("host", [], []) == lacking([], []) == []


def test_the_figures_of_a_comparison() -> None:
    mean, worst = findings("host", compared("host", OLD, NEW))
    assert (mean.value, mean.met) == (pytest.approx(0.75**0.5), True)
    assert (worst.value, worst.where, worst.met) == (1.5, "a: lt", False)
    mean, worst = findings("host", compared("host", OLD, NEW), ["^a"])
    assert (mean.value, worst.value, worst.rows) == (0.5, 0.5, 1)
    assert {each.met for each in findings("layers", [])} == {None}
    _, worst = findings("layers", compared("layers", OLD, NEW))
    assert worst.met is None, "told, and not judged"


def checkout(folder: Path) -> Path:
    (folder / "lt_runtime").mkdir(parents=True)
    (folder / "lt_runtime" / "__init__.py").touch()
    return folder


def test_a_process_imports_its_checkout_s_package_and_these_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/given")
    sides = {side: checkout(tmp_path / side) for side in ("old", "new")}
    comparison = Comparison(sides, tmp_path / "work", "mnist")
    comparison.prepare()
    comparison.prepare()
    assert (tmp_path / "work" / "code" / "benchmarks").resolve() == ROOT / "benchmarks"
    environment = comparison.environment("old")
    assert environment["PYTHONPATH"].split(":") == [str(tmp_path / "work" / "code"), str(sides["old"]), "/given"]
    assert environment["LT_RUNTIME_CACHE_DIR"] != comparison.environment("new")["LT_RUNTIME_CACHE_DIR"]
    command = comparison.command(Process("layers", 3, "old"))
    assert command[1:5] == ["-m", "benchmarks", "layers", "--ours"]
    assert command[5:] == [
        *("--out", str(tmp_path / "work" / "layers-3-old"), "--rounds", "5", "--keep-plans", "--only", "mnist")
    ]
    assert comparison.command(Process("layers", 0, "old"))[8] == "1", "one round is enough to fill a cache"
    assert "--keep-plans" not in comparison.command(Process("host", 1, "new"))


def test_results_of_another_comparison_are_not_taken_for_this_one_s(tmp_path: Path) -> None:
    sides = {side: checkout(tmp_path / side) for side in ("old", "new")}
    Comparison(sides, tmp_path / "work", "mnist").prepare()
    with pytest.raises(SystemExit, match="is of another comparison"):
        Comparison(sides, tmp_path / "work", "gpt2").prepare()


def test_a_checkout_without_the_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    sides = {"old": tmp_path / "empty", "new": checkout(tmp_path / "new")}
    with pytest.raises(SystemExit, match=r"--old is .*empty: no lt_runtime"):
        Comparison(sides, tmp_path / "work", None).prepare()


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real benchmarks in a real process, with this checkout's package and without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    comparison = Comparison({"old": ROOT, "new": ROOT}, tmp_path, None)
    comparison.prepare()
    process = Process("host", 1, "new")
    with pytest.raises(SystemExit, match=r"(?s)host-1-new failed.*the suite host needs an NVIDIA GPU"):
        comparison.run(process)
    assert not comparison.is_done(process)


def test_a_process_that_measures_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        rows = [{"case": "a case", "us": {}, "error": "ModuleNotFoundError: No module named 'nvtx'"}]
        (tmp_path / "steps-0-old" / "steps.json").write_text(json.dumps({"rows": rows}))
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(subprocess, "run", measure)
    comparison, process = Comparison({"old": ROOT, "new": ROOT}, tmp_path), Process("steps", 0, "old")
    with pytest.raises(SystemExit, match="steps-0-old has measured nothing"):
        comparison.run(process)
    assert not comparison.is_done(process)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of processes that were run; each leaves a result of its own."""
    names: list[str] = []

    def run(comparison: Comparison, process: Process, gpu: str | None) -> None:
        names.append(process.name if gpu is None else f"{process.name} on {gpu}")
        us = {"old": 10.0, "new": 9.0}[process.side] + process.number
        folder = comparison.work / process.name
        folder.mkdir(parents=True)
        rows = [{"case": "a case", "us": {"lt": us}}]
        (folder / f"{process.suite}.json").write_text(json.dumps({"rows": rows}))
        (folder / "done").touch()

    monkeypatch.setattr(Comparison, "prepare", lambda _: None)
    monkeypatch.setattr(Comparison, "run", run)
    return names


def asked(tmp_path: Path, *options: str) -> list[str]:
    sides = "--old", str(tmp_path / "old"), "--new", str(tmp_path / "new")
    return ["compare", "steps", *sides, "--processes", "3", "--work", str(tmp_path / "work"), *options]


def test_a_comparison(tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(asked(tmp_path))
    turns = ["0-old", "0-new", "1-new", "1-old", "2-old", "2-new", "3-new", "3-old"]
    assert ran == [f"steps-{each}" for each in turns]
    written = json.loads((tmp_path / "work" / "compare.json").read_text())
    (row,) = written["rows"]
    assert (row["suite"], row["contender"], row["ratio"]) == ("steps", "lt", pytest.approx(11 / 12, abs=1e-4))
    assert written["summary"][0]["what"] == "steps, new / old, geometric mean"
    assert "3 of 3 pairs of processes, 1 rows" in capsys.readouterr().out
    main(asked(tmp_path))
    assert len(ran) == 8, "what is done is not run again"


PAIRS = ("steps-1", "steps-2", "steps-3")


def test_pairs_are_spread_over_gpus(tmp_path: Path, ran: list[str]) -> None:
    main(asked(tmp_path, "--gpus", "2", "5"))
    names, gpus = zip(*(name.split(" on ") for name in ran), strict=True)
    assert {*names[:2]} == {"steps-0-old", "steps-0-new"}, "both caches are filled before a pair runs"
    pairs = {each: {gpu for name, gpu in zip(names, gpus, strict=True) if name.startswith(each)} for each in PAIRS}
    assert all(len(each) == 1 and each <= {"2", "5"} for each in pairs.values()), "a pair is of one GPU"
    assert len(ran) == 8


def test_a_comparison_goes_on_where_one_ended(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(asked(tmp_path, "--minutes", "-1"))
    assert ran == []
    assert "time is up" in capsys.readouterr().out
    main(asked(tmp_path, "--out", str(tmp_path / "out.json")))
    assert len(ran) == 8
    assert (tmp_path / "out.json").exists()


@pytest.mark.parametrize("file", readme.FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_tables_are_those_that_the_results_give(file: Path) -> None:
    text = file.read_text()
    assert readme.rendered(text) == text, "run `python -m benchmarks report`"


def test_every_table_is_shown_once() -> None:
    text = "".join(file.read_text() for file in readme.FILES)
    assert sorted(re.findall("<!-- benchmarks:(.*) -->", text)) == sorted(readme.TABLES)


def block(name: str, inside: str = "") -> str:
    return f"<!-- benchmarks:{name} -->\n{inside}<!-- /benchmarks:{name} -->"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes results for the generator."""
    monkeypatch.setattr(fastest, "RESULTS", tmp_path)

    def write(suite: str, *rows: dict[str, Any], **more: Any) -> None:
        (tmp_path / f"{suite}.json").write_text(json.dumps({"commit": "abc", **more, "rows": rows}))

    return write


def test_only_tables_are_written_anew(results: Any) -> None:
    results("cold", {"case": "first call", "us": {"lt": 1234.0, "lt_empty_cache": 99_000.0}})
    table = "\n| Process | ms | with an empty kernel cache |\n| --- | --- | --- |\n| first call | 1.2 | 99.0 |\n\n"
    old = block("cold", "old\n")
    made = readme.rendered(f"before {old} after")
    assert made == f"before {block('cold', table)} after"
    assert readme.rendered(made) == made
    with pytest.raises(KeyError, match="unknown"):
        readme.rendered(block("unknown"))


def test_losses_are_shown(results: Any) -> None:
    results(
        "host",
        {"case": "TrainStep call", "us": {"lt": 20.0, "torch_graph": 13.0}},
        {
            "case": "linear_fwd + linear_bwd, eager",
            "us": {"lt": 18.4, "torch_eager": 167.0, "torch_eager_one_thread": 128.0},
        },
        {"case": "matmul", "us": {"lt": 9.0, "torch_eager": 12.0, "cupy": 8.0, "lt_bound": 2.0}},
        {"case": "a thousand ranges", "us": {"lt": 50.0, "nullcontext": 20.0}},
    )
    lines = readme.host().splitlines()
    assert lines[2:] == [
        "| TrainStep call | 20.0 | 13.0 PyTorch in a graph, **0.65×** |",
        "| linear_fwd + linear_bwd, eager | 18.4 | 128 PyTorch, 6.96× |",
        "| matmul | 9.00 | 8.00 CuPy, **0.89×** |",
        "| matmul, through lt.bind | 2.00 | 12.0 PyTorch, 6.00× |",
    ]
    results(
        "steps",
        {"case": "a", "us": {"lt": 10.0, "jax": 8.0, "lt_call": 11.0, "torch_graph_call": 12.0, "jax_call": 10.9}},
    )
    results("kernels", {"case": "b", "us": {"lt": 10.0, "torch": 11.0, "torch_without_bias_gradient": 1.0}})
    assert readme.lost().splitlines()[2:] == [
        "| host | TrainStep call | 20.0 | 13.0 PyTorch in a graph, **0.65×** |",
        "| steps | a | 10.0 | 8.00 JAX, **0.80×** |",
        "| host | matmul | 9.00 | 8.00 CuPy, **0.89×** |",
        "| steps | a, called | 11.0 | 10.9 JAX, **0.99×** |",
    ]


def test_the_fastest_peer_that_does_the_same_counts(results: Any) -> None:
    us = {"lt": 2.0, "torch": 8.0, "torch_log_softmax": 6.0, "torch_without_bias_gradient": 1.0}
    results("kernels", {"case": "loss", "us": us, "fraction_of_copy": 0.5}, copy_gb_s=4000.0)
    told = "6.00 PyTorch log_softmax by hand, 3.00× (1.00 without the bias gradient)"
    assert readme.kernels().splitlines()[-1] == f"| loss | 2.00 | 50 % | {told} |"


def test_long_runs_stand_beside_turns(results: Any) -> None:
    state = {"sm_mhz": 1455.0, "watts": 689.7, "celsius": 60.0}
    long = {"lt": {"us": 4300.0, **state}, "torch_graph": {"us": 4386.0}, "torch_graph_bf16": {"us": 4257.0}}
    results("layers", {"case": "short", "us": {"lt": 9.0}})
    results("steps", {"case": "long", "us": {"lt": 4200.0}, "sustained": long})
    told = "| long | 4200 | 4300 | 4257 PyTorch in a graph, **0.99×** | 1455 MHz, 690 W |"
    assert readme.sustained().splitlines()[2:] == [told]


def test_least_times_of_narrow_steps_stand_beside_them(results: Any) -> None:
    old = {"case": "16x1 2^10 BF16", "us": {"lt": 10.0, "jax": 24.0}}
    results("narrow", old, old | {"case": "new", "floors_us": {"copy": 0.5, "peak": 2.25}})
    assert readme.narrow().splitlines()[2:] == [
        "| 16x1 2^10 BF16 | 10.0 | | | 24.0 JAX, 2.40× |",
        "| new | 10.0 | 0.50, 5.0 % | 2.25, 22.5 % | 24.0 JAX, 2.40× |",
    ]


def test_what_was_compiled_is_told(results: Any) -> None:
    row = {"type": "bf16", "activation": "gelu", "us": {"lt": 2.0, "torch_max_autotune": 1.5}, "case": "a"}
    results("layers", row, row | {"case": "b", "commit": "other", "us": {"lt": 1.0, "torch_max_autotune": 3.0}})
    told = "2 BF16 GELU, 1 of them at other commits | 1.50× | **0.75×** (a) | 1 |"
    lines = readme.layers().splitlines()[2:]
    assert lines == [f"| the fastest peer of each block | {told}", f"| torch.compile, max-autotune | {told}"]


def test_shapes_drawn_by_a_seed_are_told_by_stratum(results: Any) -> None:
    row = {"type": "bf16", "activation": "gelu", "stratum": "odd", "us": {"lt": 2.0, "torch_graph": 3.0, "jax": 1.5}}
    assert len(readme.wide().splitlines()) == 2, "nothing was measured"
    results("wide", row | {"case": "a"}, row | {"case": "b", "stratum": "tall", "us": {"lt": 1.0, "torch_graph": 4.0}})
    assert readme.wide().splitlines()[2:] == [
        "| the fastest peer of each block | 1 odd BF16 GELU | **0.75×** | **0.75×** (a) | 1 |",
        "| the fastest peer of each block | 1 tall BF16 GELU | 4.00× | 4.00× (b) | 0 |",
        "| PyTorch's kernels in a graph | 1 odd BF16 GELU | 1.50× | 1.50× (a) | 0 |",
        "| PyTorch's kernels in a graph | 1 tall BF16 GELU | 4.00× | 4.00× (b) | 0 |",
        "| JAX, jit | 1 odd BF16 GELU | **0.75×** | **0.75×** (a) | 1 |",
    ]


@pytest.mark.parametrize("name", plots.PLOTS)
def test_plots_are_those_that_the_results_give(name: str) -> None:
    file = plots.FOLDER / f"{name}.png"
    with Image.open(file) as picture:
        assert picture.info[plots.DIGEST] == plots.digest(plots.PLOTS[name][0]), "run `python -m benchmarks report`"
    assert file.stat().st_size < 100_000


def test_plots_are_drawn_from_the_results(results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "plots")
    block = {"type": "bf16", "activation": "gelu", "layer": [64, 32, 16], "us": {"lt": 2.0, "torch_graph": 1.5}}
    machine = {"gpu": "a GPU"}
    others = {
        "case": "b 64×32×16 TF32 ReLU",
        "type": "tf32",
        "activation": "relu",
        "us": {"lt": 1.0, "torch_graph": 9.0},
    }
    results("layers", {"case": "a 64×32×16 BF16 GELU", **block}, block | others, machine=machine)
    results("kernels", copy_gb_s=4000.0)
    step = {"case": "mnist BF16", "type": "bf16", "activation": "relu", "us": {"lt": 3.0, "jax": 4.0}}
    results("steps", step, {"case": "soak", "us": {"lt_call": 1.0}})
    results("wide", block | {"case": "odd fit 64×31×15 BF16 GELU", "stratum": "odd"})
    results("narrow", step | {"case": "16x1 2^10 BF16"}, step | {"case": "16x1 2^14 BF16"})
    results("host", {"case": "AdamW", "us": {"lt": 2.0, "torch_eager": 8.0}}, machine=machine)
    files = plots.write()
    assert [each.name for each in files] == ["speedup.png", "roofline.png", "host.png"]
    before = [each.read_bytes() for each in files]
    results("host", {"case": "AdamW", "us": {"lt": 12.0, "torch_eager": 8.0}}, machine=machine)
    assert [each.read_bytes() == old for each, old in zip(plots.write(), before, strict=True)] == [True, True, False]
