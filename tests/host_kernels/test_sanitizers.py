"""Runs tests of every kernel again, in a process of its own, with the kernels built with sanitizers.

All sanitized tests together take minutes, and run only after a change of a covered file. Otherwise one test runs under
one sanitizer, a different pair each day: see sanitized.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.host_kernels.build import BUILD_DIRECTORY, HERE, Builder, Sanitizer
from tests.host_kernels.probes import PROBE
from tests.host_kernels.sanitized import covered_files, is_to_run, of_the_day
from tests.host_kernels.variants import BF16, F16, F32, FULL_ADAMW, NARROW, PLAIN_ADAMW, TILE

REPOSITORY = HERE.parent.parent
NARROW_PRODUCTS = [each for each in NARROW if (each.dtype, each.width) in ((F32, 16), (BF16, 16), (F16, 1))]
# Of the tests in these files, ThreadSanitizer runs only the explicit examples.
WITH_SHARED_MEMORY: dict[str, Iterable[object]] = {
    "test_epilogue_bwd.py::test_backward": (
        *("float32-gelu-dropout-scattered-preactivation-sum", "float32-gelu-dropout-aligned-preactivation-transposed"),
        *("float16-tanh-dropout-scattered-output-dz", "bfloat16-relu-whole-scattered-output-transposed"),
        *("bfloat16-none-dropout-aligned-nothing-dz", "float32-relu-whole-scattered-mask-dz"),
        *("bfloat16-relu-whole-aligned-mask-transposed", "bfloat16-gelu-whole-flat-preactivation-dz"),
        "float16-none-dropout-flat-nothing-dz",
    ),
    "test_loss.py::test_means_over_elements": [f"{loss}-{F32}" for loss in ("mse", "huber", "bce_with_logits")],
    "test_loss.py::test_weights_of_many_rows_and_classes": (
        *("(21, 504)-0.0-both", "(21, 504)-0.1-both", "(4, 3000)-0.1-both"),
    ),
    "test_loss.py::test_bits_depend_on_neither_order_nor_memory": ("shape0", "shape1", "shape2"),
    "test_loss.py::test_labels_far_out_of_range": [
        f"{case}-4294967297" for case in ("7-in place", "20-apart", "20-in place")
    ],
    "test_loss.py::test_a_block_goes_from_row_to_row": (f"40-{F32}", f"1000-{BF16}", f"3000-{F32}"),
    "test_loss.py::test_the_ignored_are_counted": ("300-3", "300-17"),
    "test_adamw.py::test_updates": (PLAIN_ADAMW, FULL_ADAMW),
    "test_adamw.py::test_scaling_clipping_and_skipping": (),
    "test_adamw_fp8.py::test_updates": (f"{PLAIN_ADAMW}-False", f"{FULL_ADAMW}-False"),
    "test_gradient_norm.py::test_norms": (),
    "test_tally.py::test_rows_are_counted": (BF16,),
    "test_class_chunk.py::test_chunks_are_the_cross_entropy_of_all_classes": (F32, BF16),
    "test_fp8.py::test_casts": ("bfloat16-float8_e4m3fn", "float32-float8_e5m2"),
    "test_fp8.py::test_functions": ("bfloat16-silu-float8_e4m3fn-backward-dropout",),
    "test_fp8.py::test_gradients_of_a_gate": ("silu-True-float8_e4m3fn",),
    "test_norm.py::test_norms": ("float32-float32-layer", "bfloat16-float32-layer", "float16-float16-rms"),
    "test_norm.py::test_wide_rows": ("True-bfloat16-bfloat16-layer-shape2", "False-float32-float32-layer-shape3"),
    "test_verify.py::test_expected_results": ("shape1",),
    "test_verify.py::test_comparisons_count_and_find_bad_elements": (),
    "test_own_products.py::test_narrow": [each for each in NARROW_PRODUCTS if each.shares],
    "test_own_products.py::test_tiles": TILE[:3],
    "test_mlp.py::test_exact_sums": ("2-dims3-129",),
    "test_mlp.py::test_activations": (f"gelu-{F16}",),
    "test_mlp.py::test_blocks_go_from_tile_to_tile": (2,),
    "test_mlp.py::test_parts_make_what_one_launch_does": ("parts2",),
    "test_mlp.py::test_losses": (
        *(f"mse-{BF16}-(20, 32, 24, 5)", f"huber-{F16}-(20, 32, 24, 5)", f"bce_with_logits-{BF16}-(20, 32, 24, 5)"),
        *(f"mse-{BF16}-(64, 64, 64, 64, 3)", f"mse-{BF16}-(16, 16, 40)"),
    ),
}
OTHERS: dict[str, Iterable[object]] = {
    "test_loss.py::test_cross_entropy": (F32, BF16),
    "test_loss.py::test_few_classes": (F32, BF16),
    "test_loss.py::test_many_classes": (f"{BF16}-50304-1-held", f"{BF16}-50304-1-read again"),
    "test_loss.py::test_the_ignored_are_counted": ("5000-17",),
    "test_epilogue_fwd.py::test_forward": (
        *("float32-gelu-dropout-scattered-kept", "bfloat16-silu-whole-aligned-kept"),
        *("bfloat16-gelu-whole-flat-kept-once", "float32-gelu-dropout-flat-added"),
    ),
    "test_dropout.py::test_masks_are_the_reference_s": ("float32-scattered", "float16-aligned"),
    "test_fp8_scales.py::test_scales": (),
    "test_add.py::test_sums": ("float32-scattered", "bfloat16-aligned"),
    "test_gated.py::test_forward": ("float32-relu-whole-aligned", "bfloat16-silu-dropout-scattered-remade"),
    "test_gated.py::test_backward": ("float16-relu-dropout-aligned", "bfloat16-silu-dropout-scattered-remade"),
    "test_matmul_epilogue.py::test_epilogues": ("float32-float32-relu",),
    "test_own_products.py::test_narrow": [each for each in NARROW_PRODUCTS if not each.shares],
    "test_dropout.py::test_factors_from_any_index_on": ("dropout_probe-1", "whole_dropout_probe-8"),
    "test_dropout.py::test_known_answers": (),
    "test_resize.py::test_copies": (F16.value,),
    "test_copy_rows.py::test_copies": (),
    "test_scale.py::test_products_are_rounded_once": (F16,),
    "test_ema.py::test_averages": (),
    "test_mlp.py::test_exact_sums": ("0-dims12-31",),
    "test_mlp.py::test_any_layout": ("placement0", "placement3"),
    "test_adamw.py::test_schedules": (),
}


def names_of(cases: Mapping[str, Iterable[object]]) -> list[str]:
    """Returns pytest's ids of tests: one for each of a test's ids of parameters, or the test's name if it has none."""
    return [name for test, names in cases.items() for name in [f"{test}[{each}]" for each in names] or [test]]


