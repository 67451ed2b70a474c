"""Calls on tensors without `stream=` run after the work that PyTorch's current stream already has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt

torch = pytest.importorskip("torch")

_LONG = 200_000_000
"""Cycles (a tenth of a second) that a kernel spins: longer than the host takes for a call."""
_CALLS = 4
"""Of this many calls with the same buffers, the third is captured into a graph, and the fourth launches the graph."""
_M, _N, _K = 64, 48, 80


class _Case(NamedTuple):
    """Tensors that are zero until they are filled, and a call that reads them and returns tensors."""

    inputs: tuple[Any, ...]
    call: Callable[[], Any]


def _zeros(*shape: int) -> Any:
    return torch.zeros(shape, device="cuda")


def _linear_fwd() -> _Case:
    x, w, bias = _zeros(_M, _K), _zeros(_N, _K), _zeros(_N)
    return _Case((x, w, bias), lambda: (lt.linear_fwd(x, w, bias, activation="gelu")[0],))


def _linear_bwd() -> _Case:
    x, w, dy = torch.ones(_M, _K, device="cuda"), torch.ones(_N, _K, device="cuda"), _zeros(_M, _N)
    _, ctx = lt.linear_fwd(x, w, _zeros(_N), activation="gelu")
    return _Case((dy,), lambda: tuple(lt.linear_bwd(dy, ctx)))


def _matmul() -> _Case:
    a, b = _zeros(_M, _K), _zeros(_K, _N)
    return _Case((a, b), lambda: (lt.matmul(a, b),))


def _mse_loss() -> _Case:
    prediction, target = _zeros(_M, _N), _zeros(_M, _N)
    return _Case((prediction, target), lambda: tuple(lt.mse_loss(prediction, target)))


def _cross_entropy() -> _Case:
    logits, labels = _zeros(_M, _N), torch.arange(_M, device="cuda") % _N
    return _Case((logits,), lambda: tuple(lt.cross_entropy(logits, labels)))


def _dropout() -> _Case:
    x = _zeros(_M, _N)
    return _Case((x,), lambda: (lt.dropout(x, 0.5, lt.Philox(1)),))


def _fill(tensors: tuple[Any, ...]) -> None:
    """Fills the tensors with random values made on the device: a copy from the host could wait for the stream."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    for tensor in tensors:
        tensor.normal_(generator=generator)


def _behind_long_work(fill: Callable[[], None], call: Callable[[], Any]) -> Any:
    """Returns the result of a call on a busy stream.

    Long work waits on the stream first; then `fill` writes the operands, and the call reads them.
    """
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_LONG)
        fill()
        result = call()
    stream.synchronize()
    return result


@pytest.mark.parametrize("make", [_linear_fwd, _linear_bwd, _matmul, _mse_loss, _cross_entropy, _dropout])
def test_operands_are_read_in_their_turn(make: Callable[[], _Case]) -> None:
    inputs, call = make()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The first call makes plans and compiles kernels, which may take as long as the long work on the stream.
        for _ in range(_CALLS):
            call()
    made = _behind_long_work(lambda: _fill(inputs), call)
    expected = call()
    torch.cuda.synchronize()
    for actual, wanted in zip(made, expected, strict=True):
        assert torch.equal(actual, wanted)


def test_adamw() -> None:
    values, gradients = [_zeros(_N, _K) for _ in range(2)], [_zeros(_N, _K) for _ in range(2)]
    delayed, plain = (
        lt.AdamW([lt.Parameter(value, gradient)], lr=0.1) for value, gradient in zip(values, gradients, strict=True)
    )
    for optimizer in (delayed, plain):
        optimizer.step()
    _behind_long_work(lambda: _fill((gradients[0],)), delayed.step)
    _fill((gradients[1],))
    plain.step()
    torch.cuda.synchronize()
    assert torch.equal(*values)
    assert values[0].abs().max() > 0


def test_train_step() -> None:
    x, labels = _zeros(_M, _K), torch.arange(_M, device="cuda") % _N
    models = [lt.MLP([_K, 32, _N], seed=3, device=0) for _ in range(2)]
    delayed, plain = (lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2)) for model in models)
    for step in (delayed, plain):
        step(x, labels)
    loss = float(_behind_long_work(lambda: _fill((x,)), lambda: delayed(x, labels)))
    assert loss == float(plain(x, labels))
    torch.cuda.synchronize()
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        np.testing.assert_array_equal(cp.asnumpy(mine.data), cp.asnumpy(other.data))
