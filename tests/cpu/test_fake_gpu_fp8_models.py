"""Models with FP8 products: gradients against the model's own type, and training steps, eager and as graphs."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from tests.support.fake_gpu import FakeGpu
from tests.support.fp8_layers import BF16, decibels

DIMS = [32, 64, 48, 10]  # the last layer stays in the model's type, because its size is no multiple of 16
ROWS = 32


def batches(count: int) -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(1)
    inputs = generator.standard_normal((count, ROWS, DIMS[0])).astype(BF16)
    return [(x, generator.integers(0, DIMS[-1], ROWS).astype(np.int32)) for x in inputs]


def gradients(precision: Any, **options: Any) -> list[np.ndarray[Any, Any]]:
    model = lt.MLP(DIMS, "gelu", dtype="bfloat16", seed=4, device="cpu", precision=precision, **options)
    (x, labels), *_ = batches(1)
    y, contexts = model.forward(x, 0)
    gradient = lt.cross_entropy(y, labels).gradient
    dx = model.backward(gradient, contexts, need_dx=True)
    return [dx, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("precision", ["fp8", lt.FP8(recipe="current", gradients="e4m3")])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.25}, {"bias": [True, False, True]}])
def test_gradients(precision: Any, options: Any) -> None:
    for found, wanted in zip(gradients(precision, **options), gradients(None, **options), strict=True):
        assert decibels(found.astype(np.float64), wanted.astype(np.float64)) > 18.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("recipe", "activation"), [("delayed", "gelu"), ("current", "gelu"), ("rowwise", "gelu"), ("delayed", "none")]
)
def test_a_chain_computes_what_its_layers_compute_one_by_one(
    gpu: FakeGpu, device: str, recipe: Any, activation: str
) -> None:
    """A model equals its layers run one by one, but does not round a hidden output to BF16 before the cast to FP8."""
    precision = gpu.lt.FP8(recipe=recipe)
    model = gpu.lt.MLP(
        [32, 64, 48, 32], activation, dropout=0.25, dtype="bfloat16", seed=4, device=device, precision=precision
    )
    states = [gpu.lt.FP8State(precision) for _ in model.layers]

    def one_by_one(layers: Any, x: Any, dy: Any, step: int) -> tuple[Any, Any, list[Any]]:
        """Runs consecutive layers one by one; returns y, dx and the gradients of the parameters."""
        (number, layer), *others = layers
        w, bias = (model.device.to_host(each.data) for each in (layer.weight, layer.bias))
        options = {"dropout": layer.dropout, "rng": gpu.lt.Philox(4, number, step), "precision": states[number]}
        y, ctx = gpu.lt.linear_fwd(x, w, bias, activation=layer.activation, **options)
        last, dy, above = one_by_one(others, y, dy, step) if others else (y, dy, [])
        dx, dw, db = gpu.lt.linear_bwd(dy, ctx)
        states[number].update()
        return last, dx, [dw, db, *above]

    for step, (x, _) in enumerate(batches(2)):
        x = x.reshape(2, ROWS // 2, -1)
        dy = x[..., ::-1].copy()
        last, first, gradients = one_by_one([*enumerate(model.layers)], x, dy, step)
        y, contexts = model.forward(model.device.asarray(x), step)
        dx = model.backward(model.device.asarray(dy), contexts, need_dx=True)
        for layer in model.layers:
            layer.scales.update()
        gpu.synchronize_all()
        found = [model.device.to_host(each) for each in (y, dx, *(each.grad for each in model.parameters()))]
        for ours, theirs in zip(found, (last, first, *gradients), strict=True):
            # More than 27 dB: only a few of the FP8 numbers differ.
            assert decibels(ours.astype(np.float64), theirs.astype(np.float64)) > 27.0
    scales = [[each.scales for each in owners] for owners in (states, [layer.scales for layer in model.layers])]
    assert scales[0] == scales[1]


PASSES = {
    "delayed": ("bfloat16", "delayed", ["cast_fp8"] * 4 + ["epilogue_fwd"]),
    "current": ("bfloat16", "current", ["cast_fp8", "fp8_scales", "cast_fp8"] * 4 + ["epilogue_fwd"]),
    "rowwise": ("bfloat16", "rowwise", [*["cast_fp8"] * 4, "epilogue_fwd"] * 2),
    "float16": ("float16", "delayed", ["cast_fp8", "cast_fp8", "epilogue_fwd"] * 2),
}


@pytest.mark.parametrize(("dtype", "recipe", "passes"), PASSES.values(), ids=PASSES)
def test_passes_of_forward(gpu: FakeGpu, dtype: str, recipe: Any, passes: list[str]) -> None:
    """In BF16 the kernel that casts the next layer's x applies the activation, if that x has one FP8 scale."""
    model = gpu.lt.MLP(DIMS, "gelu", dropout=0.25, dtype=dtype, device="cuda", precision=gpu.lt.FP8(recipe=recipe))
    x = model.device.asarray(batches(1)[0][0].astype(model.dtype.numpy))
    for step in range(2):
        gpu.kernels.launched.clear()
        model.forward(x, step)
        gpu.synchronize_all()  # The pretended GPU runs launches only when it is waited for.
    assert gpu.kernels.launched == [*passes, "narrow_n"]  # The kernel narrow_n computes the last layer's product.


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gate_and_up_projection_share_a_cast(gpu: FakeGpu, device: str) -> None:
    x, found = batches(1)[0][0], []
    for precision in (None, gpu.lt.FP8()):
        block = gpu.lt.SwiGLU(32, 48, dtype="bfloat16", seed=4, device=device, precision=precision)
        run, placed = gpu.lt.Pass(), block.device.asarray(x)
        gpu.kernels.launched.clear()
        y = block.forward(placed, run)
        gpu.synchronize_all()
        forward = [each for each in gpu.kernels.launched if each == "cast_fp8"]
        dx = block.backward(block.device.asarray(x), run)
        gpu.synchronize_all()
        found.append([block.device.to_host(each) for each in (y, dx, *(each.grad for each in block.parameters()))])
    # Each of x, the gated values and both weights is read for its scale, and then cast.
    assert len(forward) == 8 * (device == "cuda")
    for wanted, ours in zip(*found, strict=True):
        assert decibels(ours.astype(np.float64), wanted.astype(np.float64)) > 18.0


