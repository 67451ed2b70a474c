"""Faults of the loss kernels and of their sums."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_LOSS: Final = "tests/host_kernels/test_loss.py"
_SUMMED: Final = "tests/cpu/test_fake_gpu_summed_loss.py"
_TALLY: Final = "tests/host_kernels/test_tally.py"
_CHUNKS: Final = "tests/host_kernels/test_class_chunk.py::test_chunks_are_the_cross_entropy_of_all_classes"

FAULTS: Final[Table] = {
    "cuda_src/losses.cuh": {
        "NaN has Huber's largest slope": (
            "difference > delta ? delta : difference < -delta ? -delta : difference",
            "difference > delta ? delta : -delta",
            f"{_LOSS}::test_nan_stays_nan[huber]",
        ),
        "the gradient of a likely positive target is a difference of nearly equal numbers": (
            "large * fmaf(-right, e, wrong)",
            "large * wrong - right * (1.0f - large)",
            f"{_LOSS}::test_logits_of_any_size_have_an_exact_gradient[1.0-20.0]",
        ),
        "the binary loss of large logits overflows": (
            "exp2_approx(-kLog2E * fabsf(z))",
            "exp2_approx(-kLog2E * z)",
            f"{_LOSS}::test_logits_of_any_size_have_an_exact_gradient[0.0--200.0]",
        ),
    },
    "cuda_src/elementwise_loss.cu": {
        "places behind the last element have a loss": (
            "if (!LOSS::kZeroAtZero && i >= count) terms[i].value = 0.0f;",
            "if (!LOSS::kZeroAtZero && i > count) terms[i].value = 0.0f;",
            f"{_LOSS}::test_means_over_elements[bce_with_logits-DType.FLOAT32]",
        ),
        "matrices with gaps are taken for whole ones": (
            "p.rows == 1 && in_one_row % kOctet == 0 && contiguous",
            "in_one_row % kOctet == 0 && contiguous",
            f"{_LOSS}::test_means_over_elements[mse-DType.FLOAT32]",
        ),
        "an octet over two rows has the first one's weight": (
            "const int64 in_one_row = WEIGHTED ? p.width : p.cols;",
            "const int64 in_one_row = p.cols;",
            f"{_LOSS}::test_means_over_elements[mse-DType.FLOAT32]",
        ),
        "a misaligned target is taken for an aligned one": (
            "reinterpret_cast<uint64>(p.prediction.data) | reinterpret_cast<uint64>(p.target.data) |",
            "reinterpret_cast<uint64>(p.prediction.data) |",
            f"{_LOSS}::test_means_over_elements[mse-DType.FLOAT32]",
        ),
        "a misaligned gradient is taken for an aligned one": (
            "reinterpret_cast<uint64>(p.gradient.data) |",
            "",
            f"{_LOSS}::test_means_over_elements[mse-DType.FLOAT32]",
        ),
        "a misaligned pos_weight is taken for an aligned one": (
            "| reinterpret_cast<uint64>(p.pos_weight);",
            ";",
            f"{_LOSS}::test_means_over_elements[bce_with_logits-DType.FLOAT32]",
        ),
    },
    "cuda_src/loss_mean.cuh": {
        "the mean of the losses has the counter of the first columns' sums": (
            "tickets + (gridDim.y > 1 ? gridDim.x : 0)",
            "tickets",
            f"{_LOSS}::test_sums_of_the_gradient[mse-DType.FLOAT32]",
        ),
    },
    "lt_runtime/nn/linear.py": {
        "every layer believes that the loss has made its bias gradient": (
            "own, run.has_db = None if run.has_db else layers[-1].bias, False",
            "own = None if run.has_db else layers[-1].bias",
            f"{_SUMMED}::test_gradients[a tied layer]",
        ),
    },
    "cuda_src/loss_fp8.cu": {
        "the gradient is cast before it is rounded to BF16": (
            "gradient = unpack(rounded);",
            "",
            f"{_LOSS}::test_gradients_in_fp8[shape1-mse-1-float8_e5m2]",
        ),
        "threads beyond the last column add up losses": (
            "own_rows = col < p.fp8.cols ? rows : 0",
            "own_rows = rows",
            f"{_LOSS}::test_gradients_in_fp8[shape1-mse-1-float8_e5m2]",
        ),
    },
    "lt_runtime/training/body.py": {
        "a residual adds a gradient in FP8": (
            "return last if last is not None and (last.scales is not None) == in_fp8 else None",
            "return last",
            f"{_SUMMED}::test_gradients_in_fp8[residual]",
        ),
        "the loss makes the bias gradient of a layer with an activation": (
            "block.activation != Activation() or block.dropout",
            "block.dropout",
            f"{_SUMMED}::test_gradients[an activation]",
        ),
    },
    "cuda_src/stream_rows.cuh": {
        "streamed rows have no weight in the loss": (
            "return kWeighted ? weight * target.loss(softmax) : target.loss(softmax);",
            "return target.loss(softmax);",
            f"{_LOSS}::test_weights_of_many_rows_and_classes[(3, 3072)-0.0-rows]",
        ),
        "a block forgets which row is its next": (
            "kBlockRows ? *place : index",
            "index",
            f"{_LOSS}::test_a_block_goes_from_row_to_row[3001-DType.FLOAT32]",
        ),
        "a long row's packets without room are those with room": (
            "Batch(from + batch * kBatchStride, count), batch",
            "Batch(from + (batch - batches.fetched) * kBatchStride, count), batch",
            f"{_LOSS}::test_long_rows[of one batch-DType.FLOAT32]",
        ),
        "a long row is written where it was read last": (
            "Batch(from + at, count).write(",
            "Batch(from, count).write(",
            f"{_LOSS}::test_long_rows[of one batch-DType.FLOAT32]",
        ),
        "a row's single last elements are left out": (
            "if (single < p.cols) accumulate(softmax, p, to_float(row.logits[single]), single);",
            "",
            "tests/host_kernels/test_loss.py::test_uniform_logits_cost_the_logarithm_of_their_number[3001-place1]",
        ),
    },
    "cuda_src/cross_entropy.cuh": {
        "an ignored row's weight counts": (
            "if (ignores && label == ignored) return 0.0f;",
            "if (ignores && label == ignored && !class_weights) return 0.0f;",
            f"{_LOSS}::test_weights_of_many_rows_and_classes[(1030, 17)-0.0-classes]",
        ),
        "two ignored labels in a thread's four count": (
            "if (row < rows) count += of(label_at(labels, wide, row));",
            "if (row < rows) count += k > 1 ? 1.0f : of(label_at(labels, wide, row));",
            "tests/host_kernels/test_loss.py::test_the_ignored_are_counted[1024-17]",
        ),
        "logits and gradient need not be aligned alike": (
            "if (!alike || p.logits.col_stride != 1",
            "if ((alike && p.rows == 0) || p.logits.col_stride != 1",
            f"{_LOSS}::test_cross_entropy[DType.FLOAT32]",
        ),
        "the elements before the first packet are one too few": (
            "single < head ? single : single + packet_cols()",
            "single < head ? single + 1 : single + packet_cols()",
            f"{_LOSS}::test_many_classes[DType.FLOAT32-30000-1-held]",
        ),
        "the upper half of a BF16 pair has the lower one's bits": (
            "i == 0 ? word << 16 : word & 0xFFFF0000",
            "i == 0 ? word << 16 : word",
            f"{_LOSS}::test_cross_entropy[DType.BFLOAT16]",
        ),
    },
    "cuda_src/reduce.cuh": {
        "a block's sum leaves out its last warp": (
            "lane < blockDim.x / kWarp ? scratch[lane] : 0.0f",
            "lane + 1 < blockDim.x / kWarp ? scratch[lane] : 0.0f",
            f"{_LOSS}::test_means_over_elements[mse-DType.FLOAT32]",
        ),
        "parts beyond a block's threads are lost": (
            "first < count; first += kInFlight * blockDim.x) {",
            "first < blockDim.x; first += kInFlight * blockDim.x) {",
            f"{_LOSS}::test_more_rows_than_a_block_adds_up_at_once",
        ),
    },
    "cuda_src/softmax_rows.cuh": {
        "the maximum is not subtracted": (
            "if (!(to > max)) return;",
            "if (!(to > max) || to == to) return;",
            f"{_LOSS}::test_logits_of_any_size[DType.FLOAT32-40-1-0.0]",
        ),
        "columns of -infinity make a row NaN": (
            "return max == -CUDART_INF_F ? 0.0f : max;",
            "return max;",
            "tests/host_kernels/test_loss.py::test_logits_that_are_not_finite[300-col4--inf-0.0]",
        ),
        "a label beyond the classes is no error": (
            "valid(label_ >= 0 && label_ < p.cols),",
            "valid(label_ >= 0 && label_ <= p.cols),",
            "tests/host_kernels/test_loss.py::test_labels_just_out_of_range[0-2056]",
        ),
        "one warp's softmax is every warp's": (
            "of_warp[threadIdx.x % kWarps]",
            "of_warp[0 * threadIdx.x]",
            f"{_LOSS}::test_maxima_of_threads_that_differ_a_little[3000]",
        ),
    },
    "cuda_src/cross_entropy.cu": {
        "rows that blocks have taken are not given back": (
            "if (threadIdx.x == 0) *p.claimed = 0;",
            "",
            "tests/host_kernels/test_loss.py::test_a_block_goes_from_row_to_row[3000-DType.FLOAT32]",
        ),
    },
    "cuda_src/few_classes.cuh": {
        "an odd number of classes is read in pairs": (
            "(m.row_stride | cols) % 2 == 0",
            "(m.row_stride | 2 * cols) % 2 == 0",
            "tests/host_kernels/test_loss.py::test_few_classes[DType.FLOAT32]",
        ),
    },
    "cuda_src/class_chunk.cu": {
        "a chunk's labels are not counted from its first class": (
            "const int64 label = label_at(p.labels, p.wide_labels, row) - p.first;",
            "const int64 label = label_at(p.labels, p.wide_labels, row);",
            f"{_CHUNKS}[DType.BFLOAT16]",
        ),
        "a chunk without a finite logit makes the sum NaN": (
            "const float base = max == -CUDART_INF_F ? 0.0f : max;",
            "const float base = max;",
            f"{_CHUNKS}[DType.FLOAT32]",
        ),
        "the larger sum is added to itself": (
            "log1pf(expf(low - high))",
            "log1pf(expf(high - high))",
            f"{_CHUNKS}[DType.FLOAT32]",
        ),
    },
    "cuda_src/instructions.cuh": {
        "shared memory is read before the copies have arrived": (
            'asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");',
            "",
            "tests/gpu/test_loss.py::test_many_rows",
        ),
    },
    "cuda_src/tally.cuh": {
        "wide labels are read as narrow ones": (
            "return wide ? static_cast<const int64*>(labels)[row]",
            "return wide && row < 0 ? static_cast<const int64*>(labels)[row]",
            "tests/host_kernels/test_loss.py::test_labels_far_out_of_range[7-apart-2147483647]",
        ),
        "the part that rounding has cut off is forgotten": (
            "state.rest = (sum - state.loss) - term;",
            "state.rest = 0.0f;",
            f"{_TALLY}::test_a_long_sum_keeps_its_precision",
        ),
    },
}
