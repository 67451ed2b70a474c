"""Faults of matrix products: what cuBLASLt is told, which of its algorithms are used, and how a product is split."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_KNOWN_BAD: Final = "lt_runtime/cublaslt/known_bad.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "an entry of known_bad begins a version late",
        _KNOWN_BAD,
        "versions=(120603, 130401),",
        "versions=(120604, 130401),",
        "tests/cpu/cublaslt/test_known_bad.py::test_split_k_drops_the_tail",
    ),
    fault(
        "an entry of known_bad ends a version early",
        _KNOWN_BAD,
        "versions=(0, 130200),",
        "versions=(0, 130199),",
        "tests/cpu/cublaslt/test_known_bad.py::test_leading_dimensions_beyond_two_gibibytes",
    ),
    fault(
        "an entry of known_bad holds for later GPUs",
        _KNOWN_BAD,
        "capabilities=(90, 90),",
        "capabilities=(90, 999),",
        "tests/cpu/cublaslt/test_known_bad.py::test_leading_dimensions_beyond_two_gibibytes",
    ),
    fault(
        "an entry of known_bad holds for earlier GPUs",
        _KNOWN_BAD,
        "capabilities=(90, 999),",
        "capabilities=(80, 999),",
        "tests/cpu/cublaslt/test_known_bad.py::test_split_k_drops_the_tail",
    ),
    fault(
        "an entry of known_bad is of another algorithm",
        _KNOWN_BAD,
        "c.algo_id == 68 and",
        "c.algo_id == 66 and",
        "tests/cpu/cublaslt/test_known_bad.py::test_operands_of_two_to_the_31_elements",
    ),
    fault(
        "known_bad's split-K asks for a whole K",
        _KNOWN_BAD,
        "return c.k % c.splitk != 0 and",
        "return c.k % c.splitk == 0 and",
        "tests/cpu/cublaslt/test_known_bad.py::test_split_k_drops_the_tail",
    ),
    fault(
        "known_bad's stages are exchanged",
        _KNOWN_BAD,
        "{35: 64, 36: 128}",
        "{35: 128, 36: 64}",
        "tests/cpu/cublaslt/test_known_bad.py::test_split_k_drops_the_tail",
    ),
    fault(
        "known_bad spares derivatives where K is 1",
        _KNOWN_BAD,
        "c.k == 1 and (c.epilogue.has_derivative or c.epilogue.has_bias_gradient)",
        "c.k == 1 and c.epilogue.has_bias_gradient",
        "tests/cpu/cublaslt/test_known_bad.py::test_derivatives_at_one_input",
    ),
    fault(
        "known_bad's alignment is 8 bytes",
        _KNOWN_BAD,
        "_ALIGNMENT: Final = 16",
        "_ALIGNMENT: Final = 8",
        "tests/cpu/cublaslt/test_known_bad.py::test_vectors_below_16_bytes_alignment",
    ),
    fault(
        "known_bad looks at C's rows alone",
        _KNOWN_BAD,
        "c.d_alignment < min(c.c_alignment, c.asked_alignment)",
        "c.c_alignment < c.asked_alignment",
        "tests/cpu/cublaslt/test_known_bad.py::test_rows_of_d_that_are_less_aligned_than_those_of_c",
    ),
    fault(
        "the library's inaccurate GELU is used",
        _KNOWN_BAD,
        "epilogue.has_gelu",
        "epilogue.has_bias",
        "tests/cpu/products/test_inaccurate_epilogues.py::test_full_fp32_has_no_candidate_of_the_library",
    ),
)