_CURRENT = ["cast_fp8", "fp8_scales", "cast_fp8"]
GATES = {
    "delayed": ({}, "delayed", ["cast_fp8"] * 4, ["cast_fp8"] * 2),
    "dropout": ({"dropout": 0.25}, "delayed", ["cast_fp8"] * 4, ["cast_fp8"] * 2),
    "biases": ({"bias": True}, "delayed", ["cast_fp8"] * 4, ["cast_fp8", "gated_bwd", "cast_fp8"]),
    "current": ({}, "current", _CURRENT * 4, [*_CURRENT, "gated_bwd", *_CURRENT]),
    "rowwise": (
        {}, "rowwise", [*["cast_fp8"] * 4, "gated_fwd", *["cast_fp8"] * 4],
        [*["cast_fp8"] * 2, "gated_bwd", *["cast_fp8"] * 2],
    ),
    "float16": (
        {"dtype": "float16"}, "delayed", ["cast_fp8", "cast_fp8", "gated_fwd", "cast_fp8", "cast_fp8"],
        ["cast_fp8", "gated_bwd", "cast_fp8"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("options", "recipe", "forward", "backward"), GATES.values(), ids=GATES)
def test_a_gated_block_computes_what_its_parts_compute(
    gpu: FakeGpu, device: str, options: Any, recipe: Any, forward: list[str], backward: list[str]
) -> None:
    """In BF16 one kernel computes and casts the gated values, and one the gradients of gate and value."""
    options = {"dtype": "bfloat16", "seed": 4, "precision": gpu.lt.FP8(recipe=recipe), **options}
    block = gpu.lt.SwiGLU(32, 48, device=device, **options)
    states = [gpu.lt.FP8State(options["precision"]) for _ in range(2)]
    up, down = ([block.device.to_host(each.data) for each in layer.parameters()] for layer in (block.up, block.down))

    def by_parts(x: Any, dy: Any, step: int) -> list[Any]:
        """Runs the operations of the block on NumPy arrays; returns y, dx and the gradients of the parameters."""
        h, of_up = gpu.lt.linear_fwd(x, *up, precision=states[0])
        a, gate = gpu.lt.gated_fwd(h, dropout=block.dropout, rng=gpu.lt.Philox(4, 1, step))
        y, of_down = gpu.lt.linear_fwd(a, *down, precision=states[1])
        da, *of_second = gpu.lt.linear_bwd(dy, of_down)
        dx, *of_first = gpu.lt.linear_bwd(gpu.lt.gated_bwd(da, gate), of_up)
        return [y, dx, *of_first, *of_second]

    for step, (x, _) in enumerate(batches(3)):
        x = (2**step * x).astype(block.up.weight.data.dtype)
        dy, run, launched = x[:, ::-1].copy(), gpu.lt.Pass(step), []
        # A third call with the same addresses would become a graph, whose capture launches kernels once more.
        importlib.import_module("lt_runtime.plans.cache").repeats.clear()
        for way, given in ((block.forward, x), (block.backward, dy)):
            gpu.kernels.launched.clear()
            made = way(block.device.asarray(given), run)
            gpu.synchronize_all()
            launched.append((made, [*gpu.kernels.launched]))
        expected = [each for each in by_parts(x, dy, step) if each is not None]
        for each in (*states, block.up.scales, block.down.scales):
            each.update()
        gpu.synchronize_all()
        found = [*(each for each, _ in launched), *(each.grad for each in block.parameters())]
        for ours, theirs in zip(found, expected, strict=True):
            # More than 27 dB: only a few of the FP8 numbers differ.
            assert decibels(block.device.to_host(ours).astype(np.float64), theirs.astype(np.float64)) > 27.0
    if device == "cuda":
        assert [each for _, each in launched] == [forward, backward]
    scales = [[each.scales for each in owners] for owners in (states, (block.up.scales, block.down.scales))]
    assert scales[0] == scales[1]


def test_a_gated_block_that_recomputes_has_no_precision() -> None:
    with pytest.raises(lt.errors.ArgumentError, match="recompute is True, which excludes a precision"):
        lt.SwiGLU(32, 48, recompute=True, device="cpu", precision="fp8")


def test_frozen_layers_keep_no_operands(gpu: FakeGpu) -> None:
    """The first layer is frozen, so that the second needs no dx; of the third layer, only the weight is frozen."""
    model = gpu.lt.MLP([32] * 4, dtype="bfloat16", device="cuda", precision=gpu.lt.FP8())
    frozen, x = [*model.layers[0].parameters(), model.layers[2].weight], gpu.cp.asarray(batches(1)[0][0])
    run = gpu.lt.Pass(frozen=frozen, inputs=[x])
    model.backward(model.forward(x, run), run)
    gpu.synchronize_all()
    needs = [(layer.scales.needs_dx, layer.scales.needs_dw) for layer in model.layers]
    assert needs == [(False, False), (False, True), (True, False)]


def test_layers_say_how_they_are_computed() -> None:
    model = lt.MLP(DIMS, dtype="bfloat16", device="cpu", precision="fp8")
    assert "bfloat16, FP32 master copies, products in FP8" in repr(model)
    assert len({id(layer.scales) for layer in model.layers}) == 3
    assert lt.Linear(16, 16, device="cpu").scales is None
    assert lt.Linear(16, 16, device="cpu", precision=lt.FP8(history=4)).scales.recipe.history == 4


def train(
    gpu: FakeGpu, *, graph: bool, parts: int = 1, recipe: Any = "delayed", gated: bool = False, **options: Any
) -> list[bytes]:
    """Trains for five steps; returns the bytes of parameters, losses and FP8 scales after each step."""
    common = {"dtype": "bfloat16", "seed": 4, "device": "cuda", "precision": gpu.lt.FP8(recipe=recipe)}
    if gated:
        norm = gpu.lt.RMSNorm(DIMS[0], dtype="bfloat16", device="cuda")
        block = gpu.lt.Residual(gpu.lt.Chain(norm, gpu.lt.SwiGLU(DIMS[0], 48, **options, **common)))
        model = gpu.lt.Chain(block, gpu.lt.Linear(DIMS[0], DIMS[-1], **common))
    else:
        model = gpu.lt.MLP(DIMS, "gelu", **options, **common)
    layers = [each for each in model.blocks() if isinstance(each, gpu.lt.Linear)]
    optimizer = gpu.lt.AdamW(model.parameters(), lr=1e-2)
    step = gpu.lt.TrainStep(
        model, optimizer, loss="cross_entropy", batch_size=ROWS * parts, accumulate=parts, graph=graph, tune=False
    )
    made = []
    given = batches(5 * parts)
    for number in range(5):
        xs, labels = zip(*given[number * parts : (number + 1) * parts], strict=True)
        loss = step(gpu.cp.asarray(np.concatenate(xs)), gpu.cp.asarray(np.concatenate(labels)))
        gpu.synchronize_all()
        states = [array for layer in layers[:2] for array in (layer.scales.slots, layer.scales.history)]
        arrays = [loss, *(each.data for each in model.parameters()), *states]
        made.append(b"".join(gpu.host_of(each).tobytes() for each in arrays))
    assert layers[2].scales.slots is None
    return made


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout": 0.25}, {"parts": 2}, {"recipe": "rowwise"}, {"gated": True, "dropout": 0.25, "parts": 2}],
)
def test_a_graph_trains_bit_for_bit_as_eager_steps(gpu: FakeGpu, options: Any) -> None:
    """Both as a graph and eagerly, the first step computes the FP8 scales from its own batch."""
    assert train(gpu, graph=True, **options) == train(gpu, graph=False, **options)


def test_small_layers_of_a_model_stay_in_its_type(gpu: FakeGpu) -> None:
    model = gpu.lt.MLP(DIMS, "gelu", dtype="bfloat16", device="cuda", precision="fp8")
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="cross_entropy", batch_size=ROWS, tune=False)
    for each in batches(3):
        step(*map(gpu.cp.asarray, each))
    gpu.synchronize_all()
    states = [layer.scales for layer in model.layers]
    assert [state.slots for state in states] == [None] * 3
    assert all("32 rows of 32-64-48: FP8" in state.fallback for state in states[:2])
    assert [state.needs_dx for state in states] == [False, True, True]


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        (True, ["products in FP8 (as asked for)"]),
        (False, ["own type (32 rows of 32-64-48: FP8 is exp"]),
    ],
)
def test_explain_says_which_layers_are_in_fp8_and_why(gpu: FakeGpu, asks: bool, words: list[str]) -> None:
    model = gpu.lt.MLP(DIMS, "gelu", dtype="bfloat16", device="cuda", precision=gpu.lt.FP8(fallback=not asks))
    explained = [each.strategy for each in gpu.lt.explain(model, ROWS) if str(each).startswith("precision")]
    words = [*words, "own type (M, N or K is no positive multiple of 16)"]
    assert [found[: len(wanted)] for found, wanted in zip(explained, words, strict=True)] == words


