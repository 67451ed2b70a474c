"""AdamW on the GPU against the float64 reference, and PyTorch's where it is installed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.problem import DType
from lt_runtime.schedules import constant, warmup, warmup_cosine, warmup_linear
from tests.support.adamw_reference import AdamWHyper, AdamWTensor, adamw_update
from tests.support.peers import NEEDS_TORCH
from tests.support.strategies import TYPES

F32, _, BF16 = TYPES
SHAPES = [(1,), (7,), (64, 33), (4096,), (4097,), (3, 5, 7), (0,), (10000,)]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm-up": {"schedule": warmup(3)},
    "linear": {"schedule": warmup_linear(2, 6, 0.1)},
    "cosine": {"schedule": warmup_cosine(2, 6)},
    "amsgrad": {"amsgrad": True},
    "clipping": {"max_norm": 0.5},
    "skipping": {"skip_nonfinite": True},
    "BF16 moments": {"moments": "bfloat16"},
    "in place": {"stochastic_rounding": True, "seed": 3},
    "everything": {
        "amsgrad": True,
        "max_norm": 1.0,
        "moments": "bfloat16",
        "stochastic_rounding": True,
        "seed": 1 << 40,
    },
}


def _parameters(data: DType, grad: DType, seed: int, *, host: bool = False, master: bool = True) -> list[lt.Parameter]:
    generator = np.random.default_rng(seed)
    to_place = np.copy if host else cp.asarray
    result = []
    for i, shape in enumerate(SHAPES):
        values, gradient = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
        exact = to_place(values) if master and data is not F32 else None
        arrays = (to_place(values.astype(data.numpy)), to_place(gradient.astype(grad.numpy)), exact)
        result.append(lt.Parameter(*arrays, f"p{i}", lr_scale=1 / (1 + i % 3), weight_decay=0.2 if i % 2 else None))
    return result


def _exact(parameter: lt.Parameter) -> np.ndarray[Any, Any]:
    """The parameters and gradients to train, on the host."""
    array = parameter.data if parameter.master is None else parameter.master
    return array if isinstance(array, np.ndarray) else cp.asnumpy(array)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("data", TYPES)
@pytest.mark.parametrize("grad", TYPES)
def test_agrees_with_reference(data: DType, grad: DType, options: dict[str, Any]) -> None:
    in_place = "stochastic_rounding" in options
    ours, expected = (_parameters(data, grad, 4, host=host, master=not in_place) for host in (False, True))
    optimizer, twin = (lt.AdamW(p, lr=1e-2, weight_decay=0.1, **options) for p in (ours, expected))
    for _ in range(8 if "schedule" in options else 3):
        optimizer.step()
        twin.step()
    coarse = in_place and data is BF16
    slack = 2e-4 if "moments" in options else 2e-7
    for found, wanted in zip(ours, expected, strict=True):
        assert (found.master is None) == (wanted.master is None)
        if found.master is not None:
            np.testing.assert_array_equal(cp.asnumpy(found.data), _exact(found).astype(data.numpy))
        a, b = (_exact(p).astype(np.float64) for p in (found, wanted))
        # BF16 results differ by one unit in the last place where the random number that decides the rounding lies
        # between FP32 and float64
        tolerance = 2.0**-7 * np.abs(b) + 1e-3 if coarse else 2e-6 * np.abs(b) + slack
        assert (np.abs(a - b) <= tolerance).all()
        if a.size > 1000:
            close = a == b if coarse else np.abs(a - b) <= 2e-6 * np.abs(b) + 2e-7
            assert close.mean() > 0.99
    if optimizer.grad_norm is not None:
        assert float(optimizer.grad_norm) == pytest.approx(float(twin.grad_norm), rel=1e-6)


RULES: dict[str, Any] = {
    "SGD": lt.rules.SGD(1e-2, weight_decay=0.1),
    "momentum": lt.rules.SGD(1e-2, 0.875, weight_decay=0.1),
    "Nesterov": lt.rules.SGD(1e-2, 0.875, nesterov=True, weight_decay=0.1),
    "Lion": lt.rules.Lion(1e-2, (0.75, 0.875), 0.1),
    "AMSGrad": lt.rules.AMSGrad(1e-2, weight_decay=0.1),
}


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("names", [*((name,) for name in RULES), tuple(RULES)], ids=str)
@pytest.mark.parametrize("data", TYPES)
def test_rules_agree_with_reference(data: DType, names: tuple[str, ...], moments: Any) -> None:
    ours, expected = (_parameters(data, F32, 4, host=host) for host in (False, True))
    last = len(names) - 1

    def optimizer_of(given: list[lt.Parameter]) -> lt.Optimizer:
        groups = [*([each] for each in given[:last]), given[last:]]
        pairs = [(group, RULES[name]) for group, name in zip(groups, names, strict=True)]
        scaler = lt.GradScaler(4.0, growth_interval=2)
        return lt.Optimizer(pairs, lt.schedules.table([0.5, 1.0]), max_norm=100.0, scaler=scaler, moments=moments)

    optimizer, twin = optimizer_of(ours), optimizer_of(expected)
    for _ in range(4):
        optimizer.step()
        twin.step()
    assert (optimizer.steps.item(), float(optimizer.scaler.scale)) == (4, 16.0)
    assert optimizer.rates == twin.rates
    for found, wanted in zip(ours, expected, strict=True):
        a, b = (_exact(p).astype(np.float64) for p in (found, wanted))
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-3 if moments == "bfloat16" else 5e-7)
    state = optimizer.state_dict()
    assert {*state} == {*twin.state_dict()}
    optimizer.load_state_dict(state)
    assert all((state[name] == array).all() for name, array in optimizer.state_dict().items())


@NEEDS_TORCH
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5, 50.0])
def test_agrees_with_pytorch(amsgrad: bool, max_norm: float | None) -> None:
    import torch

    generator = np.random.default_rng(5)
    starts = [generator.standard_normal(shape).astype(np.float32) for shape in ((257, 33), (1000,), (3,))]
    tensors = [torch.nn.Parameter(torch.tensor(start, device="cuda")) for start in starts]
    settings: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05, "amsgrad": amsgrad}
    peer = torch.optim.AdamW(tensors, fused=True, capturable=True, **settings)
    ours = [lt.Parameter(cp.asarray(start), cp.zeros(start.shape, cp.float32)) for start in starts]
    optimizer = lt.AdamW(ours, max_norm=max_norm, **settings)
    for step in range(20):
        for tensor, parameter in zip(tensors, ours, strict=True):
            gradient = generator.standard_normal(tuple(tensor.shape)).astype(np.float32) / (1 + step)
            tensor.grad = torch.tensor(gradient, device="cuda")
            parameter.grad[...] = cp.asarray(gradient)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(tensors, max_norm)
        peer.step()
        optimizer.step()
        if max_norm is not None:
            assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-6)
    for tensor, parameter in zip(tensors, ours, strict=True):
        np.testing.assert_allclose(cp.asnumpy(parameter.data), tensor.detach().cpu().numpy(), rtol=1e-5, atol=1e-6)


@NEEDS_TORCH
def test_the_scaler_moves_as_pytorch_s() -> None:
    import torch

    tensor = torch.nn.Parameter(torch.ones(300, device="cuda"))
    peer = torch.optim.AdamW([tensor], lr=1e-2, fused=True)
    their_scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=3)
    their_scaler.scale(torch.ones((), device="cuda"))  # PyTorch's GradScaler allocates its scale only in this call
    parameter = lt.Parameter(cp.ones(300, cp.float32), cp.zeros(300, cp.float32))
    scaler = lt.GradScaler(256.0, growth_interval=3)
    optimizer = lt.AdamW([parameter], lr=1e-2, scaler=scaler)
    for step in range(20):
        gradient = np.random.default_rng(step).standard_normal(300).astype(np.float32) * their_scaler.get_scale()
        if step in (4, 5, 13):
            gradient[step] = math.inf if step % 2 else math.nan
        tensor.grad, parameter.grad[...] = torch.tensor(gradient, device="cuda"), cp.asarray(gradient)
        their_scaler.step(peer)
        their_scaler.update()
        optimizer.step()
        assert float(scaler.scale) == their_scaler.get_scale()
    np.testing.assert_allclose(cp.asnumpy(parameter.data), tensor.detach().cpu().numpy(), rtol=1e-5, atol=1e-6)
    assert (int(optimizer.steps[0]), int(optimizer.skipped_steps[0])) == (17, 3)


def test_a_table_of_thousands_of_tensors() -> None:
    parameters = [lt.Parameter(cp.full(i % 5, 1.0, cp.float32), cp.ones(i % 5, cp.float32)) for i in range(3000)]
    lt.AdamW(parameters, lr=0.1, weight_decay=0.0, max_norm=math.inf).step()
    joined = cp.concatenate([parameter.data for parameter in parameters])
    np.testing.assert_allclose(cp.asnumpy(joined), 0.9, rtol=1e-6)


@pytest.fixture
def large_memory() -> Iterator[None]:
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    yield
    cp.get_default_memory_pool().free_all_blocks()


@pytest.mark.usefixtures("large_memory")
def test_over_two_thousand_million_elements() -> None:
    size, width = (1 << 31) + 4099, 5000
    data, grad = cp.full(size, 1.0, BF16.numpy), cp.full(size, 2.0**-10, BF16.numpy)
    generator = np.random.default_rng(19)
    places = [slice(start, start + width) for start in (0, (1 << 31) - 20_000, size - width)]
    values, gradients = ([generator.standard_normal(width).astype(BF16.numpy) for _ in places] for _ in range(2))
    for place, value, gradient in zip(places, values, gradients, strict=True):
        data[place], grad[place] = cp.asarray(value), cp.asarray(gradient)
    parameter = lt.Parameter(data, grad)
    optimizer = lt.AdamW([parameter], lr=1e-2, max_norm=math.inf)
    optimizer.step()
    hyper = AdamWHyper(1e-2, 0.9, 0.999, 1e-8, 0.01, constant())
    zeros = np.zeros(width, np.float32)
    for place, value, gradient in zip(places, values, gradients, strict=True):
        start = AdamWTensor(value.astype(np.float32), zeros, zeros)
        expected = adamw_update(start, gradient, hyper, 1)
        np.testing.assert_allclose(cp.asnumpy(parameter.master[place]), expected.value, rtol=2e-6, atol=2e-7)
        np.testing.assert_array_equal(cp.asnumpy(data[place]), cp.asnumpy(parameter.master[place]).astype(BF16.numpy))
    rest = parameter.master[1 << 20 : (1 << 31) - (1 << 20)]
    assert float(rest.min()) == float(rest.max()) == pytest.approx(1 - 1e-2 - 1e-4, rel=1e-6)
    squares = sum(float(np.square(g.astype(np.float64)).sum()) for g in gradients)
    norm = math.sqrt((size - len(places) * width) * 2.0**-20 + squares)
    assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-6)
