"""Faults of the epilogue kernels, of casts to FP8, of dropout, and of code that they share."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_FORWARD: Final = "tests/host_kernels/test_epilogue_fwd.py::test_forward"
_BACKWARD: Final = "tests/host_kernels/test_epilogue_bwd.py::test_backward"
_GATED: Final = "tests/host_kernels/test_gated.py"
_DROPOUT: Final = "tests/host_kernels/test_dropout.py"
_MATMUL: Final = "tests/host_kernels/test_matmul_epilogue.py::test_epilogues"

FAULTS: Final[Table] = {
    "cuda_src/fp8.cuh": {
        "infinite elements are saturated": (
            "fmaf(number, 0.0f, number * scale)",
            "number * scale",
            "tests/cpu/test_fake_gpu_fp8_models.py::test_a_skipped_step_changes_no_scale[options0-inf-False-cuda]",
        ),
    },
    "cuda_src/fp8_rows.cuh": {
        "a mantissa above that of the largest number does not change the scale": (
            "(bits + kBeyond) >> kMantissaBits",
            "(bits + kBeyond / 2) >> kMantissaBits",
            "tests/host_kernels/test_fp8.py::test_casts_with_a_scale_for_each_row",
        ),
        "columns beyond the first tile have the scales of the first": (
            "scales_[j] = j < cols_ && out.col_scales ? reciprocal(out.col_scales[col + j])",
            "scales_[j] = j < cols_ && out.col_scales ? reciprocal(out.col_scales[col % kTile + j])",
            "tests/host_kernels/test_fp8.py::test_casts_with_a_scale_for_each_row",
        ),
    },
    "cuda_src/fp8_scales.cu": {
        "the scale of zeros is 0": (
            "if (slot.scale == 0.0f) slot.scale = 1.0f;",
            "",
            "tests/cpu/test_fake_gpu_fp8_layers.py::test_the_scale_of_zeros_is_1",
        ),
    },
    "cuda_src/activations.cuh": {
        "ReLU stops NaN": (
            "float forward(float z, float) { return z <= 0.0f ? 0.0f : z; }",
            "float forward(float z, float) { return z > 0.0f ? z : 0.0f; }",
            "tests/host_kernels/test_epilogue_fwd.py::test_special_values[float32-relu-whole-scattered]",
        ),
        "ReLU's gradient from the output is 1 at 0": (
            "derivative_from_output(float y) { return y <= 0.0f ?",
            "derivative_from_output(float y) { return y < 0.0f ?",
            f"{_BACKWARD}[float32-relu-whole-aligned-output-dz]",
        ),
        "GELU's cubic term a little too large": (
            "kLinear * 0.044715f",
            "kLinear * 0.044725f",
            f"{_FORWARD}[float32-gelu-whole-scattered]",
        ),
        "GELU's derivative is NaN for large numbers": (
            "const float square = fminf(z * z, 256.0f);",
            "const float square = z * z;",
            "tests/host_kernels/test_epilogue_bwd.py::test_special_values[float32-gelu-whole-aligned-preactivation-dz]",
        ),
    },
    "cuda_src/epilogue_fwd.cu": {
        "the kept pre-activation lacks the bias": (
            "    kept.store(z, ",
            "    Octet bare = z;\n    for (int i = 0; i < kOctet; ++i) bare.v[i] -= bias.v[i];\n    kept.store(bare, ",
            f"{_FORWARD}[float32-gelu-dropout-aligned-kept]",
        ),
        "the forward pass lags behind in its dropout": (
            "    index += index_step;\n#if ADD",
            "    index += index_step / 2;\n#if ADD",
            f"{_FORWARD}[float32-relu-dropout-aligned]",
        ),
        "the addend lacks its last row": (
            "addend.start(sweep, p.rows);",
            "addend.start(sweep, p.rows - 1);",
            f"{_FORWARD}[float32-gelu-dropout-aligned-kept-added]",
        ),
        "the forward pass loses the last row": (
            "  in.start(sweep, p.rows);",
            "  in.start(sweep, p.rows - 1);",
            f"{_FORWARD}[float32-none-whole-aligned]",
        ),
    },
    "cuda_src/epilogue_bwd.cu": {
        "the bias gradient counts rows beyond the last": (
            "if (DZ != 2 || row < rows) {",
            "if (true) {",
            f"{_BACKWARD}[float32-gelu-dropout-scattered-preactivation-transposed]",
        ),
        "a mask is read in steps of one row": (
            "step(s.step * m.row_stride) {}",
            "step(m.row_stride) {}",
            f"{_BACKWARD}[float32-relu-whole-scattered-mask-dz]",
        ),
    },
    "cuda_src/gated.cu": {
        "the gradient of the gate lacks the value's sign": (
            "dy.v[i] * value.v[i] * ACTIVATION::derivative(",
            "dy.v[i] * fabsf(value.v[i]) * ACTIVATION::derivative(",
            f"{_GATED}::test_backward[float32-silu-dropout-aligned]",
        ),
        "the mask of a gated activation lags behind": (
            "    index += index_step;\n    out.store(y, ",
            "    index += index_step / 2;\n    out.store(y, ",
            f"{_GATED}::test_forward[float32-leaky_relu-dropout-scattered]",
        ),
        "y that is computed again has no dropout": (
            "if (DROPOUT) apply_dropout<ALIGNED != 0>(y, p.dropout, step, index);\n      y_at",
            "y_at",
            f"{_GATED}::test_backward[float32-gelu_erf-dropout-aligned-remade]",
        ),
        "the last row of dy is not read": (
            "  dy_at.start(sweep, p.rows);",
            "  dy_at.start(sweep, p.rows - 1);",
            f"{_GATED}::test_backward[float32-relu-whole-aligned]",
        ),
    },
    "lt_runtime/kernels/gated.py": {
        "the value of a column-major matrix begins in the gate": (
            "half.cols * half.strides[1] * dtype.itemsize",
            "half.cols * dtype.itemsize",
            f"{_GATED}::test_forward[float32-none-whole-scattered]",
        ),
        "a pass moves vectors of rows that are not aligned": (
            "Access.ALIGNED if are_aligned(dtype, *matrices.values()) else",
            "Access.ALIGNED if are_aligned(dtype, gate) else",
            "tests/cpu/test_fake_gpu_gated.py::test_one_matrix_is_not_aligned[dy]",
        ),
    },
    "lt_runtime/ops/gated.py": {
        "backward draws another mask": (
            "options, (ctx.rng, None)",
            "options, (Philox(ctx.rng.seed + 1) if ctx.rng else None, None)",
            "tests/cpu/ops/test_gated.py::test_the_step_may_advance_in_place",
        ),
    },
    "lt_runtime/ops/_gated.py": {
        "a call without elements is launched": (
            "Request(None if is_empty else problem, written",
            "Request(problem, written",
            "tests/cpu/test_fake_gpu_gated.py::test_nothing_is_launched_for_no_elements",
        ),
        "a gradient over h is refused": (
            ", same=((1, 2),)",
            "",
            "tests/cpu/test_fake_gpu_gated.py::test_same_buffers_with_other_contents[flat-in place]",
        ),
    },
    "cuda_src/transpose.cuh": {
        "the transposed tile is read before it is written": (
            "    __syncthreads();\n    const uint32 row = block_row_ + row_;",
            "    const uint32 row = block_row_ + row_;",
            "tests/host_kernels/test_epilogue_bwd.py::test_backward[float32-gelu-dropout-aligned-preactivation-transposed]",
        ),
        "the transposed matrix's last rows are not written": (
            "if (exists_ && row < rows_)",
            "if (exists_ && row + kOctet <= rows_)",
            f"{_BACKWARD}[float32-gelu-dropout-scattered-preactivation-transposed]",
        ),
    },
    "cuda_src/column_sum.cuh": {
        "an accumulated bias gradient is overwritten": (
            "c.accumulate ? to_float(c.sum[col]) + sum : sum",
            "sum",
            f"{_BACKWARD}[float32-none-whole-aligned-nothing-dz]",
        ),
        "a column's parts beyond the fourth are lost": (
            "first < parts; first += kInFlight * step",
            "first < 4; first += kInFlight * step",
            f"{_BACKWARD}[float32-none-whole-aligned-nothing-sum]",
        ),
    },
    "cuda_src/reduce.cuh": {
        "the last block does not wait for the others": (
            "return arrived == blocks - 1;",
            "return arrived == 0;",
            f"{_BACKWARD}[float32-none-whole-aligned-nothing-sum]",
        ),
        "the ticket counts on from launch to launch": (
            "atomicInc(ticket, blocks - 1)",
            "atomicInc(ticket, 2 * blocks - 1)",
            "tests/host_kernels/test_gradient_norm.py::test_order_changes_no_bit",
        ),
    },
    "cuda_src/philox.cuh": {
        "a mask has nine rounds of Philox": (
            "for (int round = 0; round < kRounds; ++round) c = philox_round(",
            "for (int round = 0; round < kRounds - 1; ++round) c = philox_round(",
            f"{_DROPOUT}::test_masks_are_the_reference_s[float32-aligned]",
        ),
        "the step on the device is ignored": (
            "d.step_pointer ? *d.step_pointer : d.step",
            "d.step",
            "tests/host_kernels/test_dropout.py::test_masks_are_the_reference_s[float32-scattered]",
        ),
        "an element at the limit is dropped": (
            "octet.v[i] *= lane <= d.limit",
            "octet.v[i] *= lane < (d.limit & 0xFFFF0000)",
            "tests/host_kernels/test_dropout.py::test_masks_are_the_reference_s[float32-scattered]",
        ),
        "lanes are shifted by an even number only": (
            "if (lanes & 1) {",
            "if (lanes & 8) {",
            f"{_DROPOUT}::test_masks_are_the_reference_s[float32-scattered]",
        ),
    },
    "cuda_src/vector.cuh": {
        "scattered stores reach beyond the last column": (
            "if (i < count) p[i * stride] = from_float<T>(octet.v[i]);",
            "if (i <= count) p[i * stride] = from_float<T>(octet.v[i]);",
            f"{_FORWARD}[float32-relu-whole-scattered]",
        ),
        "a mask's first column is in the highest bit": (
            "bits >> i & 1",
            "bits >> (7 - i) & 1",
            f"{_BACKWARD}[float32-relu-whole-scattered-mask-dz]",
        ),
        "a part of an octet is stored as a whole one": (
            "if (m.col_stride == 1 && count == kOctet && reinterpret_cast<uint64>(p) % 16 == 0) {",
            "if (m.col_stride == 1 && reinterpret_cast<uint64>(p) % 16 == 0) {",
            f"{_MATMUL}[float32-float32-gelu]",
        ),
        "columns beyond 2^31 octets are cut": (
            "return cols - col < kOctet ? static_cast<int>(cols - col) : kOctet;",
            "return cols - col <= kOctet ? static_cast<int>(cols - col) - 1 : kOctet;",
            "tests/host_kernels/test_epilogue_fwd.py::test_forward[float32-none-whole-aligned]",
        ),
    },
    "cuda_src/resize.cu": {
        "a row's first element that is no whole octet is left out": (
            "store_part(element<SCALAR>(item.to, row, col), octet, col < 0 ? before : 0,",
            "store_part(element<SCALAR>(item.to, row, col), octet, col < 0 ? before + 1 : 0,",
            "tests/host_kernels/test_resize.py::test_copies[float32]",
        ),
        "a copy without gaps leaves out what goes on in the next row": (
            "store_octet(to, octets[0]);",
            "store_octet(to, octets[0] & mask);",
            "tests/host_kernels/test_resize.py::test_copies[bfloat16]",
        ),
        "a copy's odd elements are not shifted": (
            "const int bits = offset & 2 ? 16 : 0;",
            "const int bits = 0;",
            "tests/host_kernels/test_resize.py::test_copies[bfloat16]",
        ),
    },
    "cuda_src/matmul_epilogue.cu": {
        "a product's mask ignores the batch": (
            "p.mask.data[blockIdx.z * p.mask.batch_stride + row",
            "p.mask.data[row",
            f"{_MATMUL}[float32-float32-relu]",
        ),
        "the mask's bit of NaN is clear": (
            "!(z.v[i] <= 0.0f)",
            "z.v[i] > 0.0f",
            "tests/host_kernels/test_matmul_epilogue.py::test_the_mask_of_nan_is_set[float32-float32-relu]",
        ),
        "a mask along rows is read along columns": (
            "line = mask.along_rows ? col : row",
            "line = mask.along_rows ? row : row",
            f"{_MATMUL}[float32-float32-relu]",
        ),
    },
    "cuda_src/sweep.cuh": {
        "a grid's rows all begin at the first block's": (
            "row(blockIdx.y * blockDim.y + threadIdx.y)",
            "row(threadIdx.y)",
            f"{_FORWARD}[float32-none-whole-aligned]",
        ),
        "the last octet of a flat matrix is whole": (
            "return kFlat && is_last_row && last < kOctet;",
            "return kFlat && is_last_row && last < 1;",
            f"{_BACKWARD}[bfloat16-none-whole-flat-nothing-sum]",
        ),
        "the columns of a flat matrix's bias do not begin anew": (
            "col + i >= cols ? col + i - cols : col + i;",
            "col + i >= cols ? cols - 1 : col + i;",
            f"{_FORWARD}[float32-gelu-dropout-flat-kept]",
        ),
    },
    "cuda_src/flat_sum.cuh": {
        "what flat octets have of the next block's columns is lost": (
            "add(block - 1, flat.width);",
            "",
            f"{_BACKWARD}[bfloat16-gelu-whole-flat-preactivation-dz]",
        ),
        "a flat block's columns are summed up before all blocks have left theirs": (
            "return block == 0 && blocks > 2 && last < kOctet ? 3 : 2;",
            "return block == 0 && blocks > 2 && last < 1 ? 3 : 2;",
            f"{_BACKWARD}[bfloat16-gelu-whole-flat-preactivation-dz]",
        ),
    },
    "cuda_src/instructions.cuh": {
        "2^x by the special function unit is x": (
            'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));',
            "y = x;",
            "tests/gpu/test_strategies.py::test_every_strategy",
        ),
    },
}