SHARED_MEMORY_TESTS = names_of(WITH_SHARED_MEMORY)
TESTS = [*SHARED_MEMORY_TESTS, *names_of(OTHERS)]


def names_under(sanitizer: Sanitizer) -> list[str]:
    return TESTS if sanitizer is Sanitizer.ADDRESS else SHARED_MEMORY_TESTS


RUNS = [(sanitizer, test) for sanitizer in (Sanitizer.ADDRESS, Sanitizer.THREAD) for test in names_under(sanitizer)]


def run_python(sanitizer: Sanitizer, directory: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": sanitizer.runtime_library,
        "LT_HOST_SANITIZER": sanitizer.name.lower(),
        # Leaks are not searched, because the Python interpreter leaks memory at its end.
        "ASAN_OPTIONS": "detect_leaks=0",
        BUILD_DIRECTORY: str(directory),
    }
    command = [*without_randomization(sanitizer), sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def without_randomization(sanitizer: Sanitizer) -> list[str]:
    """Prefix of a command: ThreadSanitizer does not support as much address randomisation as some kernels have."""
    bits = int(Path("/proc/sys/vm/mmap_rnd_bits").read_text())
    return ["setarch", "-R"] if sanitizer is Sanitizer.THREAD and bits > 28 else []


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    complaints = ("ERROR", "runtime error", "data race")
    found = [complaint for complaint in complaints if complaint in done.stderr]
    assert (done.returncode, found) == (0, []), done.stdout + done.stderr


def pass_under(sanitizer: Sanitizer, directory: Path, tests: Sequence[str]) -> None:
    paths = [f"tests/host_kernels/{test}" for test in tests]
    # With -s, pytest shows the complaint of an aborted process.
    done = run_python(sanitizer, directory, ["-m", "pytest", "-q", "-s", "-n", "0", "-p", "no:cacheprovider", *paths])
    assert_clean(done)
    assert f"{len(paths)} passed" in done.stdout


# The parameter splits the sanitized tests into halves that take equally long.
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("sanitizer", [Sanitizer.ADDRESS, Sanitizer.THREAD])
def test_kernels_pass(build_directory: Path, sanitizer: Sanitizer, narrow: bool) -> None:
    if not is_to_run():
        pytest.skip("nothing has changed since the sanitizers passed; LT_COMPILE_ALL=1 runs them")
    chosen = [test for test in names_under(sanitizer) if ("test_narrow" in test) == narrow]
    pass_under(sanitizer, build_directory, chosen)


def test_the_kernel_of_the_day_passes(build_directory: Path) -> None:
    if is_to_run():
        pytest.skip("all tests run under the sanitizers")
    sanitizer, test = of_the_day(RUNS, date.today())
    pass_under(sanitizer, build_directory, [test])


def test_each_test_has_its_day_under_each_sanitizer() -> None:
    days = [date(2026, 1, 1) + timedelta(day) for day in range(len(RUNS))]
    assert {of_the_day(RUNS, day) for day in days} == set(RUNS)


def test_a_change_of_these_files_makes_all_run() -> None:
    files = (
        *("cuda_src/mma.cuh", "lt_runtime/kernels/epilogue.py", "tests/host_kernels/cases.py"),
        # files outside of tests/host_kernels and cuda_src that decide the operands of the tests
        *("tests/support/strategies.py", "lt_runtime/problem.py", "lt_runtime/layout.py"),
    )
    assert not {REPOSITORY / file for file in files} - {*covered_files()}


@pytest.mark.parametrize(
    ("sanitizer", "entry", "complaint"),
    [
        (Sanitizer.ADDRESS, "beyond_shared_memory", "AddressSanitizer: global-buffer-overflow"),
        (Sanitizer.ADDRESS, "beyond_the_array", "AddressSanitizer: heap-buffer-overflow"),
        (Sanitizer.ADDRESS, "misaligned_vector", "misaligned address"),
        (Sanitizer.THREAD, "missing_barrier", "ThreadSanitizer: data race"),
        (Sanitizer.THREAD, "divergent_barrier", "divergent barrier: thread"),
        (Sanitizer.THREAD, "barrier_of_warps_alone", "ThreadSanitizer: data race"),
        (Sanitizer.THREAD, "divergent_shuffle", "divergent exchange in a warp: thread"),
        (Sanitizer.THREAD, "shuffle_by_some_lanes", "divergent exchange in a warp: thread"),
    ],
)
def test_wrong_kernels_are_found(build_directory: Path, sanitizer: Sanitizer, entry: str, complaint: str) -> None:
    library = Builder(build_directory, sanitizer).library(PROBE)
    done = run_python(sanitizer, build_directory, ["-m", "tests.host_kernels.probes", str(library), entry])
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize("sanitizer", [Sanitizer.ADDRESS, Sanitizer.THREAD])
def test_right_kernels_pass(build_directory: Path, sanitizer: Sanitizer) -> None:
    library = Builder(build_directory, sanitizer).library(PROBE)
    entries = ("mirror", "early_return", "turns", "votes", "warp_sum", "segments", "warp_barrier")
    assert_clean(run_python(sanitizer, build_directory, ["-m", "tests.host_kernels.probes", str(library), *entries]))
