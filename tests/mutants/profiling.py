"""Faults of what profiles see, and of what the check of captures names."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_RECORDS: Final = "lt_runtime/profiling/cupti/records.py"
_CUPTI: Final = "lt_runtime/profiling/cupti/library.py"
_ATTRIBUTION: Final = "lt_runtime/profiling/attribution.py"
_COLLECTOR: Final = "lt_runtime/profiling/collector.py"
_NODES: Final = "lt_runtime/gpu/captured_nodes.py"
_CHECK: Final = "lt_runtime/profiling/capture/check.py"
_WATCH: Final = "lt_runtime/profiling/capture/watch.py"
_ARGUMENTS: Final = "lt_runtime/gpu/graph_nodes.py"
_COLLECTING: Final = "tests/cpu/profiling/test_collector.py"
_CHECKING: Final = "tests/cpu/profiling/test_capture_check.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "a kernel's device is read where its context is",
        _RECORDS,
        'Struct("<16xQQ8xI4xI40x',
        'Struct("<16xQQ12xII40x',
        "tests/cpu/profiling/test_cupti_records.py::test_work_of_every_version",
    ),
    fault(
        "other tools' external ids are taken for ours",
        _RECORDS,
        "if whose == OUR_IDS:",
        "if whose:",
        "tests/cpu/profiling/test_cupti_records.py::test_links_of_other_tools_are_left_out",
    ),
    fault(
        "a record of another size is read all the same",
        _CUPTI,
        "if written != size:",
        "if written < size:",
        f"{_COLLECTING}::test_why_it_cannot_be_used",
    ),
    fault(
        "buffers have no most",
        _CUPTI,
        "if len(self._lent) + len(self._full) >= MOST_BUFFERS:",
        "if len(self._lent) >= MOST_BUFFERS:",
        f"{_COLLECTING}::test_what_finds_no_room_is_counted",
    ),
    fault(
        "a failed start leaves kinds enabled",
        _CUPTI,
        "        except LtError:\n            self._end()\n            raise\n",
        "        except LtError:\n            raise\n",
        f"{_COLLECTING}::test_why_it_cannot_be_used",
    ),
    fault(
        "a graph's nodes lose the range of its launch",
        _ATTRIBUTION,
        "range=(*outer, *inner)",
        "range=inner or outer",
        f"{_COLLECTING}::test_nodes_of_graphs_captured_before_the_profile",
    ),
    fault(
        "what a clone of a graph was made from is forgotten",
        _ATTRIBUTION,
        "            graph = self.sources[graph]\n",
        "            return self.places.get((self.sources[graph], local), ())\n",
        f"{_COLLECTING}::test_nodes_of_graphs_that_others_capture_meanwhile",
    ),
    fault(
        "threads with ranges of their own work for others",
        _ATTRIBUTION,
        "if call is None or call.thread in self.threads:",
        "if call is None:",
        f"{_COLLECTING}::test_each_thread_has_its_own_ranges",
    ),
    fault(
        "a second profile reads the numbers of the first",
        _COLLECTOR,
        "number = self._by_path[path] = next(_numbers)",
        "number = self._by_path[path] = len(self._by_path) + 1",
        f"{_COLLECTING}::test_ranges_of_threads_that_outlive_a_profile_do_not_reach_the_next",
    ),
    fault(
        "the host's clock is thought to be CUPTI's",
        _COLLECTOR,
        "return begun.host_ns + round((cupti_ns - begun.cupti_ns) * rate)",
        "return round(cupti_ns * rate)",
        f"{_COLLECTING}::test_times_are_on_the_hosts_clock",
    ),
    fault(
        "nodes belong to the range that ends before them",
        _NODES,
        "            self.note()\n            self._open.pop()\n",
        "            self._open.pop()\n            self.note()\n",
        f"{_COLLECTING}::test_nodes_of_graphs_captured_before_the_profile",
    ),
    fault(
        "nodes of a capture that was broken off stay",
        _NODES,
        "if capture != self._capture:",
        "if self._capture != self._capture:",
        f"{_COLLECTING}::test_a_capture_that_was_broken_off_leaves_no_ranges",
    ),
    fault(
        "other threads' ranges reach a capture",
        _NODES,
        "        if threading.get_ident() == self._thread:\n",
        "        if self._thread:\n",
        f"{_COLLECTING}::test_ranges_of_other_threads_do_not_reach_a_capture",
    ),
    fault(
        "a check allows what is unsafe",
        _CHECK,
        "CU_STREAM_CAPTURE_MODE_GLOBAL",
        "CU_STREAM_CAPTURE_MODE_RELAXED",
        f"{_CHECKING}::test_a_planted_fault_is_named",
    ),
    fault(
        "runs of a check begin from what replays left",
        _CHECK,
        "            results = captured.read()\n            kept.write(begin)\n",
        "            results = captured.read()\n",
        f"{_CHECKING}::test_state_begins_each_run_from_the_same_contents",
    ),
    fault(
        "values that the device changes are called baked",
        _CHECK,
        "if one != other and first == second:",
        "if one != other:",
        f"{_CHECKING}::test_values_of_the_device_are_no_fault",
    ),
    fault(
        "values that change no result are called baked",
        _CHECK,
        "            if len(found) > 1:\n",
        "            if not found:\n",
        f"{_CHECKING}::test_values_that_change_no_result_are_not_named",
    ),
    fault(
        "a node keeps another one's values",
        _CHECK,
        "exchange_values(executable, node, node)",
        "pass",
        f"{_CHECKING}::test_values_that_change_no_result_are_not_named",
    ),
    fault(
        "a line has the nodes of the line before it",
        _WATCH,
        '        self.note()\n        if event == "exception":',
        '        if event == "exception":',
        f"{_CHECKING}::test_lines_of_functions_that_are_called",
    ),
    fault(
        "other addresses in arguments are called baked",
        _ARGUMENTS,
        "if one != other and not (len(one) == 8 and _is_known_address(one) and _is_known_address(other)):",
        "if one != other:",
        f"{_CHECKING}::test_addresses_do_not_differ",
    ),
)
