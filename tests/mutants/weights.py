"""Faults of weights on their way in and out: values, master copies, state dicts, saved models."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_PARAMETERS: Final = "lt_runtime/ops/_adamw_parameters.py"
_STATES: Final = "lt_runtime/ops/_adamw_states.py"
_TRANSFER: Final = "lt_runtime/arrays/transfer.py"
_STATE_DICT: Final = "lt_runtime/training/state_dict.py"
_SAVED: Final = "lt_runtime/saving/saved_model.py"
_CHECKPOINTS: Final = "lt_runtime/saving/checkpoints.py"
_FILE: Final = "lt_runtime/saving/checkpoint_file.py"
_VALUES_TEST: Final = "tests/cpu/ops/test_parameter_values.py"
_STATE_TEST: Final = "tests/cpu/training/test_state_dicts.py"
_SAVED_TEST: Final = "tests/cpu/saving/test_saved_models.py"
_CHECKPOINT_TEST: Final = "tests/cpu/saving/test_checkpoints.py"
_GPU_TEST: Final = "tests/cpu/test_fake_gpu_weights.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "values do not reach the master copy",
        _PARAMETERS,
        '        for part in ("master", "data"):\n            if getattr',
        '        for part in ("data",):\n            if getattr',
        f"{_VALUES_TEST}::test_values_of_any_library",
    ),
    fault(
        "values that become infinite are assigned",
        _TRANSFER,
        "lost = np.isinf(result.astype(dtype)) & np.isfinite(values)",
        "lost = np.isinf(result) & np.isfinite(values)",
        f"{_VALUES_TEST}::test_refused_values_leave_the_parameter",
    ),
    fault(
        "integers that FP32 does not hold are assigned",
        _TRANSFER,
        "_LARGEST_INTEGER: Final = 1 << 24",
        "_LARGEST_INTEGER: Final = 1 << 64",
        f"{_VALUES_TEST}::test_refused_values_leave_the_parameter",
    ),
    fault(
        "values are written while others still read the old ones",
        _PARAMETERS,
        "        cupy().cuda.Device(device).synchronize()  # work",
        "        pass  # work",
        f"{_GPU_TEST}::test_work_that_reads_the_old_values_comes_first",
    ),
    fault(
        "values are written into a graph that is being captured",
        _PARAMETERS,
        "    if stream and is_capturing(stream):\n",
        "    if stream and not stream:\n",
        f"{_GPU_TEST}::test_within_a_capture_nothing_is_written",
    ),
    fault(
        "values are half written where a write fails",
        _TRANSFER,
        "        for operand, values, stream in before:\n",
        "        for operand, values, stream in before[1:]:\n",
        f"{_STATE_TEST}::test_a_write_that_fails_changes_nothing",
    ),
    fault(
        "an optimizer is made over a stale master copy",
        _PARAMETERS,
        "    check_masters(parameters, stream)\n",
        "",
        f"{_VALUES_TEST}::test_an_optimizer_refuses_a_stale_master_copy",
    ),
    fault(
        "a step on the host goes on from a stale master copy",
        _STATES,
        "                check_rounding(read.parameter.name, read.data.array, read.master.array)\n",
        "                pass\n",
        f"{_VALUES_TEST}::test_a_step_refuses_a_stale_master_copy_and_changes_nothing",
    ),
    fault(
        "a graph goes on from a stale master copy",
        "lt_runtime/training/captured.py",
        "            check_masters(self._body.optimizer.parameters, stream)\n",
        "            pass\n",
        f"{_GPU_TEST}::test_a_first_step_refuses_a_stale_master_copy",
    ),
    fault(
        "a first step on a GPU goes on from a stale master copy",
        _STATES,
        "                check_masters(self._unchecked, handle)\n",
        "",
        f"{_GPU_TEST}::test_an_optimizers_first_step_refuses_a_stale_master_copy",
    ),
    fault(
        "two NaN make a master copy stale",
        _PARAMETERS,
        "stale = ~((data == expected) | (np.isnan(data) & np.isnan(expected)))",
        "stale = data != expected",
        f"{_VALUES_TEST}::test_what_training_makes_of_numbers_is_not_stale",
    ),
    fault(
        "a state that lacks parameters is loaded",
        _STATE_DICT,
        'complaints += [f"missing: {name}" for name in missing]',
        "pass",
        f"{_STATE_TEST}::test_everything_that_does_not_fit_is_listed",
        f"{_STATE_TEST}::test_without_strict_something_must_fit",
    ),
    fault(
        "a state dict is views of the parameters",
        "lt_runtime/training/mlp.py",
        "copied(each.data) for name",
        "each.data for name",
        f"{_STATE_TEST}::test_what_is_given_out_is_the_callers_own",
    ),
    fault(
        "a map of names is read the other way round",
        _STATE_DICT,
        "        name = names.get(each.name, each.name)\n",
        "        name = {theirs: ours for ours, theirs in names.items()}.get(each.name, each.name)\n",
        f"{_STATE_TEST}::test_weights_of_pytorch_stay_bit_for_bit",
    ),
    fault(
        "a saved model has rounded values",
        _SAVED,
        "            values[each.name] = master = model.device.to_host(each.master)\n",
        "            master = model.device.to_host(each.master)\n",
        f"{_SAVED_TEST}::test_fine_tuning_goes_on_from_full_precision",
    ),
    fault(
        "a checkpoint gives a model its rounded values",
        _SAVED,
        "[name + MASTER if name + MASTER in kinds else name for name in shapes]",
        "[*shapes]",
        f"{_SAVED_TEST}::test_a_model_comes_back_as_it_was",
    ),
    fault(
        "a model is made of whatever size a file says",
        _SAVED,
        "    for name in shapes.keys() - kinds.keys():\n",
        "    for name in ():\n",
        f"{_SAVED_TEST}::test_forged_files",
    ),
    fault(
        "more is read than memory can hold",
        _FILE,
        "    if needed > memory:\n",
        "    if needed > memory << 20:\n",
        f"{_SAVED_TEST}::test_holes_are_no_memory",
    ),
    fault(
        "a digest is of what is wanted alone",
        _FILE,
        "                    digest.add(array)\n                    if name in names:\n",
        "                    if name in names:\n                        digest.add(array)\n",
        f"{_SAVED_TEST}::test_a_model_comes_back_as_it_was",
    ),
    fault(
        "a stale master copy is saved",
        _CHECKPOINTS,
        '                check_rounding(parameter.name, arrays[parameter.name], arrays[f"{parameter.name}{MASTER}"])\n',
        "                pass\n",
        f"{_SAVED_TEST}::test_a_stale_master_copy_is_not_saved",
    ),
    fault(
        "any option may be another once one is",
        _CHECKPOINTS,
        '(may_differ | _SEEN_OTHERWISE).isdisjoint(row[0].split("."))',
        "not may_differ",
        f"{_CHECKPOINT_TEST}::test_all_that_differs_is_in_one_table",
    ),
)
