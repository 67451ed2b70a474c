"""Rows and figures of results, the tables and the plot of benchmarks/README.md, and comparisons of results."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from benchmarks import digests, growth, kept, plot, report, tables, torch
from benchmarks.__main__ import SUITES, main
from benchmarks.report import Row
from benchmarks.timing import Timing

ROW = Row(
    "a case",
    {"lt": Timing(10.0, 0.5), "torch": Timing(15.0, 1.0)},
    bytes=36_000_000,
    copy_gb_s=4000.0,
    setting={"repetitions": 20},
    left_out={"jax": "ImportError: [no] module"},
    flops=2_000_000_000,
    peak_tflops=500.0,
)


def test_a_row_as_json() -> None:
    """Moving 36 MB at 4 TB/s takes 9 µs, and 2 GFLOP at 500 TFLOP/s take 4 µs."""
    assert ROW.as_json() == {
        "case": "a case",
        "us": {"lt": 10.0, "torch": 15.0},
        "spread": {"lt": 0.5, "torch": 1.0},
        "repetitions": 20,
        "bytes": 36_000_000,
        "flops": 2_000_000_000,
        "floors_us": {"copy": 9.0, "peak": 4.0},
        "fraction_of_copy": 0.9,
        "fraction_of_peak": 0.4,
        "ratio": {"torch": 1.5},
        "left_out": {"jax": "ImportError: [no] module"},
    }
    failed = replace(ROW, timings={}, bytes=None, flops=None, setting={}, left_out={})
    assert failed.as_json() == {"case": "a case", "us": {}, "spread": {}}


def test_a_row_in_the_terminal() -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(report.table([ROW]))
        console.print(report.findings_table(report.against_ours([ROW.as_json()], ["torch", "jax"])))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[1] == ["a", "case", "lt", "10.00", "0.50", "90.0", "%", "40.0", "%"]
    assert lines[2] == ["torch", "15.00", "1.00", "1.50"]
    assert lines[3] == ["(least", "by", "copy)", "9.00"]
    assert lines[5] == ["jax", "left", "out", "ImportError:", "[no]", "module"]
    assert ["torch", "/", "lt,", "worst", "1.500", "1", "a", "case"] in lines


def test_a_result_file_has_lists_on_one_line(tmp_path: Path) -> None:
    content = {"a": [1, 2.5, "three  [4]", None], "b": [{"c": [[1, 2], []]}], "d": []}
    report.write_json(tmp_path / "some.json", content)
    text = (tmp_path / "some.json").read_text()
    assert json.loads(text) == content
    assert '"a": [1, 2.5, "three  [4]", null],' in text


@pytest.mark.parametrize(
    "file", sorted({*report.RESULTS.glob("*.json")} - {report.RESULTS / kept.CODE}), ids=lambda file: file.name
)
def test_kept_results_have_the_common_form(file: Path) -> None:
    result = json.loads(file.read_text())
    assert {"gpu", "cublaslt", "cupy", "torch", "python"} <= set(result["machine"])
    assert result["commit"]
    for row in result["rows"]:
        assert set(row["us"]) == set(row["spread"])
        assert all(value > 0 for value in row["us"].values())


def test_the_page_and_its_picture_are_those_of_the_results() -> None:
    texts = [page.read_text() for page in tables.PAGES]
    assert [*map(tables.rendered, texts)] == texts, "run `python -m benchmarks report`"
    assert sorted(re.findall("<!-- benchmarks:(.*) -->", "".join(texts))) == sorted(tables.TABLES)
    with Image.open(plot.FILE) as picture:
        assert picture.info[plot.DIGEST] == plot.digest(), "run `python -m benchmarks report`"
    assert plot.FILE.stat().st_size < 100_000


COMMIT = "1234567" + 33 * "8"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes result files of current rows, from which the tables and the plots are made."""
    monkeypatch.setattr(kept, "RESULTS", tmp_path)
    (tmp_path / kept.CODE).write_text(json.dumps({"commit": COMMIT, "digests": dict.fromkeys(SUITES, "now")}))
    machine = {"gpu": "a GPU", "driver": "580", "cublaslt": 130100, "torch": "2.11", "jax": "0.11"}

    def write(suite: str, *rows: dict[str, Any], **more: Any) -> None:
        facts = {"machine": machine, "commit": "abcdefgh", "when": "2026-01-02T03:04:05Z", **more}
        current = [{"digest": "now", **row} for row in rows]
        (tmp_path / f"{suite}.json").write_text(json.dumps({**facts, "rows": current}))

    return write


