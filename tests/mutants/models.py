"""Faults of models: their options by layer, what forward keeps and backward makes, evaluation; and of bound calls."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_MLP: Final = "lt_runtime/training/mlp.py"
_EVALUATE: Final = "lt_runtime/training/evaluate.py"
_MODELS: Final = "tests/cpu/training/test_models.py"
_ON_GPU: Final = "tests/cpu/test_fake_gpu_models.py"
_EVALUATED: Final = "tests/cpu/training/test_evaluate.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "a single activation is the last layer's too",
        "lt_runtime/arguments.py",
        "return single, [*[single] * (layers - 1), single if last is None else last]",
        "return single, [single] * layers",
        f"{_MODELS}::test_the_rules",
    ),
    fault(
        "a sequence of another length is taken",
        "lt_runtime/arguments.py",
        "if len(given) != layers:",
        "if len(given) < layers:",
        f"{_MODELS}::test_options_that_cannot_be",
    ),
    fault(
        "the last layer's bias gradient is left out",
        _MLP,
        '"need_db": i == last,',
        '"need_db": False,',
        f"{_MODELS}::test_dropout_by_layer_the_last_included",
    ),
    fault(
        "the last layer's activation has no derivative",
        _MLP,
        '{"before_activation": i < last,',
        '{"before_activation": True,',
        f"{_MODELS}::test_gradients_of_a_mixed_model",
    ),
    fault(
        "the gradient of the inputs is never made",
        _MLP,
        '"need_dx": i > 0 or need_dx}',
        '"need_dx": i > 0}',
        f"{_MODELS}::test_the_gradient_of_the_inputs_is_made_only_if_it_is_asked_for",
    ),
    fault(
        "contexts share the step that advances, on the host",
        _MLP,
        "            return step.copy()\n",
        "            return step\n",
        f"{_MODELS}::test_a_step_that_advances_keeps_its_masks",
    ),
    fault(
        "contexts share the step that advances, on a GPU",
        _MLP,
        "        return copy\n",
        "        return step\n",
        f"{_ON_GPU}::test_a_step_that_advances_keeps_its_masks",
    ),
    fault(
        "a training step copies its number at each forward pass",
        "lt_runtime/training/body.py",
        "copy_step=False, ",
        "",
        f"{_ON_GPU}::test_a_captured_step_copies_no_step",
    ),
    fault(
        "training without a step draws the masks of step 0",
        _MLP,
        "        elif step is None:\n            raise",
        "        elif step is Ellipsis:\n            raise",
        f"{_MODELS}::test_training_without_a_step_is_refused_if_there_is_dropout",
    ),
    fault(
        "a model's description ignores what became of its layers",
        _MLP,
        "return _condensed([each.dropout for each in self.layers], self._hidden_dropout, 0.0)",
        "return self._hidden_dropout or 0.0",
        f"{_MODELS}::test_options_are_what_the_layers_are_now",
    ),
    fault(
        "batches weigh the same in an evaluation, whatever their sizes",
        _EVALUATE,
        "counts = [each.rows for each in totals] if classifies else sizes",
        "counts = [1] * len(sizes)",
        f"{_EVALUATED}::test_batches_of_any_size",
    ),
    fault(
        "rows that are left out weigh in an evaluation",
        _EVALUATE,
        "counts = [each.rows for each in totals] if classifies else sizes",
        "counts = sizes",
        f"{_EVALUATED}::test_batches_of_any_size",
    ),
    fault(
        "a GPU's tallies are all in one place",
        "lt_runtime/training/tally.py",
        "self._states[-1].data.ptr + place * _STATE.itemsize",
        "self._states[-1].data.ptr",
        f"{_EVALUATED}::test_batches_of_any_size",
    ),
    fault(
        "a bound call on NumPy arrays does nothing",
        "lt_runtime/ops/call.py",
        "return functools.partial(_run_on_host, known, arrays, extras)",
        "return lambda: None",
        "tests/cpu/test_binding.py::test_a_bound_call",
    ),
    fault(
        "beta is ignored without c",
        "lt_runtime/ops/matmul.py",
        "if c is None and scalars[1] != 0.0 and arrays[1] is None:",
        "if False:",
        "tests/cpu/ops/test_matmul.py::test_bad_input",
    ),
    fault(
        "a mask is ignored",
        "lt_runtime/arrays/operand.py",
        "if masked is not None and isinstance(array, masked.MaskedArray):",
        "if masked is None:",
        "tests/cpu/test_inputs_that_got_through.py::test_arrays_with_arithmetic_of_their_own",
    ),
    fault(
        "prefetched batches on the host are the iterable's own arrays",
        "lt_runtime/training/prefetch.py",
        "return replaced(batch, np.array)",
        "return replaced(batch, np.asarray)",
        "tests/cpu/training/test_prefetch.py::test_on_the_host_an_iterable_may_fill_the_same_arrays_again",
    ),
)
