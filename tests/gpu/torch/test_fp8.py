"""Modules in FP8 on a GPU: products of dequantised operands, captured steps, copies between devices."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import lt_runtime as lt
import lt_runtime.torch as ltt
from lt_runtime.ops import call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fp8_products"),
    # PyTorch's own warning, if the first work of autograd's thread is a product
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]


def sqnr(found: Any, expected: Any) -> float:
    """The ratio of signal to error, in dB."""
    return 20 * math.log10(float(expected.norm() / (found.detach().double() - expected).norm()))


def exact(tensor: Any, scale: float, dtype: Any = torch.float8_e4m3fn) -> Any:
    """Casts a tensor to FP8 by PyTorch, and returns the resulting values in float64."""
    return (tensor.detach().float() * scale).to(dtype).double() / scale


def test_repeated_steps_are_not_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    precision = lt.FP8(fallback=False)  # this layer is too small to be faster in FP8
    layer = ltt.Linear(512, 256, activation="gelu", precision=precision, device="cuda", dtype=torch.bfloat16)
    x, optimizer = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16), ltt.AdamW(layer.parameters())
    planned, original = list[str](), call._cold_call

    def planning(operation: Any, *others: Any) -> Any:
        planned.append(operation.range_name)
        return original(operation, *others)

    monkeypatch.setattr(call, "_cold_call", planning)
    for _ in range(8):
        before = len(planned)
        optimizer.zero_grad()
        layer(x).float().square().mean().backward()
        optimizer.step()
    assert not planned[before:]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_products_are_those_of_dequantised_operands(recipe: Any, is_transposed: bool) -> None:
    torch.manual_seed(0)
    layer = ltt.Linear(512, 256, precision=lt.FP8(recipe=recipe), device="cuda", dtype=torch.bfloat16)
    if is_transposed:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    x = torch.randn(4, 64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4, 64, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):  # the third call of equal addresses is captured
        y = layer(x)
        dx, dw, db = torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)
    torch.cuda.synchronize()
    scales, w64 = layer.scales.scales, layer.weight.detach().double()
    x8, w8 = exact(x, scales["x"]).flatten(0, 1), exact(layer.weight, scales["w"])
    x64, dy64 = (each.detach().double().flatten(0, 1) for each in (x, dy))
    dy8 = exact(dy, scales["dy"], torch.float8_e5m2).flatten(0, 1)
    bias = layer.bias.detach().double()
    # Against a product of the dequantised operands, only the rounding of the result to BF16 and of the tensor cores'
    # sums makes a difference.
    for found, of_rounded, of_given, least in (
        (y.flatten(0, 1), x8 @ w8.T + bias, x64 @ w64.T + bias, 27),
        (dx.flatten(0, 1), dy8 @ w8, dy64 @ w64, 23),
        (dw, dy8.T @ x8, dy64.T @ x64, 23),
    ):
        assert sqnr(found, of_rounded) > 40
        assert sqnr(found, of_given) > least
    assert sqnr(db, dy64.sum(0)) > 40
    assert dw.stride() == layer.weight.stride()


def trained(precision: Any, steps: int, *, captured: bool, gated: bool = False) -> tuple[Any, list[float]]:
    """A model that has learnt a teacher's outputs, and its losses."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"precision": precision, "device": "cuda", "dtype": torch.bfloat16}
    if gated:
        model: Any = ltt.FeedForward(256, 512, "silu", gated=True, bias=False, **options)
    else:
        model = ltt.MLP([256, 512, 256], "gelu", **options)
    teacher = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) / 16
    optimizer = ltt.AdamW(model.parameters(), lr=1e-3, masters=True)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) - x @ teacher).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run: Any = ltt.capture(step, tune=False) if captured else step
    generator = torch.Generator("cuda").manual_seed(1)
    batches = [torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(steps)]
    return model, [float(run(x).detach()) for x in batches]


@pytest.mark.parametrize("gated", [False, True])
def test_a_captured_model_learns_as_in_bf16(gated: bool) -> None:
    model, losses = trained(lt.FP8(), 120, captured=True, gated=gated)
    _, expected = trained(None, 120, captured=True, gated=gated)
    assert losses[0] != expected[0]
    last, of_bf16 = (sum(each[-20:]) / 20 for each in (losses, expected))
    assert last < 0.6 * losses[0]
    assert last < 1.1 * of_bf16
    layers = [each for each in model.modules() if isinstance(each, ltt.Linear)]
    assert all(each.scales.calibrated == {0, 1, 2} for each in layers)
    assert all((each.scales.state_dict()["history"] > 0).all() for each in layers)  # each replay updates the scales


@pytest.mark.parametrize("gated", [False, True])
def test_captured_steps_equal_eager_ones(gated: bool) -> None:
    captured, losses = trained(lt.FP8(), 12, captured=True, gated=gated)
    eager, expected = trained(lt.FP8(), 12, captured=False, gated=gated)
    assert losses == expected
    found = captured.state_dict()
    assert all(torch.equal(found[name], each) for name, each in eager.state_dict().items())


def test_tuning_leaves_the_scales() -> None:
    model, _ = trained(lt.FP8(), 3, captured=False)
    before = model.state_dict()
    ltt.tune(model, torch.full((512, 256), 1e4, device="cuda", dtype=torch.bfloat16), progress=False)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_scales_follow_a_layer_to_its_device() -> None:
    layer = ltt.Linear(64, 32, precision=lt.FP8(), dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    layer(x).sum().backward()
    scales = layer.scales.scales
    layer.cuda()(x.cuda()).sum().backward()
    assert layer.scales.scales == scales
    made = copy.deepcopy(layer)
    made.load_state_dict(layer.state_dict())
    torch.testing.assert_close(made(x.cuda()), layer(x.cuda()), rtol=0, atol=0)


def test_measured_modules_are_replaced_in_fp8() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    report = ltt.replace(model.cuda().bfloat16(), x, precision=lt.FP8())
    assert any(each.ours is not None for each in report)
    for layer in (model[0], model[2]):
        # Measuring the layer must not have made its scales.
        assert getattr(getattr(layer, "scales", None), "slots", None) is None
