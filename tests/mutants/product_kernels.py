"""Faults of our kernels of products with a tiny dimension, and of products with ragged rows."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_PRODUCTS: Final = "tests/host_kernels/test_own_products.py::test_narrow"
_TILES: Final = "tests/host_kernels/test_own_products.py::test_tiles"

FAULTS: Final[Table] = {
    "cuda_src/narrow.cuh": {
        "two lanes both keep the first half": (
            "kept = upper ? terms[i + kHalf] : terms[i];",
            "kept = terms[i];",
            f"{_PRODUCTS}[narrow_n-float32-4-scattered]",
        ),
    },
    "cuda_src/narrow_n.cu": {
        "narrow_n writes a row beyond the last": (
            "if (stores && first + r <= last) *element",
            "if (stores) *element",
            f"{_PRODUCTS}[narrow_n-float32-4-scattered]",
        ),
    },
    "cuda_src/narrow_k.cu": {
        "narrow_k sums a row twice at the end": (
            "if (first + r >= p.rows) continue;",
            "if (first + r > p.rows) continue;",
            f"{_PRODUCTS}[narrow_k-float32-16-aligned-drelu_bgrad]",
        ),
        "narrow_k leaves the last term out": (
            "if (start + k >= p.depth) continue;  // all threads",
            "if (start + k + 1 >= p.depth) continue;  // all threads",
            f"{_PRODUCTS}[narrow_k-float32-4-scattered-none]",
        ),
        "narrow_k sums what is rounded": (
            "total += out;",
            "for (int i = 0; i < kOctet; ++i) total.v[i] += to_float(from_float<SCALAR>(out.v[i]));",
            "tests/host_kernels/test_own_products.py::test_narrow[narrow_k-float16-1-scattered-drelu_bgrad]",
        ),
    },
    "cuda_src/narrow_m.cu": {
        "narrow_m loses a part of K": (
            "for (uint32 part = 0; part < gridDim.y; ++part)",
            "for (uint32 part = 1; part < gridDim.y; ++part)",
            "tests/host_kernels/test_own_products.py::test_narrow[narrow_m-float32-16-aligned]",
        ),
        "narrow_m adds C for each part of K": (
            "from_float<SCALAR>(p.alpha * sum + addend(p, row, col))",
            "from_float<SCALAR>(p.alpha * sum + gridDim.y * addend(p, row, col))",
            "tests/host_kernels/test_own_products.py::test_narrow[narrow_m-float32-16-aligned]",
        ),
    },
    "cuda_src/tile_matmul.cu": {
        "a tile has what lies behind a line": (
            "if (exists && length > 1) high = p[1];",
            "if (exists) high = p[1];",
            f"{_TILES}[bfloat16-alongalong-gelu]",
        ),
        "a tile has what lies behind the last line": (
            "const bool exists = i * kWarps < lines;",
            "const bool exists = i * kWarps <= lines;",
            f"{_TILES}[bfloat16-acrossacross-none]",
        ),
        "a group of parts loses its first": (
            "for (uint32 each = 0; each < count; ++each)",
            "for (uint32 each = 1; each < count; ++each)",
            f"{_TILES}[bfloat16-acrossacross-none]",
        ),
        "groups of groups count with the groups' tickets": (
            "    tickets += parts;\n",
            "",
            f"{_TILES}[bfloat16-acrossacross-none]",
        ),
        "the sum of a ragged product's columns leaves blocks out": (
            "for (uint32 each = turn; each < gridDim.x; each += kTurns)",
            "for (uint32 each = turn + 1; each < gridDim.x; each += kTurns)",
            f"{_TILES}[float16-alongacross-gelu-derivative]",
        ),
    },
    "cuda_src/copy_rows.cu": {
        "parts at any distance are taken for aligned": (
            "places |= from.pitch | to.stride;",
            "places |= from.pitch;",
            "tests/host_kernels/test_copy_rows.py::test_copies",
        ),
        "rows without gaps between parts are one line": (
            "if (from.pitch == width) {",
            "if (from.pitch >= width) {",
            "tests/host_kernels/test_copy_rows.py::test_copies",
        ),
        "a part's rows lie where the first part's are": (
            "+ (line - part * lines_a_part) * width",
            "+ line * width",
            "tests/host_kernels/test_copy_rows.py::test_copies",
        ),
    },
}
