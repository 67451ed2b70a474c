"""Faults of the tuner: timing, verification, candidates, searches."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_VERIFICATION: Final = "lt_runtime/tuner/verification.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "an error of twice the tolerance passes",
        _VERIFICATION,
        "limits = error + _UNIT[dtype] * abs(values) + least",
        "limits = 2 * error + 64 * _UNIT[dtype] * abs(values) + least",
        "tests/cpu/tuner/test_verification.py::test_one_element_that_is_off",
    ),
    fault(
        "NaN passes verification",
        _VERIFICATION,
        "bad = ~(abs(actual - part.values) <= part.limits)",
        "bad = abs(actual - part.values) > part.limits",
        "tests/cpu/tuner/test_verification.py::test_an_element_that_is_not_written",
    ),
    fault(
        "writing outside of D passes verification",
        _VERIFICATION,
        'return "it writes outside of D" if operands.wrote_outside() else None',
        "return None",
        "tests/cpu/tuner/test_verification.py::test_memory_that_is_not_the_results",
    ),
    fault(
        "two runs may differ",
        _VERIFICATION,
        'return None if operands.same_as(before) else "two runs differ"',
        "return None",
        "tests/cpu/tuner/test_verification.py::test_two_runs_that_differ",
    ),
    fault(
        "outputs keep the first run's values before the second",
        _VERIFICATION,
        "    before = operands.snapshot()\n    operands.poison()\n",
        "    before = operands.snapshot()\n",
        "tests/cpu/tuner/test_verification.py::test_a_second_run_that_writes_nothing",
    ),
    fault(
        "verification takes the bias for granted",
        _VERIFICATION,
        'product = product + operands.read("vector")',
        "pass",
        "tests/cpu/tuner/test_verification.py::test_right_results_pass",
    ),
    fault(
        "sums that must be exact may be off",
        _VERIFICATION,
        "    if problem.k <= data.exact_to:\n        return 0.0\n",
        "",
        "tests/cpu/tuner/test_verification.py::test_one_element_that_is_off",
    ),
    fault(
        "TF32 is judged as FP32",
        _VERIFICATION,
        "truncation = 2.0**-9 if problem.compute is Compute.TF32 else 0.0",
        "truncation = 0.0",
        "tests/cpu/tuner/test_verification.py::test_tf32_passes_only_where_it_is_asked_for",
    ),
    fault(
        "the sum of A is judged by B",
        _VERIFICATION,
        "if problem.epilogue is Epilogue.BGRADA else b",
        "if problem.epilogue is Epilogue.BGRADB else b",
        "tests/cpu/tuner/test_verification.py::test_right_results_pass",
    ),
)