def test_neighbours_share_a_choice(gpu: FakeGpu) -> None:
    """FP8 or the own type is chosen for at most four layers together, of one recipe and of sizes that allow FP8."""
    precisions = [gpu.lt.FP8(fallback=True)] * 6 + [None] + [gpu.lt.FP8(recipe="current")] * 2
    outputs = [64, 64, 64, 64, 64, 48, 48, 48, 10]
    layers = [
        gpu.lt.Linear(*sizes, dtype="bfloat16", device="cuda", precision=precision)
        for sizes, precision in zip(itertools.pairwise([32, *outputs]), precisions, strict=True)
    ]
    choices = [each for each in gpu.lt.Chain(*layers).rehearse(ROWS) if type(each).__name__ == "Fp8ChainProblem"]
    assert [each.dims for each in choices] == [(32, 64, 64, 64, 64), (64, 64, 48), (48, 48), (48, 10)]
    assert [each.is_open for each in choices] == [True, True, False, False]


@pytest.mark.parametrize("tune", [False, True])
def test_scales_for_rows_fall_back_where_the_gpu_lacks_them(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tune: bool
) -> None:
    # No `DeviceInfo` can be made after its field is replaced, so that the GPU's is made before.
    importlib.import_module("lt_runtime.gpu.devices").device_info(0)
    monkeypatch.setattr("lt_runtime.gpu.devices.DeviceInfo.capability", 100)
    made = []
    for precision in (gpu.lt.FP8(recipe="rowwise", fallback=True), None):
        model = gpu.lt.MLP([32, 64], dtype="bfloat16", seed=4, device="cuda", precision=precision)
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", batch_size=ROWS, tune=tune)
        x, target = (gpu.cp.asarray(np.ones((ROWS, cols), BF16)) for cols in (32, 64))
        made.append((float(step(x, target).get()), outputs(gpu, model, x).tobytes()))
        if precision is not None:
            assert all("vectors of scales need" in layer.scales.fallback for layer in model.layers)
    assert made[0] == made[1]


