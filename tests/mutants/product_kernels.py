"""Faults of our kernels of products with a tiny dimension."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_PRODUCTS: Final = "tests/host_kernels/test_narrow_matmul.py::test_products"

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
)
