"""AdamW on the GPU against the float64 reference, and PyTorch's where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import DType
from lt_runtime.schedules import Schedule, constant, warmup, warmup_cosine, warmup_linear
from tests.strategies import TYPES

SHAPES = [(1,), (7,), (64, 33), (4096,), (4097,), (3, 5, 7), (0,), (10000,)]


def _parameters(data: DType, grad: DType, seed: int) -> list[lt.Parameter]:
    generator = np.random.default_rng(seed)
    result = []
    for i, shape in enumerate(SHAPES):
        values, gradient = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
        master = None if data is DType.FLOAT32 else cp.asarray(values)
        parameter = lt.Parameter(
            cp.asarray(values.astype(data.numpy)), cp.asarray(gradient.astype(grad.numpy)), master, f"p{i}"
        )
        result.append(parameter)
    return result


@pytest.mark.parametrize("data", list(TYPES))
@pytest.mark.parametrize("grad", list(TYPES))
@pytest.mark.parametrize("schedule", [constant(), warmup(3), warmup_linear(2, 6, 0.1), warmup_cosine(2, 6)])
def test_agrees_with_reference(data: DType, grad: DType, schedule: Schedule) -> None:
    parameters = _parameters(data, grad, 3)
    hyper = reference.AdamWHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, schedule)
    optimizer = lt.AdamW(parameters, lr=1e-2, weight_decay=0.1, schedule=schedule)
    values = [cp.asnumpy(p.data if p.master is None else p.master) for p in parameters]
    moments = [[np.zeros_like(v) for _ in range(2)] for v in values]
    for step in range(1, 9):
        optimizer.step()
        for i, parameter in enumerate(parameters):
            values[i], *moments[i] = reference.adamw_update(
                values[i], cp.asnumpy(parameter.grad), *moments[i], hyper, step
            )
    for value, parameter in zip(values, parameters, strict=True):
        exact = parameter.data if parameter.master is None else parameter.master
        np.testing.assert_allclose(cp.asnumpy(exact), value, rtol=2e-6, atol=2e-7)
        if parameter.master is not None:
            np.testing.assert_array_equal(cp.asnumpy(parameter.data), cp.asnumpy(exact).astype(data.numpy))
    assert int(optimizer.steps[0]) == 8


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="a peer, where it is installed")
def test_agrees_with_pytorch() -> None:
    import torch

    generator = np.random.default_rng(5)
    start = generator.standard_normal((257, 33)).astype(np.float32)
    tensor = torch.nn.Parameter(torch.tensor(start, device="cuda"))
    peer = torch.optim.AdamW([tensor], lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05, fused=True)
    parameter = lt.Parameter(cp.asarray(start), cp.zeros_like(cp.asarray(start)))
    ours = lt.AdamW([parameter], lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05)
    for _ in range(20):
        gradient = generator.standard_normal(start.shape).astype(np.float32)
        tensor.grad = torch.tensor(gradient, device="cuda")
        parameter.grad[...] = cp.asarray(gradient)
        peer.step()
        ours.step()
    np.testing.assert_allclose(cp.asnumpy(parameter.data), tensor.detach().cpu().numpy(), rtol=1e-5, atol=1e-6)


def test_makes_master_copies() -> None:
    parameter = lt.Parameter(cp.ones(10, DType.BFLOAT16.numpy), cp.ones(10, cp.float32))
    lt.AdamW([parameter], lr=1e-4).step()
    assert parameter.master.dtype == cp.float32
    assert (parameter.master < 1).all()


def test_runs_are_bitwise_equal() -> None:
    def run() -> list[bytes]:
        parameters = _parameters(DType.FLOAT32, DType.BFLOAT16, 11)
        optimizer = lt.AdamW(parameters)
        for _ in range(5):
            optimizer.step()
        return [cp.asnumpy(p.data).tobytes() for p in parameters]

    assert run() == run()


def test_step_advances_when_a_graph_is_replayed() -> None:
    def train(replay: bool) -> tuple[Any, int]:
        parameter = lt.Parameter(cp.ones(5000, cp.float32), cp.full(5000, 0.5, cp.float32))
        optimizer = lt.AdamW([parameter], schedule=warmup_cosine(3, 10))
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.get_current_stream().synchronize()
        with stream:
            optimizer.step()
            if replay:
                stream.begin_capture()
                optimizer.step()
                graph = stream.end_capture()
                for _ in range(4):
                    graph.launch(stream)
            else:
                for _ in range(4):
                    optimizer.step()
        stream.synchronize()
        return cp.asnumpy(parameter.data), int(optimizer.steps[0])

    (eager, eager_steps), (replayed, replayed_steps) = train(False), train(True)
    np.testing.assert_array_equal(eager, replayed)
    assert eager_steps == replayed_steps == 5