NARROW = {"expected to be slower": ("fp8", [32, 64, 16]), "no multiples of 16": (lt.FP8(), [10, 33, 5])}


@pytest.mark.parametrize(("precision", "dims"), NARROW.values(), ids=NARROW)
def test_a_narrow_model_without_a_layer_in_fp8_runs_in_one_kernel(gpu: FakeGpu, precision: Any, dims: Any) -> None:
    made = []
    for each in (None, precision if isinstance(precision, str) else gpu.lt.FP8()):
        model = gpu.lt.MLP(dims, "gelu", dtype="bfloat16", seed=4, device="cuda", precision=each)
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", batch_size=ROWS, tune=False)
        x, target = (gpu.cp.asarray(np.ones((ROWS, cols), BF16)) for cols in (dims[0], dims[-1]))
        gpu.kernels.launched.clear()
        losses = [float(step(x, target).get()) for _ in range(2)]
        y = model(x)
        gpu.synchronize_all()
        made.append((losses, gpu.host_of(y).tobytes(), {*gpu.kernels.launched} - {"copy_rows"}))
    assert made[0] == made[1]
    assert {"mlp_bwd", "mlp_fwd"} <= made[1][2]
    assert all(layer.scales.fallback and layer.scales.needs_dx == (layer.name != "layer0") for layer in model.layers)


