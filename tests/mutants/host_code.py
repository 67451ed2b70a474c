"""Faults of Python code: of training steps, evaluation, plans, recordings and profiles."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_CAPTURE: Final = "tests/cpu/test_fake_gpu_fp8_layers.py::test_a_capture_outlives_what_it_does_not_allow"
_CHANGES: Final = "tests/cpu/test_fake_gpu_fp8_weights.py::test_changes_between_steps_are_seen"

FAULTS: Final[Table] = {
    "lt_runtime/training/body.py": {
        "a rehearsal of a step updates the averages": (
            '            if self.ema is not None:\n                with range_of("ema"):\n                    self',
            '        if self.ema is not None:\n            with range_of("ema"):\n                self',
            "tests/cpu/test_fake_gpu_settings.py::test_a_rehearsal_for_a_second_batch_size_updates_nothing",
        ),
        "a step in which a layer is not in FP8 forgets its magnitudes": (
            " if each.fallback is None]:",
            "]:",
            f"{_CHANGES}[_train_small_batches]",
        ),
    },
    "lt_runtime/distributed/buckets.py": {
        "gradients that nobody has announced are summed early": (
            "return self._writes[key] > 0 and self._left",
            "return self._left",
            "tests/cpu/distributed/test_alone.py::test_gradients_of_one_kernel_are_summed_at_the_end",
        ),
        "a gradient is summed before its second write": (
            "self._writes[key] = self._writes.pop(key, 0) + 1",
            "self._writes[key] = 1",
            "tests/cpu/distributed/test_fake_gpu_groups.py::test_equal_batches_give_the_bits_of_one_process",
        ),
    },
    "lt_runtime/distributed/together.py": {
        "one process owns all parameters": (
            "loads[owners[i]] += sizes[i]",
            "pass",
            "tests/cpu/distributed/test_fake_gpu_groups.py::test_each_process_updates_and_keeps_its_part_of_the_state",
        ),
    },
    "lt_runtime/training/fp8_weights.py": {
        "a weight that was replaced keeps its magnitude": (
            'call("cuMemsetD32Async", amax.data.ptr, 0, 1, stream)',
            "pass",
            f"{_CHANGES}[_assign]",
        ),
    },
    "lt_runtime/ops/fp8/state.py": {
        "a caller's update of scales loses the magnitude of w": (
            "            writes.latest = None\n    for",
            "    for",
            f"{_CHANGES}[_update_scales]",
        ),
        "the first call of a layer in FP8 ends a capture": (
            "if device != HOST and is_captured(stream):",
            "if False:",
            _CAPTURE,
        ),
    },
    "lt_runtime/training/captured.py": {
        "copies in FP8 outlive a graph that does not update them": (
            "        writes.latest = self.writer",
            "        writes.latest = self.writer if self.weights else writes.latest",
            "tests/cpu/test_fake_gpu_fp8_weights.py::test_updates[{'rows': (32, 31)}]",
        ),
        "buffers of dropped graphs are kept": (
            "                self._replays.clear()  # some",
            "                # some",
            "tests/cpu/test_fake_gpu_batches.py::test_buffers_are_freed_with_their_graph",
        ),
        "layers that got another precision run untuned": (
            "if measured and any(each.is_open for each in met.choices):",
            "if measured and False:",
            "tests/cpu/test_fake_gpu_step_tuning.py::test_layers_are_in_fp8_where_that_was_measured_to_be_faster[False]",
        ),
    },
    "lt_runtime/arrays/transfer.py": {
        "copies in FP8 outlive the values that they were made of": (
            "    finally:\n        writes.latest = None",
            "    finally:\n        pass",
            f"{_CHANGES}[_load]",
        ),
        "inference in FP8 goes on with weights that were assigned anew": (
            "                each.renew(stream)\n",
            "                pass\n",
            "tests/cpu/test_fake_gpu_kept_weights.py::test_outputs_follow[assign-True]",
        ),
    },
    "lt_runtime/ops/optimizers/gpu_state.py": {
        "captured inference in FP8 goes on with the weights before an optimizer's steps": (
            "                each.renew(handle)\n",
            "                pass\n",
            "tests/cpu/test_fake_gpu_kept_weights.py::test_outputs_follow[replay steps-True]",
        ),
    },
    "lt_runtime/ops/optimizers/optimizer.py": {
        "copies in FP8 outlive an update by the caller": (
            "        writes.latest = None\n        self._state.step(stream)",
            "        self._state.step(stream)",
            f"{_CHANGES}[_step]",
        ),
        "inference in FP8 keeps weights that an optimizer updates": (
            "each.owner.is_trained = True",
            "each.owner.is_trained = False",
            "tests/cpu/test_fake_gpu_kept_weights.py::test_outputs_follow[replay steps-False]",
        ),
    },
    "lt_runtime/nn/narrow.py": {
        "tuning() measures no rows that have run before": (
            "if chosen is None or asked_for.get():",
            "if chosen is None:",
            "tests/cpu/test_fake_gpu_narrow.py::test_inference_is_measured_where_that_is_asked_for",
        ),
        "a model with layers in FP8 runs in one kernel": (
            " or None in reasons",
            "",
            "tests/cpu/test_fake_gpu_fp8_models.py::test_a_graph_trains_bit_for_bit_as_eager_steps[options0]",
        ),
    },
    "lt_runtime/gpu/memory.py": {
        "memory of a stream stays allocated if its second allocation fails": (
            "            undo.callback(self.free)\n",
            "",
            "tests/cpu/test_failing_calls.py::test_allocations_of_a_step_fail_in_turn[first call]",
        ),
    },
    "lt_runtime/gpu/driver.py": {
        "an illegal access is taken for an error of one call": (
            '"ILLEGAL_ADDRESS", ',
            "",
            "tests/cpu/test_failing_calls.py::test_an_error_of_a_replay_names_the_step_and_later_ones_the_loss[True]",
        ),
    },
    "lt_runtime/store/plan_store.py": {
        "a slow disk is used on and on": (
            "if begun < self._paused_until:",
            "if begun < 0.0:",
            "tests/cpu/test_bad_disks.py",
        ),
    },
    "lt_runtime/training/step.py": {
        "tensors are evaluated on CuPy's current stream": (
            "stream_handle(None, device, library_of(first).current_stream)",
            "stream_handle(None, device)",
            "tests/cpu/training/test_evaluate.py::test_tensors_are_evaluated_on_pytorch_s_current_stream",
        ),
    },
    "lt_runtime/products/methods.py": {
        "a kernel of ours may take more counters than there are": (
            " or kernel.tickets > MAX_TICKETS",
            "",
            "tests/cpu/products/test_tile_matmul.py::test_what_is_refused_says_why",
        ),
    },
    "lt_runtime/kernels/epilogue.py": {
        "a pass reads a whole element for each bit of a mask": (
            "saved_bits = 1 if derivative.saved is Saved.MASK else 8 * dtype.itemsize",
            "saved_bits = 8 * dtype.itemsize",
            "tests/cpu/profiling/test_work.py::test_a_mask_has_a_bit_for_each_element",
        ),
    },
    "lt_runtime/store/recording.py": {
        "a forked child keeps a recording locked": (
            "            fcntl.flock(handle, fcntl.LOCK_UN)\n",
            "            pass\n",
            "tests/cpu/store/test_recording.py::test_a_child_that_was_forked_during_a_write_does_not_keep_the_lock",
        ),
    },
    "lt_runtime/store/keys.py": {
        "an entry with an unknown field is taken": (
            "value.keys() - later != hints.keys() - later",
            "not hints.keys() - later <= value.keys()",
            "tests/cpu/store/test_store_entries.py::test_an_entry_that_is_not_accepted_is_none_whatever_its_digest",
        ),
    },
    "lt_runtime/profiling/layers.py": {
        "a pause of exactly a microsecond is left out": (
            "if ns >= _LEAST_GAP_NS",
            "if ns > _LEAST_GAP_NS",
            "tests/cpu/profiling/test_report.py::test_gaps_and_overlap",
        ),
    },
}
