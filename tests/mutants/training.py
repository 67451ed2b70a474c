"""Faults of training: the step, batches on their way, schedules, scaling, the optimizer, checkpoints."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_CHOICES: Final = "lt_runtime/saving/plan_choices.py"
_TUNED_STEPS: Final = "tests/cpu/test_fake_gpu_step_tuning.py"
_TAKEN_ALONG: Final = f"{_TUNED_STEPS}::test_a_checkpoint_takes_the_plan_choices_to_an_empty_cache"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "targets come from x",
        "cuda_src/copy_rows.cu",
        "p.table[i] : p.sources[i]",
        "p.table[0] : p.sources[i]",
        "tests/cpu/test_fake_gpu_training.py::test_training",
        "tests/host_kernels/test_copy_rows.py::test_copies",
    ),
    fault(
        "rows without gaps between parts are one line",
        "cuda_src/copy_rows.cu",
        "if (from.pitch == width) {",
        "if (from.pitch >= width) {",
        "tests/host_kernels/test_copy_rows.py::test_copies",
    ),
    fault(
        "a part's rows lie where the first part's are",
        "cuda_src/copy_rows.cu",
        "+ (line - part * lines_a_part) * width",
        "+ line * width",
        "tests/host_kernels/test_copy_rows.py::test_copies",
    ),
    fault(
        "a checkpoint's digest is not compared",
        "lt_runtime/saving/checkpoint_file.py",
        "elif metadata[_DIGEST] != digest.text:",
        "elif len(metadata[_DIGEST]) != len(digest.text):",
        "tests/cpu/saving/test_checkpoint_damage.py",
    ),
    fault(
        "a checkpoint's digest is of its text alone",
        "lt_runtime/saving/checkpoint_file.py",
        "        self._digest.update(_bytes_of(array))\n",
        "        pass\n",
        "tests/cpu/saving/test_checkpoint_damage.py",
    ),
    fault(
        "a checkpoint's plan choices take the place of ours",
        _CHOICES,
        "if key not in known}",
        "if key}",
        f"{_TUNED_STEPS}::test_what_is_measured_here_is_not_taken_from_a_checkpoint",
    ),
    fault(
        "a checkpoint has no algorithms of products",
        _CHOICES,
        "                yield from _products(problem, device)\n",
        "                pass\n",
        f"{_TAKEN_ALONG}[{{}}-8]",
    ),
    fault(
        "a checkpoint has no plan choices of micro-batches that add up",
        _CHOICES,
        "chains_of(model, rows, accumulates=True)",
        "chains_of(model, rows, accumulates=False)",
        f"{_TAKEN_ALONG}[{{'accumulate': 2}}-16]",
    ),
    fault(
        "a checkpoint does not say which narrow MLPs run as a whole",
        _CHOICES,
        "        if chain.narrow is not None:\n            yield chain.narrow\n",
        "",
        f"{_TAKEN_ALONG}[{{'dims': (16, 16, 16), 'dtype': 'bfloat16'}}-8]",
    ),
    fault(
        "a checkpoint has the backward passes of what untuned layers keep",
        _CHOICES,
        'as_decided(chain, store, "default").problems',
        "chain.problems",
        f"{_TAKEN_ALONG}[{{'dims': (40, 32, 24), 'activation': 'relu'}}-16]",
    ),
    fault(
        "of many sizes of batch the first measured are taken along",
        _CHOICES,
        "sorted(measured)[-_MOST_SIZES:]]",
        "sorted(measured)[:_MOST_SIZES]]",
        f"{_TUNED_STEPS}::test_of_many_sizes_of_batch_the_latest_are_taken_along",
    ),
    fault(
        "plan choices that are too long are saved",
        _CHOICES,
        "        if len(text) <= _LARGEST:\n",
        "        if text:\n",
        f"{_TUNED_STEPS}::test_plan_choices_that_are_too_long_are_left_out",
    ),
)