def test_training_lowers_the_loss() -> None:
    model = lt.MLP(DIMS, "gelu", dtype="bfloat16", seed=4, device="cpu", precision="fp8")
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2), loss="cross_entropy", batch_size=ROWS)
    (x, labels), *_ = batches(1)
    losses = [float(step(x, labels)) for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]
    assert model.layers[0].scales.overflows == {"x": 0, "w": 0, "dy": 0}


def test_a_checkpoint_continues_bit_for_bit(gpu: FakeGpu, tmp_path: Path) -> None:
    def made() -> tuple[Any, Any, Any]:
        model = gpu.lt.MLP(DIMS, "gelu", dtype="bfloat16", seed=4, device="cuda", precision=gpu.lt.FP8())
        optimizer = gpu.lt.AdamW(model.parameters(), lr=1e-2)
        options = {"loss": "cross_entropy", "batch_size": ROWS, "tune": False}
        return model, optimizer, gpu.lt.TrainStep(model, optimizer, **options)

    def run(step: Any, given: list[tuple[Any, Any]]) -> list[float]:
        return [float(step(*map(gpu.cp.asarray, each)).get()) for each in given]

    (model, optimizer, unbroken), given = made(), batches(6)
    run(unbroken, given[:3])
    gpu.synchronize_all()
    gpu.lt.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    resumed_model, resumed_optimizer, resumed = made()
    gpu.lt.load_checkpoint(tmp_path / "checkpoint", resumed_model, resumed_optimizer)
    assert run(resumed, given[3:]) == run(unbroken, given[3:])
    gpu.synchronize_all()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {"scaler": 8.0}])
def test_a_skipped_step_changes_no_scale(
    gpu: FakeGpu, device: str, graph: bool, bad: float, options: dict[str, Any]
) -> None:
    """One of several steps has a target that is not finite, while its inputs and weights are finite.

    Without biases, the loss's gradient is read only by casts to FP8, and these must report that it is not finite.
    """
    package = gpu.lt
    if "scaler" in options:
        options = {"scaler": package.GradScaler(options["scaler"])}
    model = package.MLP([32, 64, 16], dtype="bfloat16", seed=4, bias=False, device=device, precision=package.FP8())
    optimizer = package.AdamW(model.parameters(), lr=1e-2, **options)
    step = package.TrainStep(model, optimizer, loss="mse", batch_size=ROWS, graph=graph, tune=False)
    histories = []
    for number, (x, _) in enumerate(batches(5)):
        target = np.full((ROWS, 16), bad if number == 2 else 1.0).astype(BF16)
        step(*map(model.device.asarray, ((number + 1) * x, target)))
        gpu.synchronize_all()
        histories.append([layer.scales.state_dict()["history"] for layer in model.layers])
    changes = [[(now != then).any() for now, then in zip(*each, strict=True)] for each in itertools.pairwise(histories)]
    assert changes == [[True, True], [False, False], [True, True], [True, True]]
    assert int(optimizer.skipped_steps.item()) == 1


