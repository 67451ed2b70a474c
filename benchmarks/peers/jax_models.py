"""JAX's contender in the suite `models`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.models import NORM_EPSILON, ModelCase
from benchmarks.peers.jax import step
from benchmarks.steps import Setup, StepContender


def contender(setup: Setup) -> StepContender:
    """Steps as `jax.step` makes them, of the case's model."""
    case = setup.case
    assert isinstance(case, ModelCase)
    return step(setup, partial(_cost, case.form))


def _cost(form: str, parameters: list[jax.Array], x: jax.Array, target: jax.Array) -> jax.Array:
    outputs = {"stack": _stack, "towers": _towers, "autoencoder": _autoencoder}[form](parameters, x)
    return jnp.square(outputs.astype(jnp.float32) - target.astype(jnp.float32)).mean()


def _stack(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    for norm, up, down in zip(parameters[::3], parameters[1::3], parameters[2::3], strict=True):
        wide = x.astype(jnp.float32)
        scaled = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + NORM_EPSILON)
        gate, value = jnp.split((scaled * norm.astype(jnp.float32)).astype(x.dtype) @ up.T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * value) @ down.T
    return x


def _towers(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    *towers, w, bias = parameters
    outputs = []
    for w1, b1, w2, b2 in (towers[:4], towers[4:]):
        outputs.append(jax.nn.gelu(jax.nn.gelu(x @ w1.T + b1) @ w2.T + b2))
    return jnp.concatenate(outputs, -1) @ w.T + bias


def _autoencoder(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    w, bias, out_bias = parameters
    return jax.nn.gelu(x @ w.T + bias) @ w + out_bias
