"""Faults of our kernels of products with a tiny dimension, and of products with ragged rows."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_PRODUCTS: Final = "tests/host_kernels/test_narrow_matmul.py::test_products"
_TILES: Final = "tests/host_kernels/test_tile_matmul.py::test_products"
_TILE: Final = "cuda_src/tile_matmul.cu"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "beta is left out",
        "cuda_src/narrow.cuh",
        "p.beta * to_float(*element<SCALAR>(p.c, row, col))",
        "to_float(*element<SCALAR>(p.c, row, col))",
        f"{_PRODUCTS}[narrow_n-float32-4-scattered]",
    ),
    fault(
        "two lanes both keep the first half",
        "cuda_src/narrow.cuh",
        "kept = upper ? terms[i + kHalf] : terms[i];",
        "kept = terms[i];",
        f"{_PRODUCTS}[narrow_n-float32-4-scattered]",
    ),
    fault(
        "narrow_n scales the bias by alpha",
        "cuda_src/narrow_n.cu",
        "p.alpha * sum_over_row(sums[r]) + addends[r]",
        "p.alpha * (sum_over_row(sums[r]) + addends[r])",
        f"{_PRODUCTS}[narrow_n-float32-4-scattered]",
    ),
    fault(
        "narrow_n writes a row beyond the last",
        "cuda_src/narrow_n.cu",
        "if (stores && first + r <= last) *element",
        "if (stores) *element",
        f"{_PRODUCTS}[narrow_n-float32-4-scattered]",
    ),
    fault(
        "narrow_n takes a warp for a row of several",
        "cuda_src/narrow_n.cu",
        "return ROWS == 1 && blockDim.x > kWarp ? sum_over_warps(sum) : sum;",
        "return sum;",
        f"{_PRODUCTS}[narrow_n-float32-16-aligned]",
    ),
    fault(
        "narrow_k leaves alpha out",
        "cuda_src/narrow_k.cu",
        "p.alpha * sums.v[i] +",
        "sums.v[i] +",
        f"{_PRODUCTS}[narrow_k-float32-4-scattered-none]",
    ),
    fault(
        "narrow_k sums a row twice at the end",
        "cuda_src/narrow_k.cu",
        "if (first + r >= p.rows) continue;",
        "if (first + r > p.rows) continue;",
        f"{_PRODUCTS}[narrow_k-float32-16-aligned-drelu_bgrad]",
    ),
    fault(
        "narrow_k multiplies by GELU's function",
        "cuda_src/narrow_k.cu",
        "Gelu::derivative(z.v[i], 0.0f)",
        "Gelu::forward(z.v[i], 0.0f)",
        f"{_PRODUCTS}[narrow_k-float32-4-scattered-dgelu_bgrad]",
    ),
    fault(
        "narrow_k leaves the last term out",
        "cuda_src/narrow_k.cu",
        "if (start + k >= p.depth) continue;  // all threads",
        "if (start + k + 1 >= p.depth) continue;  // all threads",
        f"{_PRODUCTS}[narrow_k-float32-4-scattered-none]",
    ),
    fault(
        "narrow_k sums what is rounded",
        "cuda_src/narrow_k.cu",
        "total.v[i] += out.v[i];",
        "total.v[i] += to_float(from_float<SCALAR>(out.v[i]));",
        "tests/host_kernels/test_narrow_matmul.py::test_products[narrow_k-float16-1-scattered-drelu_bgrad]",
    ),
    fault(
        "narrow_m puts the sum of A into the next column",
        "cuda_src/narrow_m.cu",
        "if (p.vector && left >= 0 && left < kQuad) ones = static_cast<int>(left);",
        "if (p.vector && left > 0 && left < kQuad) ones = static_cast<int>(left);",
        f"{_PRODUCTS}[narrow_m-float32-4-scattered]",
    ),
    fault(
        "narrow_m loses a part of K",
        "cuda_src/narrow_m.cu",
        "for (uint32 part = 0; part < gridDim.y; ++part)",
        "for (uint32 part = 1; part < gridDim.y; ++part)",
        "tests/host_kernels/test_narrow_matmul.py::test_products[narrow_m-float32-16-aligned]",
    ),
    fault(
        "narrow_m takes A's row stride for B's",
        "cuda_src/narrow_m.cu",
        "b += step * p.b.row_stride;",
        "b += step * p.a.row_stride;",
        f"{_PRODUCTS}[narrow_m-float32-4-scattered]",
    ),
    fault(
        "narrow_m adds C for each part of K",
        "cuda_src/narrow_m.cu",
        "from_float<SCALAR>(p.alpha * sum + addend(p, row, col))",
        "from_float<SCALAR>(p.alpha * sum + gridDim.y * addend(p, row, col))",
        "tests/host_kernels/test_narrow_matmul.py::test_products[narrow_m-float32-16-aligned]",
    ),
    fault(
        "a tile has what lies behind a line",
        _TILE,
        "if (exists && length > 1) high = p[1];",
        "if (exists) high = p[1];",
        f"{_TILES}[bfloat16-alongalong-gelu]",
    ),
    fault(
        "a tile has what lies behind the last line",
        _TILE,
        "const bool exists = i * kWarps < lines;",
        "const bool exists = i * kWarps <= lines;",
        f"{_TILES}[bfloat16-acrossacross-none]",
    ),
    fault(
        "tiles go on along K by half",
        _TILE,
        "from = along ? from + kSide : p;",
        "from = along ? from + kSide / 2 : p;",
        f"{_TILES}[bfloat16-alongalong-gelu]",
    ),
    fault(
        "a group of parts loses its first",
        _TILE,
        "for (uint32 each = 0; each < count; ++each)",
        "for (uint32 each = 1; each < count; ++each)",
        f"{_TILES}[bfloat16-acrossacross-none]",
    ),
    fault(
        "groups of groups count with the groups' tickets",
        _TILE,
        "    tickets += parts;\n",
        "",
        f"{_TILES}[bfloat16-acrossacross-none]",
    ),
    fault(
        "A is summed up by D's first column",
        _TILE,
        "add_ones(right, p.cols - at.col);",
        "add_ones(right, 0);",
        f"{_TILES}[bfloat16-acrossacross-none]",
    ),
    fault(
        "what is kept of a ragged product has no bias",
        _TILE,
        "aux[i] = from_float<SCALAR>(z[i]);",
        "aux[i] = from_float<SCALAR>(z[i] - bias);",
        f"{_TILES}[bfloat16-alongalong-gelu]",
    ),
    fault(
        "a ragged product is multiplied by GELU's function",
        _TILE,
        "ACTIVATION::derivative(arguments[i], 0.0f)",
        "ACTIVATION::forward(arguments[i], 0.0f)",
        f"{_TILES}[bfloat16-alongacross-gelu-derivative]",
    ),
    fault(
        "the sum of a ragged product's columns leaves blocks out",
        _TILE,
        "for (uint32 each = turn; each < gridDim.x; each += kTurns)",
        "for (uint32 each = turn + 1; each < gridDim.x; each += kTurns)",
        f"{_TILES}[float16-alongacross-gelu-derivative]",
    ),
)
