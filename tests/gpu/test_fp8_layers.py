"""Linear layers with FP8 products on the GPU, against NumPy arrays and against replays of a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.ops.fp8 import gradients
from tests.support.float8_products import host_of, placed
from tests.support.fp8_layers import BF16, CASES, Fp8Case, Fp8Layer, GatedLayers, K, M, N, decibels

pytestmark = pytest.mark.usefixtures("fp8_products")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_as_on_numpy_arrays(gpu: Any, case: Fp8Case) -> None:
    on_host, on_gpu = Fp8Layer(case, lt), Fp8Layer(case, lt, gpu)
    for number, scale in enumerate((1.0, 4.0, 16.0)):
        wanted, found = on_host.step(number, scale), on_gpu.step(number, scale)
        for name in ("slots", "history"):
            np.testing.assert_allclose(found.pop(name), wanted.pop(name), rtol=2.0**-6)
        for name, values in wanted.items():
            assert decibels(found[name], values) > 36.0, (number, name)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_gradients_of_a_gate_are_cast_for_two_layers(gpu: Any, dropout: float) -> None:
    """All bits are those of gradients in BF16 that each layer casts."""
    layers = GatedLayers(lt, gradients, dropout, gpu)
    for step in range(3):
        found, expected = layers.step(step)
        assert found in (None, expected)
    assert found is not None


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_graph_of_a_step_replays_as_eager_steps(gpu: Any, recipe: Any) -> None:
    """Ten replays of forward, backward and update, with x growing, equal ten eager steps bit for bit."""
    generator = np.random.default_rng(3)
    inputs = [(2.0**step * generator.standard_normal((M, K))).astype(BF16) for step in range(10)]
    w = placed(gpu, (0.2 * generator.standard_normal((N, K))).astype(BF16))
    dy = placed(gpu, generator.standard_normal((M, N)).astype(BF16))
    x, y, z, dx, dw = (placed(gpu, np.zeros(each, BF16)) for each in ((M, K), (M, N), (M, N), (M, K), (N, K)))
    state, stream, contexts = lt.FP8State(lt.FP8(recipe=recipe)), gpu.stream, []

    def step() -> None:
        _, ctx = lt.linear_fwd(x, w, activation="silu", precision=state, out=y, out_z=z, stream=stream)
        lt.linear_bwd(dy, ctx, out_dx=dx, out_dw=dw, stream=stream)
        state.update(stream=stream)
        contexts.append(ctx)  # keeps the context alive, because the captured graph writes into its arrays

    def run(launch: Any) -> list[bytes]:
        made = []
        for values in inputs:
            gpu.cp.copyto(x.view(np.uint16), gpu.cp.asarray(values.view(np.uint16)))
            gpu.synchronize()
            launch()
            gpu.synchronize(stream.ptr)
            made.append(b"".join(host_of(gpu, each).tobytes() for each in (y, dx, dw, state.slots, state.history)))
        return made

    run(step)  # an eager run computes the first scales, and allocates the stream's memory
    start = state.state_dict()
    eager = run(step)
    contexts.clear()  # returns the contexts' memory to the pool, from which the capture takes it
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()
    state.load_state_dict(start)
    gpu.synchronize()
    assert run(lambda: graph.launch(stream)) == eager


@pytest.mark.parametrize("fast", ["forward", "always"])
@pytest.mark.parametrize("shape", [(16384, 512, 512), (512, 16384, 512), (512, 512, 16384)], ids=["dw", "dx", "y"])
def test_long_sums_are_as_accurate_as_the_types(gpu: Any, shape: tuple[int, int, int], fast: Any) -> None:
    """Against products of operands that are not in FP8: 27 dB for E4M3 alone, 23 dB for E4M3 with E5M2.

    One of the products sums 16384 terms, and a bias-like mean of x makes partial sums grow.
    """
    (m, n, k), generator = shape, np.random.default_rng(5)
    x = np.maximum(generator.standard_normal((m, k), np.float32), 0).astype(BF16)
    w, dy = (generator.standard_normal(each, np.float32).astype(BF16) for each in ((n, k), (m, n)))
    state = lt.FP8State(lt.FP8(fast_accumulation=fast))
    y, ctx = lt.linear_fwd(placed(gpu, x), placed(gpu, w), precision=state)
    dx, dw, _ = lt.linear_bwd(placed(gpu, dy), ctx)
    gpu.synchronize()
    on_x, on_w, on_dy = (each.astype(np.float64) for each in (x, w, dy))
    for found, wanted, least in ((y, on_x @ on_w.T, 27), (dx, on_dy @ on_w, 23), (dw, on_dy.T @ on_x, 23)):
        assert decibels(host_of(gpu, found).astype(np.float64), wanted) >= least
