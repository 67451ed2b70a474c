"""Faults of the order of work on several streams. Most are found only by the checker in `tests/support/races.py`."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_CALLS: Final = "tests/cpu/test_fake_gpu_calls.py"
_STEPS: Final = "tests/cpu/test_fake_gpu_steps.py"
_PADDED: Final = "tests/cpu/test_fake_gpu_padded.py"
_PREFETCH_TEST: Final = "tests/cpu/training/test_prefetch.py"
_STAY: Final = f"{_PREFETCH_TEST}::test_batches_stay_until_as_many_more_were_asked_for"
_REUSED: Final = f"{_PREFETCH_TEST}::test_another_iterator_gets_the_memory_after_the_work_that_reads_it"
_MADE: Final = f"{_STEPS}::test_objects_that_are_made_on_one_stream_are_used_on_another"
_LATER: Final = "tests/cpu/test_fake_gpu_blocks.py::test_weight_gradients_that_end_later_read_what_they_shall"
_GROUPS: Final = "tests/cpu/distributed/test_fake_gpu_groups.py"
_CHANGE: Final = f"{_STEPS}::test_streams_may_change_between_steps"

FAULTS: Final[Table] = {
    "lt_runtime/arrays/operand.py": {
        "an array's own stream is not waited for": (
            "            order_after(stream, producer)\n",
            "            pass\n",
            f"{_CALLS}::test_the_stream_of_an_interface_is_waited_for",
        ),
    },
    "lt_runtime/gpu/memory.py": {
        "a branch of a graph is not joined": (
            "            order_after(memory.stream, own.stream)\n",
            "            pass\n",
            f"{_CALLS}::test_bound_layers",
        ),
        "a branch that reads scratch memory is not waited for": (
            "if reads_scratch or not memory.defers:",
            "if not memory.defers:",
            f"{_LATER}[_derivatives]",
        ),
        "a branch is never waited for after the next one": (
            '        call("cuStreamWaitEvent", memory.stream, earlier, 0)\n',
            "        pass\n",
            f"{_LATER}[_stack]",
        ),
        "a branch uses its counters before they are zero": (
            "order_after(self.stream, own.stream)",
            "pass",
            f"{_CALLS}::test_same_buffers_on_other_streams",
        ),
    },
    "lt_runtime/nn/run.py": {
        "a weight gradient is added to one that is still computed": (
            "            self.join()  # the first gradient must be complete before another one is added\n",
            "            pass\n",
            f"{_LATER}[_tied_chain]",
        ),
        "memory is freed before a weight gradient has read it": (
            "        self._read = read\n",
            "        self._read = read and (0,)\n",
            f"{_LATER}[_stack]",
        ),
        "a block overwrites what a weight gradient reads": (
            "if self.running is not None and self.running.overwrites:",
            "if self.running is None:",
            f"{_LATER}[_in_place]",
        ),
        "gradients are summed over processes before they are computed": (
            "        if self.on_written is not None:\n            self.join()\n",
            "        if self.on_written is not None:\n",
            f"{_GROUPS}::test_equal_batches_give_the_bits_of_one_process",
        ),
    },
    "lt_runtime/ops/optimizers/gpu_state.py": {
        "an optimizer may be used before its state is there": (
            'call("cuStreamSynchronize", self._stream)',
            "pass",
            f"{_MADE}[AdamW]",
        ),
        "the first of several rules advances the step": (
            "if advances and group == len(options.rules) - 1:",
            "if advances:",
            "tests/cpu/test_fake_gpu_settings.py::test_three_rules_and_a_table_in_a_graph",
        ),
        "the parameters of every group are numbered from zero": (
            "kernels.update_table(own, first, {*copied, *others, *without})",
            "kernels.update_table(own, 0, {*copied, *others, *without})",
            "tests/cpu/test_fake_gpu_settings.py::test_three_rules_and_a_table_in_a_graph",
        ),
    },
    "lt_runtime/ops/first_use.py": {
        "a layer in FP8 is measured in a capture": (
            "if not (is_new or has_unproven) or is_captured(stream()):",
            "if not (is_new or has_unproven):",
            "tests/cpu/test_fake_gpu_fp8_layers.py::test_a_capture_outlives_what_it_does_not_allow",
        ),
        "a measurement does not wait for the step's stream": (
            '                call("cuStreamSynchronize", stream)\n',
            "                pass\n",
            "tests/cpu/test_fake_gpu_step_tuning.py::test_the_steps_stream_is_waited_for_before_a_measurement",
        ),
    },
    "lt_runtime/plans/layers.py": {
        "a branch's sum has its parts in the memory of the other branch": (
            "partial if other is memory else other.scratch(self._partial_bytes)",
            "memory.scratch(self._partial_bytes)",
            f"{_PADDED}::test_a_bias_gradient_alone_and_the_product_of_fewer_blocks_begin_in_time",
        ),
    },
    "lt_runtime/training/averages.py": {
        "averages are copied before the step has ended": (
            "        self.model.device.synchronize()\n        averages = map",
            "        averages = map",
            f"{_STEPS}::test_averages_are_copied_after_the_steps",
        ),
        "averages may be used before they are there": (
            "        model.device.synchronize()  # later",
            "        # later",
            f"{_MADE}[EMA]",
        ),
        "a tally is set to zero on a stream of its own": (
            '            call("cuStreamSynchronize", handle)  # the next',
            "            # the next",
            f"{_STEPS}::test_metrics_begin_anew_when_they_are_read",
        ),
    },
    "lt_runtime/training/captured.py": {
        "a step's graph does not wait for a graph on another stream": (
            '            call("cuStreamWaitEvent", stream, self._event, 0)',
            "            pass",
            _CHANGE,
        ),
        "an event that could not be recorded is not replaced by a wait": (
            '            call("cuStreamSynchronize", self.stream)\n',
            "            pass\n",
            f"{_STEPS}::test_a_step_on_another_stream_after_an_event_that_could_not_be_recorded",
        ),
        "a step may be used before its tally is zero": (
            '            call("cuStreamSynchronize", stream)  # later',
            "            # later",
            f"{_MADE}[TrainStep]",
        ),
        "a rehearsal does not wait for the stream": (
            "        order_after(captured, stream)\n",
            "",
            _CHANGE,
        ),
        "the stream does not wait for the rehearsals": (
            "            order_after(stream, captured)\n",
            "            pass\n",
            _CHANGE,
        ),
    },
    "lt_runtime/nn/device.py": {
        "a model may be used before its parameters are there": (
            'call("cuStreamSynchronize", stream_handle(None, self.ordinal))',
            "pass",
            f"{_MADE}[MLP]",
        ),
    },
    "lt_runtime/training/prefetch.py": {
        "the first copies do not wait for work that has read their memory": (
            "            order_after(self._copies, self._user_stream())\n            events",
            "            events",
            f"{_REUSED}[False]",
        ),
        "a closed iterator's memory is reused under work that reads it": (
            "            order_after(self._copies, self._user_stream())\n\n",
            "\n",
            f"{_REUSED}[True]",
        ),
        "a batch is given before it is copied": (
            '            call("cuStreamWaitEvent", self._user_stream(), slot.ready, 0)\n',
            "            pass\n",
            _STAY,
        ),
        "a batch is overwritten while it is read": (
            '        call("cuStreamWaitEvent", self._copies, slot.released, 0)\n',
            "",
            _STAY,
        ),
        "a batch's memory is free before its event is recorded": (
            "self._lane.ask()\n            self._permits.release()",
            "self._permits.release()\n            threading.Event().wait(0.02)\n            self._lane.ask()",
            _STAY,
        ),
    },
}
