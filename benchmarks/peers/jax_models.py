"""JAX's contender in the suite `models`."""

from __future__ import annotations

from functools import partial
from typing import Final

import jax
import jax.numpy as jnp

from benchmarks.models import NORM_EPSILON, ModelCase
from benchmarks.peers.jax import step
from benchmarks.steps import Setup, StepContender


def contender(setup: Setup) -> StepContender:
    """Makes JAX's training step of the case's model, as `jax.step` does for MLPs."""
    case = setup.case
    assert isinstance(case, ModelCase)
    return step(setup, partial(cost_of, case.form))


def cost_of(form: str, parameters: list[jax.Array], x: jax.Array, target: jax.Array) -> jax.Array:
    """Computes the loss of a model of the given form."""
    outputs, target = _MODELS[form](parameters, x).astype(jnp.float32), target.astype(jnp.float32)
    if form != "dqn":
        return jnp.square(outputs - target).mean()
    actions = outputs.shape[1]
    return jnp.square(target[:, :actions] * (outputs - target[:, actions:])).sum() / len(outputs)


def _stack(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    for norm, up, down in zip(parameters[::3], parameters[1::3], parameters[2::3], strict=True):
        gate, value = jnp.split(_normed(x, norm) @ up.T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * value) @ down.T
    return x


def _feed_forward(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    *blocks, norm, w, bias = parameters
    return _normed(_stack(blocks, x), norm) @ w.T + bias


def _normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + NORM_EPSILON)
    return (scaled * weight.astype(jnp.float32)).astype(x.dtype)


def _towers(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    *towers, w, bias = parameters
    outputs = []
    for w1, b1, w2, b2 in (towers[:4], towers[4:]):
        outputs.append(jax.nn.gelu(jax.nn.gelu(x @ w1.T + b1) @ w2.T + b2))
    return jnp.concatenate(outputs, -1) @ w.T + bias


def _autoencoder(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    w, bias, out_bias = parameters
    return jax.nn.gelu(x @ w.T + bias) @ w + out_bias


def _mixture(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    gate, bias, *experts = parameters
    p = jax.nn.softmax((x @ gate.T + bias).astype(jnp.float32), -1).astype(x.dtype)
    outputs = [jax.nn.gelu(x @ w1.T + b1) @ w2.T + b2 for w1, b1, w2, b2 in (experts[:4], experts[4:])]
    return p[..., :1] * outputs[0] + p[..., 1:] * outputs[1]


def _dqn(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    w1, b1, w2, b2, w3, b3 = parameters
    return jax.nn.relu(jax.nn.relu(x @ w1.T + b1) @ w2.T + b2) @ w3.T + b3


_MODELS: Final = {
    "stack": _stack,
    "feed_forward": _feed_forward,
    "towers": _towers,
    "autoencoder": _autoencoder,
    "mixture": _mixture,
    "dqn": _dqn,
}