def test_a_table_has_its_source_and_the_rest_of_the_page_stays(results: Any) -> None:
    row = {"case": "loss", "fraction_of_copy": 0.5}
    us = {"lt": 2.0, "torch": 8.0, "torch_log_softmax": 6.0, "torch_without_bias_gradient": 1.0}
    older = {**row, "us": {"lt": 3.0, "torch_compile": 3.0}, "digest": "before", "when": "2025-12-31T00:00:00Z"}
    results("kernels", {**row, "us": us}, older, copy_gb_s=4000.0)
    made = tables.rendered("before <!-- benchmarks:kernels -->\nold\n<!-- /benchmarks:kernels --> after")
    source = "`kernels`, 1 of 2 rows at 1234567, from 2025-12-31 to 2026-01-02 on a GPU"
    source += " with driver 580 and cuBLASLt 13.1"
    told = "6.00 PyTorch log_softmax by hand, 3.00× (1.00 without the bias gradient)"
    assert made.splitlines() == [
        "before <!-- benchmarks:kernels -->",
        "",
        f"*{source}, against PyTorch 2.11, torch.compile 2.11.*",
        "",
        "| Kernel | µs | of the copy's 4000 GB/s | fastest peer, µs | measured against |",
        "| --- | --- | --- | --- | --- |",
        f"| loss | 2.00 | 50 % | {told} | PyTorch |",
        "| loss (stale) | 3.00 | 50 % | 3.00 torch.compile, 1.00× | torch.compile |",
        "",
        "<!-- /benchmarks:kernels --> after",
    ]
    with pytest.raises(KeyError, match="unknown"):
        tables.rendered("<!-- benchmarks:unknown -->\n<!-- /benchmarks:unknown -->")


def test_calls_are_compared_with_calls_that_do_the_same_and_losses_are_shown(results: Any) -> None:
    both = {"lt": 18.4, "torch_eager": 167.0, "torch_eager_one_thread": 128.0}
    results(
        "host",
        {"case": "linear_fwd + linear_bwd, eager", "us": both},
        {"case": "matmul", "us": {"lt": 9.0, "torch_eager": 12.0, "cupy": 8.0, "lt_bound": 2.0, "torch_graph": 6.0}},
    )
    step = {"lt": 10.0, "jax": 8.0, "lt_call": 11.0, "torch_graph_call": 12.0, "jax_call": 10.9}
    results("steps", {"case": "a", "us": step})
    assert tables.host().splitlines()[2:] == [
        "| linear_fwd + linear_bwd, eager | 18.4 | 128 PyTorch, 6.96× | PyTorch |",
        "| matmul | 9.00 | 8.00 CuPy, **0.89×** | PyTorch, CuPy |",
        "| matmul, through lt.bind | 2.00 | 6.00 PyTorch in a graph, 3.00× | PyTorch, CuPy |",
    ]
    assert tables.slower().splitlines()[2:] == [
        "| steps | a | 10.0 | 8.00 JAX, **0.80×** |",
        "| host | matmul | 9.00 | 8.00 CuPy, **0.89×** |",
        "| steps | a, called | 11.0 | 10.9 JAX, **0.99×** |",
    ]


def test_stale_rows_and_rows_without_every_peer_are_left_out_of_means(results: Any) -> None:
    row = {"type": "bf16", "activation": "gelu", "chosen_vs_best": 1.0, "tuning_s": 2.0}
    every = {"lt": 1.0, "torch_graph": 4.0, "torch_max_autotune": 3.0, "jax": 2.0}
    results(
        "layers",
        {**row, "case": "whole", "us": every},
        {**row, "case": "without JAX", "us": {name: us for name, us in every.items() if name != "jax"}},
        {**row, "case": "before", "us": {**every, "torch_graph": 9.0}, "digest": "before", "commit": "a1b2c3d"},
    )
    made = tables.layers()
    for line in (
        "| the fastest peer of each block | 1 BF16 GELU | 2.00× | 2.00× (whole) | 0 |",
        "| PyTorch's kernels in a graph | 2 BF16 GELU | 4.00× | 4.00× (whole) | 0 |",
        "| PyTorch's kernels in a graph | 1 BF16 GELU (stale) | 9.00× | 9.00× (before) | 0 |",
    ):
        assert line in made.splitlines()
    assert "100 % of 2 blocks" in made
    assert tables.each_row().splitlines()[2:] == [
        "| layers | whole | 2026-01-02 | abcdefg | current | PyTorch, torch.compile, JAX | |",
        "| layers | without JAX | 2026-01-02 | abcdefg | current | PyTorch, torch.compile | JAX |",
        "| layers | before | 2026-01-02 | a1b2c3d | stale | PyTorch, torch.compile, JAX | |",
    ]
    counted = tables.code()
    assert "2 of 3 rows at 1234567" in counted
    assert "| `layers` | 3 | 2 | 1 | 2 | 2026-01-02 | 2026-01-02 |" in counted
    assert "| `steps` | 0 | 0 | 0 | 0 | | |" in counted