def test_a_step_that_is_tuned_measures_the_products_in_fp8(gpu: FakeGpu) -> None:
    model = gpu.lt.MLP(DIMS, "gelu", dtype="bfloat16", device="cuda", precision=gpu.lt.FP8())
    found = [each for each in model.rehearse(ROWS) if type(each).__name__ == "MatmulProblem"]
    # products: y and dw of both layers, and dx of the second; the gradient of the inputs is not computed
    assert sorted((each.m, each.n, each.k) for each in found) == sorted(
        [(ROWS, 64, 32), (ROWS, 48, 64), (64, 32, ROWS), (48, 64, ROWS), (ROWS, 64, 48)]
    )
    assert all(each.dtype.is_float8 for each in found)


def inference(precision: Any, lt: Any, device: str, activation: Any, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """Makes a model for inference, and its inputs, on a device."""
    model = lt.MLP([32, 64, 48], activation, dtype=dtype, seed=4, device=device, precision=precision)
    x, _ = batches(1)[0]
    return model, model.device.asarray(x.astype(model.dtype.numpy))


def outputs(gpu: FakeGpu, model: Any, x: Any) -> np.ndarray[Any, Any]:
    y = model(x)
    gpu.synchronize_all()
    return np.asarray(model.device.to_host(y)).astype(np.float64)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inference_is_in_fp8(gpu: FakeGpu, device: str, activation: str, recipe: Any) -> None:
    """The first call computes the FP8 scales, and the second uses them.

    SiLU, which is no epilogue of cuBLASLt, is applied in BF16.
    """
    model, x = inference(gpu.lt.FP8(recipe=recipe), gpu.lt, device, activation)
    exact, _ = inference(None, gpu.lt, device, activation)
    first, second, wanted = (outputs(gpu, each, x) for each in (model, model, exact))
    assert [layer.scales.slots is not None for layer in model.layers] == [activation != "silu", True]
    for found in (first, second):
        assert 20.0 < decibels(found, wanted) < 40.0
    # The two differ a little: training rounds the pre-activation to BF16, and the epilogue of inference need not.
    assert decibels(second, first) > 30.0


def test_inference_stays_in_bf16_where_fp8_is_expected_to_be_slower(gpu: FakeGpu) -> None:
    """The layers stay in BF16 although they have FP8 scales, for example from training with larger batches."""
    (trained, x), (model, _), (exact, _) = (
        inference(each, gpu.lt, "cuda", "relu") for each in (gpu.lt.FP8(), "fp8", None)
    )
    wanted = outputs(gpu, exact, x)
    assert 20.0 < decibels(outputs(gpu, trained, x), wanted) < 40.0
    for layer, source in zip(model.layers, trained.layers, strict=True):
        layer.scales.load_state_dict(source.scales.state_dict(), like=layer.weight.data)
    np.testing.assert_array_equal(outputs(gpu, model, x), wanted)


def test_inference_takes_leading_axes_and_adds() -> None:
    layer = lt.Linear(32, 64, bias=False, dtype="bfloat16", seed=4, device="cpu", precision="fp8")
    x, add = (np.random.default_rng(3).standard_normal((2, 16, cols)).astype(BF16) for cols in (32, 64))
    run = lt.Pass(trains=False)
    for found in (layer.forward(x, run, add), layer.forward(x, run, add)):
        assert found.shape == (2, 16, 64)
        exact = x.astype(np.float64) @ layer.weight.data.astype(np.float64).T + add
        assert 20.0 < decibels(found.astype(np.float64), exact) < 60.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_evaluation_changes_no_scale_of_training(gpu: FakeGpu, device: str) -> None:
    trained = []
    for evaluates in (False, True):
        model, x = inference(gpu.lt.FP8(), gpu.lt, device, "relu")
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", batch_size=ROWS, tune=False)
        target = model.device.asarray(np.ones((ROWS, 48), BF16))
        for _ in range(3):
            step(x, target)
            if evaluates:
                gpu.lt.evaluate(model, [(x, target)], loss="mse")
        gpu.synchronize_all()
        trained.append([layer.scales.state_dict() for layer in model.layers])
    for ours, theirs in zip(*trained, strict=True):
        assert all((ours[name] == theirs[name]).all() for name in ours)


def test_a_file_gives_inference_its_scales(gpu: FakeGpu, tmp_path: Path) -> None:
    model, x = inference("fp8", gpu.lt, "cuda", "relu")
    model(x)
    gpu.lt.save_model(tmp_path / "model", model)
    wanted = outputs(gpu, model, x)
    assert (outputs(gpu, gpu.lt.load_model(tmp_path / "model", "cuda"), x) == wanted).all()
