"""JAX's models of the suites that measure training steps, and their losses."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp

from benchmarks.models import NORM_EPSILON, TAKEN
from benchmarks.peers.jax_layers import ACTIVATIONS, linear
from benchmarks.steps import StepCase


def cost_of(case: StepCase, parameters: list[jax.Array], x: jax.Array, target: jax.Array) -> jax.Array:
    """Computes the loss of a case's model."""
    made = _MODELS.get(getattr(case, "form", ""))
    outputs = (made(parameters, x) if made else _mlp(parameters, x, case.activation)).astype(jnp.float32)
    if case.loss == "cross_entropy":
        return -jnp.take_along_axis(jax.nn.log_softmax(outputs), target[:, None], 1).mean()
    target = target.astype(jnp.float32)
    if case.loss != TAKEN:
        return jnp.square(outputs - target).mean()
    actions = outputs.shape[1]
    return jnp.square(target[:, :actions] * (outputs - target[:, actions:])).sum() / len(outputs)


def _mlp(parameters: list[jax.Array], x: jax.Array, activation: str) -> jax.Array:
    *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
    for w, bias in hidden:
        x = ACTIVATIONS[activation](linear(x, w, bias))
    return linear(x, *last)


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


_MODELS: Final = {
    "stack": _stack,
    "feed_forward": _feed_forward,
    "towers": _towers,
    "autoencoder": _autoencoder,
    "mixture": _mixture,
}
"""The models that are no plain MLPs, by their form."""