def test_rows_of_the_present_code_are_current_and_get_its_commit(
    results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = digests.digest("cold", digests.working_files())
    row = {"us": {"lt": 1.0}, "commit": "unknown"}
    results("cold", {**row, "case": "a", "digest": present}, {**row, "case": "b", "digest": "before"})
    monkeypatch.setattr(report, "clean_commit", lambda folders: COMMIT)
    tables.note_code({"cold": present})
    assert [(each["stale"], each["commit"]) for each in kept.rows_of("cold")] == [(False, COMMIT), (True, "unknown")]


def test_growth_has_a_figure_and_a_curve_for_each_quantity(results: Any, tmp_path: Path) -> None:
    assert plot.write_growth(tmp_path / "none.png") == []
    quick = {"quantity": growth.ROWS, "us": {"lt": 2.0, "torch_graph": 3.0}}
    tuned = {"quantity": growth.LAYERS, "case": "tuning 4 layers of one width", "us": {"lt": 2e6}, "size": 4}
    results("growth", {"case": "a", "size": 1, **quick}, {"case": "b", "size": 4, **quick}, tuned)
    failed = {"case": "c", "us": {}}
    assert growth.findings([failed, *kept.rows_of("growth")]) == growth.findings(kept.rows_of("growth"))
    made = tables.growth().splitlines()
    assert made[-1] == "| seconds of tuning for each layer, worst | 0.5 | tuning 4 layers of one width |"
    assert "| torch_graph / lt, rows of a block, worst | 1.5 | a |" in made
    with Image.open(*plot.write_growth(tmp_path / "growth.png")) as picture:
        assert picture.size == (1200, 400)


def test_the_picture_is_drawn_from_the_results(results: Any, tmp_path: Path) -> None:
    block = {"type": "bf16", "activation": "gelu", "us": {"lt": 2.0, "torch_graph": 1.5}}
    results("layers", {"case": "a 64×32×16 BF16 GELU", **block})
    results("wide", block | {"case": "odd fit 64×31×15 BF16 GELU", "stratum": "odd"})
    step = {"case": "mnist BF16", "type": "bf16", "activation": "relu", "us": {"lt": 3.0, "jax": 4.0}}
    results("steps", step)
    results("narrow", step | {"case": "16x1 2^10 BF16"})
    before = plot.write(tmp_path / "some.png").read_bytes()
    assert plot.write(tmp_path / "some.png").read_bytes() == before
    for other in ({"us": {"lt": 3.0, "jax": 5.0}}, {"us": {"lt": 3.0, "jax": 4.0, "torch": 4.0, "torch_compile": 4.0}}):
        results("steps", step | other)
        assert plot.write(tmp_path / "some.png").read_bytes() != before


def runs(folder: Path, side: str, *times: dict[str, float]) -> list[str]:
    files = []
    for number, us in enumerate(times):
        file = folder / f"{side}-{number}" / "steps.json"
        file.parent.mkdir()
        spread = {"lt": 0.5, "torch": 0.5}
        rows = [{"case": case, "us": {"lt": time, "torch": 1.0}, "spread": spread} for case, time in us.items()]
        file.write_text(json.dumps({"rows": [*rows, {"case": "failed", "us": {}}]}))
        files.append(str(file))
    return files


@pytest.mark.parametrize(
    ("slow_runs", "slower", "status"), [(1, 0, 0), (2, 1, 1)], ids=["a disturbed run", "two of three runs"]
)
def test_a_row_is_slower_if_it_is_in_two_of_three_runs(
    slow_runs: int, slower: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = runs(tmp_path, "old", *[{"a": 10.0, "b": 10.0, "gone": 1.0}] * 3)
    new = runs(tmp_path, "new", *({"a": 10.6 if n < slow_runs else 10.0, "b": 8.0, "added": 1.0} for n in range(3)))
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--old", *old, "--new", *new])
    out = capsys.readouterr().out
    assert ended.value.code == status
    assert f"two thirds of the pairs: {slower}" in out
    mean = (0.8 * (1.06 if slower else 1.0)) ** 0.5
    assert [line for line in out.splitlines() if "not in every run" in line] == [
        f"not in every run: steps: {case}: lt" for case in ("added", "gone")
    ]
    assert f"geometric mean of 2 rows over 3 pairs: {mean:.4f}" in out
    assert f"steps, lt_runtime: {1 + slower} of 2 times differ beyond their spread" in out
    assert "steps, others: 0 of 2 times differ beyond their spread, new / old 1.0000, 95 % within 0.0 %" in out
    with pytest.raises(SystemExit) as ended:
        main(["compare", *(str(Path(runs[0]).parent) for runs in (new, old))])
    assert ended.value.code == 1, "the mean is 1.1"
    assert "steps: b: lt" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no row of lt_runtime in common"):
        main(["compare", "--old", *old[:1], "--new", *runs(tmp_path, "other", {"c": 1.0})])


def test_steps_of_pytorch_models_are_compared_with_those_that_run_in_the_same_way(results: Any, tmp_path: Path) -> None:
    us = {"lt_graph": 10.0, "torch_eager": 40.0, "torch_graph": 16.0, "liger_graph": 9.0, "lt_compile_graph": 8.0}
    us |= {"torch_compile_graph": 12.0, "torch_max_autotune_graph": 10.0, "liger_compile_graph": 12.0}
    memory = {"lt_graph": 60, "torch_graph": 100, "torch_compile_graph": 70}
    row = {"case": "a model", "us": us, "memory_bytes": memory, "losses": {"lt": [2.0, 1.5], "torch": [2.0]}}
    results("torch", row)
    told = "| | 10.0, 1.60× | | 8.00, 1.25× | **0.90×** | 0.60 | | PyTorch, Liger, torch.compile |"
    assert tables.torch_models().splitlines()[-1] == f"| a model {told}"
    assert {each.what: each.value for each in torch.findings([row]) if "worst" in each.what} == {
        "torch_graph / lt_graph, worst": 1.6,
        "liger_graph / lt_graph, worst": 0.9,
        "torch_compile_graph / lt_compile_graph, worst": 1.25,
        "liger_compile_graph / lt_compile_graph, worst": 1.5,
        "memory of lt_graph / torch_graph, worst": 0.6,
    }
    pytest.importorskip("matplotlib")
    (picture,) = plot.write_losses(tmp_path / "losses.png")
    assert picture.stat().st_size > 1000


def test_steps_of_pytorch_models_in_fp8_are_compared_with_bf16_and_torchao(results: Any) -> None:
    us = {"lt_fp8_graph": 10.0, "lt_graph": 15.0, "lt_fp8_compile_graph": 8.0, "torchao_compile_graph": 12.0}
    row = {"case": "a model in FP8", "us": us}
    results("torch", row)
    assert tables.torch_fp8().splitlines()[-1] == "| a model in FP8 | 10.0 | 1.50× | | 8.00 | | 1.50× |"
    assert "a model in FP8" not in tables.torch_models()
    assert [(each.what, each.value, each.met) for each in torch.findings([row])] == [
        ("lt_graph / lt_fp8_graph, worst", 1.5, True),
        ("torchao_compile_graph / lt_fp8_compile_graph, worst", 1.5, True),
    ]


def test_the_tables_of_fp8_have_bursts_sustained_steps_widths_and_inference(results: Any) -> None:
    us = {"lt": 10.0, "lt_bf16": 15.0, "torch_bf16": 20.0, "torchao": 30.0}
    compared = {"us": us, "sustained_us": {**us, "lt": 20.0}, "memory_ratio": 1.05, "rows": 4096}
    other = {"us": {"lt": 8.0, "torch_autocast": 20.0}, "sustained_us": {"lt": 10.0, "lt_bf16": 11.0}, "rows": 64}
    results(
        "fp8",
        {"case": "4096-14336-4096", **compared},
        {"case": "4096-14336-4096 FP32 masters", **other},
        {"case": "512-2048-512 batch 4096", "us": {"lt": 4.0, "lt_bf16": 3.0}},
        {"case": "4096-14336-4096 inference 64", "us": {"lt": 2.0, "lt_bf16": 3.0}},
        {"case": "4096-14336-4096 inference 4096", "us": {"lt_bf16": 3.0}},
    )
    assert tables.fp8_steps().splitlines()[2:] == [
        "| 4096-14336-4096, batch 4096 | 10.0 | 1.50× | 2.00× | 3.00× | 20.0 | **0.75×** | 1.00× | 1.50× | 1.05 |",
        "| 4096-14336-4096 FP32 masters, batch 64 | 8.00 | | 2.50× | | 10.0 | 1.10× | | | |",
    ]
    widths, inference = tables.fp8_widths().split("\n\n")
    assert widths.splitlines()[:3:2] == [
        "| MLP | batch 1024 | batch 4096 | batch 16384 |",
        "| 512-2048-512 | | 4.00, **0.75×** | |",
    ]
    assert inference.splitlines()[2:] == ["| 64 | 2.00 | 1.50× |"]
    assert "against PyTorch 2.11, torchao of a version that was not recorded" in tables.source(["fp8"])
