"""Reports: layers and kernels from handmade activities, as tables, CSV, JSON, traces and plots."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.errors import ArgumentError, MissingLibraryError
from lt_runtime.profiling.cupti.records import Activity
from lt_runtime.profiling.layers import Kernel, Layer, Totals, kernels_of, layers_of, totals_of
from lt_runtime.profiling.report import Report, load, plot, save_trace
from lt_runtime.profiling.timer import Cell
from lt_runtime.profiling.work import Work
from lt_runtime.ranges import Place
from tests.support.fake_collector import kernel

FC, LOSS = Place("fc", "forward"), Place("", "loss")
PATH = ("step", "forward", "forward/fc")


def steps(*times: float) -> list[dict[Place, Cell]]:
    return [{FC: Cell(1, us, 1.0), LOSS: Cell(1, 5.0, 2.0)} for us in times]


@pytest.fixture
def report() -> Report:
    works = {FC: [Work(flops=4_000_000_000, bytes=30_000_000, kind="bfloat16", strategy="gelu [x]")]}
    ceilings = {"copy": 4e12, "bfloat16": 8e14}
    activities = [kernel("gemm<float, 3>", 0, 8, *PATH), kernel("DtoD", 9, 1, kind="memcpy", size=64)]
    entries = kernels_of(activities, 1, works)
    found = layers_of(steps(10.0, 12.0, 11.0), works, entries, ceilings)
    return Report(
        "a GPU",
        3,
        1,
        (*found,),
        (*entries,),
        totals_of(steps(10.0, 12.0, 11.0), activities, 1),
        ceilings,
        ("one thing",),
    )


def test_a_layer_has_its_rates_and_its_bound(report: Report) -> None:
    fc, loss = report.layers
    assert (fc.name, fc.phase, fc.us, fc.spread_us) == ("fc", "forward", 11.0, 1.0)
    assert fc.tflops == pytest.approx(4e9 / 11e-6 / 1e12)
    assert fc.gbytes == pytest.approx(3e7 / 11e-6 / 1e9)
    # At the ceilings' rates, moving the bytes takes 7.5 µs and computing the products 5 µs: memory is the bound.
    assert (fc.bound, fc.fraction) == ("memory", pytest.approx(7.5 / 11))
    assert (fc.kernels, fc.kernel_us) == (1, 8.0)
    assert (loss.name, loss.phase, loss.flops, loss.bound) == ("", "loss", 0, "")


def test_launches_of_a_kernel_in_one_place_are_summed() -> None:
    times = [10.0, 30.0, 20.0, 20.0]
    activities = [kernel("gemm", 100 * i, us, *PATH, size=8) for i, us in enumerate(times)]
    activities += [kernel("gemm", 900, 20, "step", "loss"), kernel("sync", 0, 99, *PATH, kind="synchronization")]
    first, second = kernels_of(activities, 2, {})
    assert (first.name, first.layer, first.phase, first.count, first.total_us) == ("gemm", "fc", "forward", 2, 40)
    assert (first.mean_us, first.median_us, first.min_us, first.max_us) == (20, 20, 10, 30)
    assert first.std_us == pytest.approx(50**0.5)
    assert (first.share, first.bytes) == (pytest.approx(0.8), 16)
    assert (second.layer, second.phase) == ("", "loss")


def test_copies_that_a_plan_chose_are_told_from_others() -> None:
    activities = [kernel("resize", 0, 1, *PATH), kernel("resize", 2, 1, "step", "loss"), kernel("gemm", 4, 1, *PATH)]
    found = kernels_of(activities, 1, {FC: [Work(copies=True)]})
    copies = {(each.name, each.layer): each.is_planned_copy for each in found}
    assert copies == {("resize", "fc"): True, ("resize", ""): False, ("gemm", "fc"): False}


def test_gaps_and_overlap() -> None:
    activities = [
        kernel("a", 0, 10), kernel("b", 5, 15, stream=8), kernel("c", 20.5, 4), kernel("d", 30, 10), kernel("e", 31, 2),
        kernel("f", 41, 1, *PATH),
        kernel("wait", 0, 9, kind="synchronization"), kernel("malloc", 0, 9, kind="allocation"),
    ]  # fmt: skip
    totals = totals_of([], activities, 1)
    assert totals.kernel_us == 42
    assert (totals.busy_us, totals.unattributed_us) == (35, 41)
    # Half a microsecond between kernels counts as no pause, a whole one does.
    assert (totals.gaps, totals.gap_us) == (2, pytest.approx(6.5))
    assert (totals.synchronizations, totals.allocations) == (1, 1)
    assert totals_of([], [], 0) == Totals()


def test_the_csv_equals_the_table(report: Report, tmp_path: Path) -> None:
    report.to_csv(tmp_path / "new")
    for name, kind, entries in (("layers", Layer, report.layers), ("kernels", Kernel, report.kernels)):
        with (tmp_path / "new" / f"{name}.csv").open(newline="") as file:
            read = list(csv.DictReader(file))
        assert list(read[0]) == [each.name for each in fields(kind)]  # type: ignore[arg-type]
        written = [{key: str(value) for key, value in asdict(entry).items()} for entry in entries]  # type: ignore[call-overload]
        assert read == written


def test_json_comes_back_as_it_was(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "a.json")
    assert load(tmp_path / "a.json") == report


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "layers": [{"a": 1}]}', "\x00"])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ArgumentError, match=r"a\.json is "):
        load(tmp_path / "a.json")


def test_a_printed_report_is_plain_text(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # At this width rich folds no cell of the report.
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes stdout for a terminal.
    text = str(report)
    assert "\x1b" not in text
    cells = ["fc", "forward", "11.0", "364", "2727", "memory", "68%"]
    cells += ["gemm<float, 3>", "memcpy DtoD", "(unattributed)", "one thing"]
    # "[x]" must be shown, although Rich's markup uses brackets.
    assert [each for each in (*cells, "gelu [x]") if each not in text] == []
    assert "A step takes 16.0 µs: forward 11.0, loss 5.0." in text
    assert "(between)" not in text  # the loss has no layers
    text = str(Report("the host", 1, 0, [Layer("a", "", 1, 2.0, 0.0, 2.0), Layer("", "forward", 1, 2.0, 0.0, 2.0)]))
    assert "(between)" in text
    assert "host µs" not in text  # columns without values are left out
    assert "TFLOP/s" not in text


CALLS: Sequence[Activity] = (
    Activity("call", "cuLaunchKernelEx", 1_000, 3_000, correlation=7, thread=55, range=PATH),
    Activity("call", "cuStreamSynchronize", 3_000, 9_000, correlation=8, thread=55),
    kernel("gemm", 4, 2.5, *PATH, correlation=7, graph=3, node=9),
    kernel("DtoD", 7, 1, correlation=9, kind="memcpy", size=64),
    kernel("", 8, 1, kind="memset", size=32),
)
SPANS = (
    Activity("user_annotation", "loss", 500, 2_500, thread=55, range=("step", "loss")),
    kernel("loss", 0.6, 1.5, "step", "loss", kind="gpu_user_annotation"),
    kernel("step", 0.4, 3.0, "step", kind="gpu_user_annotation"),
)


def test_the_trace_has_the_form_of_kineto(tmp_path: Path) -> None:
    save_trace(tmp_path / "trace.json", [*SPANS, *CALLS], "a GPU")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["schemaVersion"] == 1
    events: list[dict[str, Any]] = content["traceEvents"]
    needed = {
        "X": "ph cat name pid tid ts dur args", "s": "ph cat name pid tid ts id", "f": "ph cat name pid tid ts id bp",
        "M": "ph name pid tid args",
    }  # fmt: skip
    for event in events:
        assert set(event) == set(needed[event["ph"]].split())
        assert {type(event["pid"]), type(event["tid"])} == {int}
        assert all(event.get(key, 0) == round(event.get(key, 0), 3) >= 0 for key in ("ts", "dur"))
    complete = {event["name"]: event for event in events if event["ph"] == "X"}
    assert {event["cat"] for event in events if event["ph"] == "X"} == {
        "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "user_annotation", "gpu_user_annotation",
    }  # fmt: skip
    gemm, args = complete["gemm"], complete["gemm"]["args"]
    # `ts` is in µs since the first range began.
    assert (gemm["pid"], gemm["tid"], gemm["ts"], gemm["dur"]) == (0, 7, 3.6, 2.5)
    assert (args["correlation"], args["range"]) == (7, "step > forward > forward/fc")
    assert complete["DtoD"]["args"]["bytes"] == 64
    # Arrows of the trace, from a call to the work that it started.
    start, end, other = (event for event in events if event["ph"] in "sf")
    assert [(each["ph"], each["id"]) for each in (start, end, other)] == [("s", 7), ("f", 7), ("f", 9)]
    assert (start["tid"], end["tid"], end["pid"]) == (55, 7, 0)
    assert start["ts"] <= end["ts"]


def test_the_plot_is_a_picture(report: Report, tmp_path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.image import imread

    plot(report, tmp_path / "plot.png")
    picture = imread(tmp_path / "plot.png")
    assert picture.shape[0] > 300
    assert picture.shape[1] > 1000
    assert len({tuple(pixel) for entry in picture[::5, ::5] for pixel in entry}) > 10
    with rc_context({"svg.fonttype": "none"}):
        plot(report, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    # A layer's name is in the bars and in the roofline.
    assert (text.count(">fc forward<"), text.count(">bfloat16<")) == (2, 1)
    plot(Report(), tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").read_bytes().startswith(b"<?xml")


def test_without_matplotlib_an_error_says_what_to_install(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'lt_runtime\[plot\]'"):
        plot(report, tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()
