"""Faults of AdamW's update, of its random numbers, and of the gradients' norm."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Table

_ADAMW: Final = "tests/host_kernels/test_adamw.py"
_RULES: Final = "tests/host_kernels/test_adamw_launches.py::test_does_what_the_numpy_state_does"
_FP8: Final = "tests/host_kernels/test_adamw_fp8.py"
_EMA: Final = "tests/host_kernels/test_ema.py::test_averages"
_NORM: Final = "tests/host_kernels/test_gradient_norm.py"

FAULTS: Final[Table] = {
    "cuda_src/optimizer.cuh": {
        "AMSGrad loses a NaN": (
            "if (!(x.v_max > x.v)) x.v_max = x.v;",
            "x.v_max = fmaxf(x.v_max, x.v);",
            "tests/host_kernels/test_adamw.py::test_nan_as_a_gpu_makes_it_survives_rounding",
        ),
        "Lion's moment decays as the average whose sign is taken": (
            "x.m = p.beta2 * x.m + p.one_minus_beta2 * g;\n  }",
            "x.m = p.beta1 * x.m + p.one_minus_beta1 * g;\n  }",
            f"{_RULES}[DType.FLOAT32-DType.FLOAT32-Lion]",
        ),
        "Nesterov's form is plain momentum": (
            "p.nesterov ? p.beta1 * x.m + g : x.m",
            "x.m",
            f"{_RULES}[DType.FLOAT32-DType.FLOAT32-three rules]",
        ),
        "after its end a table begins again": (
            "t < s.total_steps ? t : s.total_steps",
            "t < s.total_steps ? t : 1",
            f"{_RULES}[DType.FLOAT32-DType.FLOAT32-Lion]",
        ),
        "the step is counted from zero": (
            "const uint32 t = now.steps + 1;",
            "const uint32 t = now.steps;",
            f"{_ADAMW}::test_updates[float32]",
        ),
    },
    "cuda_src/optimizer.cu": {
        "a bad gradient is remembered for good": (
            "  p.state->nonfinite = 0;\n",
            "",
            f"{_ADAMW}::test_scaling_clipping_and_skipping",
        ),
        "the scale grows one update late": (
            "successes == p.growth_interval",
            "successes > p.growth_interval",
            "tests/host_kernels/test_adamw.py::test_scaling_clipping_and_skipping",
        ),
        "the scale grows to infinity": (
            "if (grows && now.scale * p.growth_factor <= 3.40282347e38f)",
            "if (grows)",
            "tests/host_kernels/test_adamw.py::test_a_scale_stays_a_normal_number[1.7014118346046923e+38-0.0]",
        ),
        "all chunks of a tensor draw the same random numbers": (
            "chunk.octet + start / kOctet + threadIdx.x",
            "start / kOctet + threadIdx.x",
            f"{_ADAMW}::test_random_numbers_of_tensors_over_two_thousand_million_elements[268435456]",
        ),
        "all blocks of a chunk update its first elements": (
            "quads_of_thread(own_chunk.count, own_chunk.aligned, start)",
            "quads_of_thread(own_chunk.count, own_chunk.aligned)",
            f"{_ADAMW}::test_updates[float32]",
        ),
        "the last block of each counter advances the step": (
            "return atomicInc(&p.state->update_ticket, last) == last;",
            "return atomicInc(&p.state->update_ticket, last) <= last;",
            f"{_ADAMW}::test_updates[float32]",
        ),
        "a counter is not zero for the next update": (
            "kCounterDistance, last_of_counter());",
            "kCounterDistance, gridDim.x);",
            f"{_ADAMW}::test_updates[float32]",
        ),
    },
    "cuda_src/optimizer_fp8.cu": {
        "the copy is cast before the weight is rounded": (
            "return store_value(chunk, at, random, result.value);",
            "store_value(chunk, at, random, result.value);\n  return result.value;",
            f"{_FP8}::test_updates[float32-False]",
        ),
        "a skipped step leaves the largest magnitude at zero": (
            "if (step.skipped) return of_parameter(chunk, unpack(old.value, value_type(chunk)));",
            "if (step.skipped) return Octet{};",
            f"{_FP8}::test_a_skipped_step_casts_the_present_weights",
        ),
        "every row of a tile draws the first row's random bits": (
            "chunk.octet + start / kOctet + lane",
            "chunk.octet + lane",
            f"{_FP8}::test_updates[bfloat16-False]",
        ),
        "the last run of a column is lost": (
            "run * kRun >= tile.rows",
            "(run + 1) * kRun >= tile.rows",
            f"{_FP8}::test_updates[float32-False]",
        ),
    },
    "cuda_src/rounding.cuh": {
        "stochastic rounding drops the upper bits of the octet": (
            "static_cast<uint32>(octet >> 32), kRoundingCalls",
            "0u, kRoundingCalls",
            f"{_ADAMW}::test_random_numbers_of_tensors_over_two_thousand_million_elements[1099511627776]",
        ),
        "stochastic rounding turns NaN into infinity": (
            "return x != x ? 0x7FFFu : (bit_cast",
            "return (bit_cast",
            f"{_ADAMW}::test_nan_as_a_gpu_makes_it_survives_rounding",
        ),
        "stochastic rounding always rounds toward zero": (
            "(bit_cast<uint32>(x) + lane) >> 16",
            "(bit_cast<uint32>(x) + 0 * lane) >> 16",
            f"{_ADAMW}::test_updates[bfloat16]",
        ),
        "the upper half of the seed is lost": (
            "static_cast<uint32>(seed >> 32));",
            "0u);",
            f"{_ADAMW}::test_random_numbers_of_tensors_over_two_thousand_million_elements[268435456]",
        ),
    },
    "cuda_src/quads.cuh": {
        "a warp's second quads lie beside the first": (
            "return first + k / 4 * kQuadDistance + k % 4;",
            "return first + k;",
            f"{_ADAMW}::test_alignment_changes_no_bit[float32]",
        ),
        "a tile's last elements are loaded in whole quads": (
            "aligned && first + kQuadDistance + 4 <= count",
            "aligned && first < count",
            f"{_ADAMW}::test_updates[float32]",
        ),
    },
    "cuda_src/gradient_norm.cu": {
        "partial norms beyond 2,048 chunks lost": (
            "for (uint32 first = threadIdx.x; first < gridDim.x; first += kInFlight * kThreads) {",
            "for (uint32 first = threadIdx.x; first < kThreads; first += kInFlight * kThreads) {",
            f"{_NORM}::test_more_chunks_than_a_block_adds_up_at_once",
        ),
        "a norm's long sum loses what rounding cuts off": (
            "return fabsf(sum) <= kLargest ? sum + error : sum;",
            "return sum;",
            f"{_NORM}::test_a_long_sum_keeps_its_precision",
        ),
        "the largest number is taken for infinity": (
            "finite = finite && fabsf(x) <= kLargest;",
            "finite = finite && fabsf(x) < kLargest;",
            f"{_NORM}::test_the_largest_numbers_are_finite",
        ),
        "an overflown square is taken for a bad gradient": (
            "finite = finite && fabsf(x) <=",
            "finite = finite && x * x <=",
            "tests/host_kernels/test_gradient_norm.py::test_an_overflown_sum_is_not_a_bad_element[0]",
        ),
        "the elements after the last packet are left out": (
            "i < chunk.count; i += kThreads) {",
            "i + 1 < chunk.count; i += kThreads) {",
            f"{_NORM}::test_norms",
        ),
    },
    "cuda_src/ema.cu": {
        "averages take every value for FP32": ("unpack(value, chunk.type)", "unpack(value, kFloat32)", _EMA),
        "an average that equals its value changes": (
            "average.v[k] += p.weight * (now.v[k] - average.v[k]);",
            "average.v[k] = (1.0f - p.weight) * average.v[k] + p.weight * now.v[k];",
            _EMA,
        ),
        "every chunk is taken for aligned": ("chunk.count, chunk.aligned)", "chunk.count, true)", _EMA),
    },
}
