"""Faults of reports: ranges, events in graphs, rows and what is shown of them."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_RANGES: Final = "lt_runtime/ranges.py"
_TIMER: Final = "lt_runtime/profiling/timer.py"
_MARKS: Final = "lt_runtime/profiling/marks.py"
_SESSION: Final = "lt_runtime/profiling/session.py"
_LAYERS: Final = "lt_runtime/profiling/layers.py"
_WORK: Final = "lt_runtime/profiling/work.py"
_TRACE: Final = "lt_runtime/profiling/trace.py"
_ON_HOST: Final = "tests/cpu/profiling/test_profile_on_host.py::"
_ON_GPU: Final = "tests/cpu/profiling/test_profile_on_gpu.py::"
_REPORT: Final = "tests/cpu/profiling/test_report.py::"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "ranges stay silent when somebody listens",
        _RANGES,
        "(_enter, _exit) if _listeners else for_tool",
        "for_tool",
        "tests/cpu/test_ranges.py::test_ranges_nest",
    ),
    fault(
        "operations open no ranges when somebody listens",
        _RANGES,
        "    is_heard = bool(_listeners) or domain is not None\n",
        "    is_heard = domain is not None\n",
        "tests/cpu/test_ranges.py::test_listeners_come_and_go",
    ),
    fault(
        "ranges around a step name layers",
        _RANGES,
        '            layer = phase = operation = ""\n        else:',
        "            pass\n        else:",
        "tests/cpu/test_ranges.py::test_the_place_of_a_path",
    ),
    fault(
        "time in a nested layer counts twice",
        _TIMER,
        "        cell.us += us - frame.inside\n",
        "        cell.us += us\n",
        _ON_HOST + "test_time_within_a_nested_layer_is_not_counted_twice",
    ),
    fault(
        "the end of a range that is not open closes others",
        _SESSION,
        "        if name not in opened:\n            return\n",
        "",
        _ON_HOST + "test_ranges_that_began_before_the_profile_are_passed_over",
    ),
    fault(
        "one copy of a graph is launched at all times",
        _MARKS,
        "            self._turns.append(copy)\n",
        "            self._turns.appendleft(copy)\n",
        _ON_GPU + "test_a_profile_changes_no_result_and_no_graph",
    ),
    fault(
        "every mark in a graph is a node",
        _MARKS,
        "        if not self.count or self._tail != _tail(stream):\n",
        "        if True:\n",
        _ON_GPU + "test_marks_with_nothing_between_are_one_node",
    ),
    fault(
        "what events take is a part of the layers' time",
        _MARKS,
        "[max(0.0, us - self.cost_us) for us in times[empty:]]",
        "times[empty:]",
        _ON_GPU + "test_what_events_take_is_in_no_time",
    ),
    fault(
        "what events take is a part of the step's time",
        _TIMER,
        "            parent.cost += graph.cost_us * len(copy.marks.events)\n",
        "            pass\n",
        _ON_GPU + "test_what_events_take_is_in_no_time",
    ),
    fault(
        "a copy is launched again before it was read",
        _TIMER,
        "        while copy.is_unread:\n            self._resolve(1)\n",
        "",
        _ON_GPU + "test_a_copy_that_has_not_been_read_is_read_before_its_next_launch",
    ),
    fault(
        "the step that captures counts",
        _TIMER,
        "            if was_captured:\n                self.discarded += 1\n            else:\n",
        "            if True:\n",
        _ON_GPU + "test_the_step_that_captures_is_left_out",
    ),
    fault(
        "copies of graphs are not freed",
        _TIMER,
        "                    captured.graph.close()\n",
        "                    pass\n",
        _ON_GPU + "test_copies_and_events_are_freed",
    ),
    fault(
        "steps are timed and traced at once",
        _SESSION,
        "            if self._timer.count >= self._timed:\n",
        "            if self._timer.count > self._timed:\n",
        _ON_GPU + "test_kernels_are_traced_after_the_timed_steps",
    ),
    fault(
        "a profile that fails to begin keeps others from it",
        _SESSION,
        "        self._undo.callback(_running.release)\n",
        "",
        _ON_HOST + "test_profiles_do_not_nest",
    ),
    fault(
        "kernels in no range count to the step",
        _LAYERS,
        'place = place_of(each.range) if each.range else Place(UNATTRIBUTED, "")',
        "place = place_of(each.range)",
        _REPORT + "test_what_is_in_no_range_is_a_row",
    ),
    fault(
        "kernels beside each other keep the GPU busy twice",
        _LAYERS,
        "        busy += max(0, stop - max(start, end))\n",
        "        busy += stop - start\n",
        _REPORT + "test_gaps_and_overlap",
    ),
    fault(
        "a pass after a product moves nothing",
        _WORK,
        "        yield from _forward_pass(plan)\n",
        "        yield 0\n",
        "tests/cpu/profiling/test_work.py::test_a_pass_after_a_product_reads_and_writes_again",
    ),
    fault(
        "the trace is in nanoseconds",
        _TRACE,
        "        start, length = (each.start_ns - base) / 1e3, (each.end_ns - each.start_ns) / 1e3\n",
        "        start, length = each.start_ns - base, each.end_ns - each.start_ns\n",
        _REPORT + "test_the_trace_is_as_kineto_writes_it",
    ),
    fault(
        "a script's status is lost",
        "lt_runtime/cli/scripts.py",
        "            return {}, (error.code or 0) & 0xFF\n",
        "            return {}, 0\n",
        "tests/cpu/cli/test_cli_profile.py::test_a_script_that_ends_early_is_reported_and_keeps_its_status",
    ),
)
