"""Faults of code that decides which files, plans and algorithms are trusted."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_TUNED_STEPS: Final = "tests/cpu/test_fake_gpu_step_tuning.py"
_TAKEN_ALONG: Final = f"{_TUNED_STEPS}::test_a_checkpoint_takes_the_plan_choices_to_an_empty_cache"
_SAVED_TEST: Final = "tests/cpu/saving/test_saved_models.py"

FAULTS: Final[Table] = {
    "lt_runtime/cublaslt/known_bad.py": {
        "an entry of known_bad begins a version late": (
            "120603 <= c.version",
            "120604 <= c.version",
            "tests/cpu/cublaslt/test_known_bad.py::test_an_affected_candidate_is_refused",
        ),
        "an entry of known_bad ends a version early": (
            "c.version <= 130200",
            "c.version <= 130199",
            "tests/cpu/cublaslt/test_known_bad.py::test_an_affected_candidate_is_refused",
        ),
        "an entry of known_bad is of another algorithm": (
            "c.algo_id == 68 and",
            "c.algo_id == 66 and",
            "tests/cpu/cublaslt/test_known_bad.py::test_an_affected_candidate_is_refused",
        ),
        "known_bad's split-K asks for a whole K": (
            "return c.k % c.splitk != 0 and",
            "return c.k % c.splitk == 0 and",
            "tests/cpu/cublaslt/test_known_bad.py::test_an_affected_candidate_is_refused",
        ),
        "the library's inaccurate GELU is used": (
            "epilogue.has_gelu",
            "epilogue.has_bias",
            "tests/cpu/products/test_inaccurate_epilogues.py::test_full_fp32_has_no_candidate_of_the_library",
        ),
    },
    "lt_runtime/store/document.py": {
        "files of another version are read": (
            "            if schema == SCHEMA:\n",
            "            if schema:\n",
            "tests/cpu/store/test_store_entries.py::test_what_is_no_file_of_ours",
        ),
        "what another machine measured is taken": (
            "        if differences:\n",
            "        if len(differences) > 5:\n",
            "tests/cpu/store/test_store.py::test_plans_of_another_machine_are_not_merged",
        ),
        "merged algorithms keep their bytes": (
            'replace(entry, algorithm=b"") if isinstance',
            "entry if isinstance",
            "tests/cpu/store/test_store.py::test_a_file_from_an_equal_machine_is_merged",
        ),
        "the digests of a plan file's entries are not compared": (
            "if not has_its_digest(key, value):",
            "if value is None:",
            "tests/cpu/store/test_store_faults.py::test_a_file_that_cannot_be_used_is_kept_and_costs_one_warning",
        ),
    },
    "lt_runtime/store/entries.py": {
        "a date in the future outranks a measurement": (
            "return str(when) <= now(), str(when)",
            "return True, str(when)",
            "tests/cpu/store/test_store_attacks.py::test_what_comes_from_elsewhere_never_outranks_a_measurement_here",
        ),
    },
    "lt_runtime/store/plan_store.py": {
        "merged plans take the place of ours": (
            "if ours is None or not ours.is_usable}",
            "if key}",
            "tests/cpu/store/test_store_attacks.py::test_what_comes_from_elsewhere_never_outranks_a_measurement_here",
        ),
        "junk is merged": (
            "        other.require_sound()\n",
            "",
            "tests/cpu/store/test_store_attacks.py::test_a_file_with_one_bad_entry_is_not_merged",
        ),
    },
    "lt_runtime/files.py": {
        "files of other users are used": (
            "if status.st_uid not in (0, os.geteuid()):",
            "if False:",
            "tests/cpu/gpu/test_kernel_cache.py::test_what_others_can_have_written_is_not_used_and_costs_one_warning",
        ),
        "files that a group can write are used": (
            "stat.S_IWGRP | stat.S_IWOTH",
            "stat.S_IWOTH",
            "tests/cpu/gpu/test_kernel_cache.py::test_what_others_can_have_written_is_not_used_and_costs_one_warning",
        ),
        "the cache directory is not looked at": (
            "for each in (directory.parent, directory):",
            "for each in (directory,):",
            "tests/cpu/store/test_store_attacks.py::test_what_others_can_have_written_is_not_used_and_costs_one_warning",
        ),
        "links in the cache are followed": (
            "with opened(path, os.O_NOFOLLOW) as handle:\n            _require_private",
            "with opened(path) as handle:\n            _require_private",
            "tests/cpu/gpu/test_kernel_cache.py::test_a_symbolic_link_is_not_followed",
        ),
        "files that anybody can write are used": (
            "stat.S_IWGRP | stat.S_IWOTH",
            "stat.S_IWGRP",
            "tests/cpu/test_private.py::test_untrusted_files",
        ),
        "root's files are not used": (
            "not in (0, os.geteuid())",
            "!= os.geteuid()",
            "tests/cpu/test_private.py::test_trusted_files",
        ),
        "another user's link to a directory is followed": (
            "for status in (each.lstat(), each.stat()):",
            "for status in (each.stat(),):",
            "tests/cpu/gpu/test_kernel_cache.py::test_a_link_to_a_directory_is_followed_only_if_both_are_ours",
        ),
        "a link to another user's directory is followed": (
            "for status in (each.lstat(), each.stat()):",
            "for status in (each.lstat(),):",
            "tests/cpu/gpu/test_kernel_cache.py::test_a_link_to_a_directory_is_followed_only_if_both_are_ours",
        ),
        "the file itself is not looked at": (
            "            _require_private(path, os.fstat(handle))\n",
            "",
            "tests/cpu/store/test_store_attacks.py::test_what_others_can_have_written_is_not_used_and_costs_one_warning",
        ),
    },
    "lt_runtime/gpu/compiler.py": {
        "a kernel's digest is not compared": (
            "{hashlib.sha256(code).hexdigest()}",
            "{'0' * 64}",
            "tests/cpu/gpu/test_kernel_cache.py::test_a_damaged_kernel_is_compiled_anew_and_replaced",
        ),
        "a kernel's key is not compared": (
            "kernel\\n{key}\\n",
            "kernel\\n{len(key):064}\\n",
            "tests/cpu/gpu/test_kernel_cache.py::test_another_kernels_file_is_not_used",
        ),
    },
    "lt_runtime/tuner/product_search.py": {
        "merged algorithms are not verified": (
            'return verify({"it": afresh(launch, bench)}, operands).get("it")',
            "return None",
            "tests/cpu/test_fake_gpu_trust.py::test_merged_algorithms_that_are_wrong_never_make_a_result",
        ),
        "a merged algorithm that is wrong is not barred": (
            "    if fault is not None:\n",
            "    if fault is None and not plan.blob:\n",
            "tests/cpu/test_fake_gpu_trust.py::test_merged_algorithms_that_are_wrong_never_make_a_result",
        ),
    },
    "lt_runtime/saving/checkpoint_file.py": {
        "a checkpoint's digest is not compared": (
            "if self._metadata[_DIGEST] != digest.hexdigest():",
            "if len(self._metadata[_DIGEST]) != 64:",
            "tests/cpu/saving/test_checkpoint_damage.py",
        ),
        "a checkpoint's digest is of its text alone": (
            "                digest.update(piece.data)\n",
            "",
            "tests/cpu/saving/test_checkpoint_damage.py",
        ),
        "more is read than memory can hold": (
            "        if needed > available:\n",
            "        if needed > available << 20:\n",
            f"{_SAVED_TEST}::test_holes_are_no_memory",
        ),
        "a part of the arrays is read": (
            "for name, kind in self.kinds.items():\n",
            "for name, kind in list(self.kinds.items())[:2]:\n",
            f"{_SAVED_TEST}::test_a_model_comes_back_as_it_was",
        ),
    },
    "lt_runtime/saving/plan_choices.py": {
        "a checkpoint's plan choices take the place of ours": (
            "if key not in known}",
            "if key}",
            f"{_TUNED_STEPS}::test_what_is_measured_here_is_not_taken_from_a_checkpoint",
        ),
        "a checkpoint has no algorithms of products": (
            "                yield from _products(problem, device)\n",
            "                pass\n",
            f"{_TAKEN_ALONG}[{{'accumulate': 2}}-16]",
        ),
    },
    "lt_runtime/tuner/verification.py": {
        "an error of twice the tolerance passes": (
            "return Rounding(_UNIT[dtype], ",
            "return Rounding(64 * _UNIT[dtype], ",
            "tests/cpu/tuner/test_verification.py::test_one_element_that_is_off",
        ),
        "writing outside of D passes verification": (
            'return None if d.count_written() == math.prod(d.shape) else "it writes outside of D"',
            "return None",
            "tests/cpu/tuner/test_verification.py::test_memory_that_is_not_the_results",
        ),
        "two runs may differ": (
            'return None if is_same else "two runs differ"',
            "return None",
            "tests/cpu/tuner/test_verification.py::test_two_runs_that_differ",
        ),
        "outputs keep the first run's values before the second": (
            "for name in operands.outputs}\n    operands.poison()\n",
            "for name in operands.outputs}\n",
            "tests/cpu/tuner/test_verification.py::test_a_second_run_that_writes_nothing",
        ),
        "sums that must be exact may be off": (
            "    if problem.k <= data.exact_to:\n        return 0.0\n",
            "",
            "tests/cpu/tuner/test_verification.py::test_one_element_that_is_off",
        ),
        "TF32 is judged as FP32": (
            "truncation = 2.0**-9 if problem.compute is Compute.TF32 else 0.0",
            "truncation = 0.0",
            "tests/cpu/tuner/test_verification.py::test_tf32_passes_only_where_it_is_asked_for",
        ),
    },
    "cuda_src/verify.cu": {
        "NaN passes verification": (
            "if (error <= limit) continue;",
            "if (!(error > limit)) continue;",
            "tests/cpu/tuner/test_verification.py::test_an_element_that_is_not_written",
        ),
    },
}
