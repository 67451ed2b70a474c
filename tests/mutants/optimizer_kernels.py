"""Faults of AdamW's update, of its random numbers, and of the gradients' norm."""

from __future__ import annotations

from typing import Final

from tests.mutants.fault import Fault, fault

_ADAMW: Final = "tests/host_kernels/test_adamw.py"
_EMA: Final = "tests/host_kernels/test_ema.py::test_averages"
_NORM: Final = "tests/host_kernels/test_gradient_norm.py"

FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "AMSGrad loses a NaN",
        "cuda_src/adamw.cu",
        "AMSGRAD && out.v_max.v[k] > v ? out.v_max.v[k] : v",
        "AMSGRAD ? fmaxf(out.v_max.v[k], v) : v",
        "tests/host_kernels/test_adamw.py::test_nan_as_a_gpu_makes_it_survives_rounding",
    ),
    fault(
        "the step is counted from zero",
        "cuda_src/adamw.cu",
        "const uint32 t = now.steps + 1;",
        "const uint32 t = now.steps;",
        f"{_ADAMW}::test_updates[float32]",
    ),
    fault(
        "a bad gradient is remembered for good",
        "cuda_src/adamw.cu",
        "  p.state->nonfinite = 0;\n",
        "",
        f"{_ADAMW}::test_scaling_clipping_and_skipping",
    ),
    fault(
        "the scale grows one update late",
        "cuda_src/adamw.cu",
        "successes == p.growth_interval",
        "successes > p.growth_interval",
        "tests/host_kernels/test_adamw.py::test_scaling_clipping_and_skipping",
    ),
    fault(
        "the scale grows to infinity",
        "cuda_src/adamw.cu",
        "if (grows && now.scale * p.growth_factor <= 3.40282347e38f)",
        "if (grows)",
        "tests/host_kernels/test_adamw.py::test_a_scale_stays_a_normal_number[1.7014118346046923e+38-0.0]",
    ),
    fault(
        "all chunks of a tensor draw the same random numbers",
        "cuda_src/adamw.cu",
        "chunk.octet + start / kOctet + threadIdx.x",
        "start / kOctet + threadIdx.x",
        "tests/host_kernels/test_adamw.py"
        "::test_random_numbers_of_tensors_over_two_thousand_million_elements[268435456]",
    ),
    fault(
        "all blocks of a chunk update its first elements",
        "cuda_src/adamw.cu",
        "quads_of_thread(own_chunk.count, own_chunk.aligned, start)",
        "quads_of_thread(own_chunk.count, own_chunk.aligned)",
        f"{_ADAMW}::test_updates[float32]",
    ),
    fault(
        "the last block of each counter advances the step",
        "cuda_src/adamw.cu",
        "return atomicInc(&p.state->update_ticket, last) == last;",
        "return atomicInc(&p.state->update_ticket, last) <= last;",
        f"{_ADAMW}::test_updates[float32]",
    ),
    fault(
        "a counter is not zero for the next update",
        "cuda_src/adamw.cu",
        "kCounterDistance, last_of_counter());",
        "kCounterDistance, gridDim.x);",
        f"{_ADAMW}::test_updates[float32]",
    ),
    fault(
        "stochastic rounding drops the upper bits of the octet",
        "cuda_src/rounding.cuh",
        "static_cast<uint32>(octet >> 32), kRoundingCalls",
        "0u, kRoundingCalls",
        f"{_ADAMW}::test_random_numbers_of_tensors_over_two_thousand_million_elements[1099511627776]",
    ),
    fault(
        "stochastic rounding turns NaN into infinity",
        "cuda_src/rounding.cuh",
        "return x != x ? 0x7FFFu : (bit_cast",
        "return (bit_cast",
        f"{_ADAMW}::test_nan_as_a_gpu_makes_it_survives_rounding",
    ),
    fault(
        "stochastic rounding always rounds toward zero",
        "cuda_src/rounding.cuh",
        "(bit_cast<uint32>(x) + lane) >> 16",
        "(bit_cast<uint32>(x) + 0 * lane) >> 16",
        f"{_ADAMW}::test_updates[bfloat16]",
    ),
    fault(
        "the upper half of the seed is lost",
        "cuda_src/rounding.cuh",
        "static_cast<uint32>(seed >> 32));",
        "0u);",
        f"{_ADAMW}::test_random_numbers_of_tensors_over_two_thousand_million_elements[268435456]",
    ),
    fault(
        "a warp's second quads lie beside the first",
        "cuda_src/quads.cuh",
        "return first + k / 4 * kQuadDistance + k % 4;",
        "return first + k;",
        f"{_ADAMW}::test_alignment_changes_no_bit[float32]",
    ),
    fault(
        "a tile's last elements are loaded in whole quads",
        "cuda_src/quads.cuh",
        "aligned && first + kQuadDistance + 4 <= count",
        "aligned && first < count",
        f"{_ADAMW}::test_updates[float32]",
    ),
    fault(
        "partial norms beyond 2,048 chunks lost",
        "cuda_src/gradient_norm.cu",
        "for (uint32 first = threadIdx.x; first < gridDim.x; first += kInFlight * kThreads) {",
        "for (uint32 first = threadIdx.x; first < kThreads; first += kInFlight * kThreads) {",
        f"{_NORM}::test_more_chunks_than_a_block_adds_up_at_once",
    ),
    fault(
        "a norm's long sum loses what rounding cuts off",
        "cuda_src/gradient_norm.cu",
        "return fabsf(sum) <= kLargest ? sum + error : sum;",
        "return sum;",
        f"{_NORM}::test_a_long_sum_keeps_its_precision",
    ),
    fault(
        "the largest number is taken for infinity",
        "cuda_src/gradient_norm.cu",
        "finite = finite && fabsf(x) <= kLargest;",
        "finite = finite && fabsf(x) < kLargest;",
        f"{_NORM}::test_the_largest_numbers_are_finite",
    ),
    fault(
        "an overflown square is taken for a bad gradient",
        "cuda_src/gradient_norm.cu",
        "finite = finite && fabsf(x) <=",
        "finite = finite && x * x <=",
        "tests/host_kernels/test_gradient_norm.py::test_an_overflown_sum_is_not_a_bad_element[0]",
    ),
    fault(
        "the elements after the last packet are left out",
        "cuda_src/gradient_norm.cu",
        "i < chunk.count; i += kThreads) {",
        "i + 1 < chunk.count; i += kThreads) {",
        f"{_NORM}::test_norms",
    ),
    fault(
        "averages take every value for FP32",
        "cuda_src/ema.cu",
        "unpack(value, chunk.type)",
        "unpack(value, kFloat32)",
        _EMA,
    ),
)
