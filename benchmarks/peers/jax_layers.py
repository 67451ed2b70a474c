"""JAX's contender in the suite `layers`; arrays and layers for all suites."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

# By default JAX allocates most of the GPU's memory when it starts, which other contenders need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import cupy as cp
import jax
import jax.numpy as jnp

from benchmarks.layers import Arrays, Block
from benchmarks.timing import Contender, Replay, Turn, timed_by_host

ACTIVATIONS: Final[Mapping[str, Callable[[jax.Array], jax.Array]]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def check_gpu() -> None:
    """Checks that JAX has a GPU.

    Raises:
        RuntimeError: JAX finds no GPU.
    """
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX finds no GPU, only {jax.default_backend()}")


def array(values: Any) -> jax.Array:
    """Copies a GPU array to JAX through the host, where every type can be converted."""
    return jnp.asarray(cp.asnumpy(values))


def linear(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    """A layer's product and bias; FP32 operands are multiplied in TF32."""
    return jnp.matmul(x, w.T, precision="tensorfloat32" if x.dtype == jnp.float32 else None) + bias


def block(case: Block, buffers: Sequence[Arrays]) -> Contender:
    """A compiled loop over the buffer sets, timed by the wall clock, see `timed_by_host`."""
    check_gpu()
    sets = tuple(tuple(map(array, (at.x, at.w1, at.b1, at.w2, at.b2, at.dy))) for at in buffers)

    def capture(_run: Any, repetitions: int, count: int, _stream: Any) -> Replay:
        state = [started(sets, case.activation)]
        turn = jax.jit(functools.partial(loop, repetitions // count, case.activation), donate_argnums=0)

        def replay() -> object:
            state[0] = turn(state[0])
            return state[0]

        return replay

    def timed(replay: Replay, repetitions: int, _stream: Any) -> Turn:
        return timed_by_host(replay, repetitions, jax.block_until_ready)

    return Contender(lambda *_: None, capture, timed)


def started(sets: Any, activation: str) -> Any:
    """The state of `loop`: the operands of all sets, and memory for the results of all sets."""
    results = jax.eval_shape(lambda: _results(sets, activation))
    return sets, jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), results)


def loop(count: int, activation: str, state: Any) -> Any:
    """Computes the blocks of all sets a number of times.

    Without the barrier XLA could compute them once before the loop, because the operands never change.
    """

    def body(_: int, state: Any) -> Any:
        sets = jax.lax.optimization_barrier(state[0])
        return sets, _results(sets, activation)

    return jax.lax.fori_loop(0, count, body, state)


def _results(sets: Any, activation: str) -> Any:
    """For each set the outputs, and the gradients of x, weights and biases."""

    def forward(x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array) -> jax.Array:
        return linear(ACTIVATIONS[activation](linear(x, w1, b1)), w2, b2)

    def results(*operands: jax.Array) -> Any:
        y, backward = jax.vjp(forward, *operands[:-1])
        return y, backward(operands[-1])

    return tuple(results(*operands) for operands in sets)
