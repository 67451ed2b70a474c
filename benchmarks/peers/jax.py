"""JAX's contender in the suites `steps`, `narrow` and `models`: a compiled loop of training steps.

JAX launches on streams of its own, which CUDA events on our stream cannot time, so that it is timed by the wall clock;
see `timed_by_host`. One call runs a loop of many steps, so that its time hides the host's work for a single step. This
work is included only where a contender has `_call` in its name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from benchmarks.models import NORM_EPSILON, TAKEN
from benchmarks.peers.jax_layers import ACTIVATIONS, array, check_gpu, linear
from benchmarks.steps import LEARNING_RATE, WEIGHT_DECAY, Setup, StepCase, StepContender
from benchmarks.timing import timed_by_host

_BETAS: Final = (0.9, 0.999)
_EPSILON: Final = 1e-8
Cost = Callable[[list[jax.Array], jax.Array, jax.Array], jax.Array]


def step(setup: Setup, *, called: bool = True) -> StepContender:
    """Steps whose parameters, moments and step number are donated; in BF16 parameters and moments are BF16.

    Each loop runs on one batch; called steps take the batches in turn.

    Args:
        called: whether a single step is compiled too, for calls and to learn the memory; the loop takes as long again.
    """
    check_gpu()
    case, count = setup.case, setup.case.replays
    batches = [(array(x), array(target)) for x, target in setup.batches]
    parameters = [array(each).astype(case.dtype) for each in setup.values]
    moments = [(jnp.zeros_like(each), jnp.zeros_like(each)) for each in parameters]
    averages = [] if case.decay is None else [jnp.array(each, jnp.float32) for each in parameters]
    state = (parameters, moments, averages, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))
    of = functools.partial(cost_of, case)
    train = functools.partial(trained, of=of, decay=case.decay or 0.0)
    held, source, memory = [state], itertools.cycle(batches), 0
    if called:
        one: Any = jax.jit(train, donate_argnums=0).lower(state, *batches[0]).compile()
        sizes = one.memory_analysis()
        memory = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
        memory -= sizes.alias_size_in_bytes
        held[0] = one(state, *batches[0])
        first_loss = float(held[0][-1])
    else:
        first_loss = float(jax.jit(of)(parameters, *batches[0]))

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state: Any, x: jax.Array, target: jax.Array) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, state: train(state, x, target), state)

    def replay() -> object:
        held[0] = loop(held[0], *next(source))
        return held[0]

    def calls(times: int) -> None:
        for x, target in itertools.islice(source, times):
            held[0] = one(held[0], x, target)
        jax.block_until_ready(held[0])

    def replays(times: int) -> None:
        for _ in range(-(-times // count)):
            replay()
        jax.block_until_ready(held[0])

    turn = timed_by_host(replay, count, jax.block_until_ready)
    return StepContender(replays, calls, first_loss, memory, turn)


def trained(state: Any, x: jax.Array, target: jax.Array, *, of: Cost, decay: float = 0.0) -> Any:
    """One step of AdamW in FP32 arithmetic: the new parameters, moments, moving averages, step number and loss.

    Args:
        state: parameters, moments, moving averages (an empty list if there are none), step number and loss.
    """
    parameters, moments, averages, number, _ = state
    value, gradients = jax.value_and_grad(of)(parameters, x, target)
    number = number + 1
    groups = zip(parameters, gradients, moments, strict=True)
    updated = [_adamw(parameter, gradient, *both, number) for parameter, gradient, both in groups]
    parameters = [first for first, _ in updated]
    pairs = zip(averages, parameters[: len(averages)], strict=True)
    averages = [decay * average + (1 - decay) * each.astype(jnp.float32) for average, each in pairs]
    return parameters, [both for _, both in updated], averages, number, value


def _adamw(parameter: jax.Array, gradient: jax.Array, mean: jax.Array, square: jax.Array, number: jax.Array) -> Any:
    """The parameter and its moments after an update, rounded to the types of the arguments."""
    (first, second), kept = _BETAS, parameter.dtype
    value, slope, mean, square = (each.astype(jnp.float32) for each in (parameter, gradient, mean, square))
    mean = first * mean + (1 - first) * slope
    square = second * square + (1 - second) * jnp.square(slope)
    size = jnp.sqrt(square / (1 - second**number)) + _EPSILON
    value = value * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * (mean / (1 - first**number)) / size
    return value.astype(kept), (mean.astype(kept), square.astype(kept))


# Functions that compute the losses of the models. Lists of parameters are in the order of lt_runtime's models.


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


_MODELS: Final = {each.__name__[1:]: each for each in (_stack, _feed_forward, _towers, _autoencoder, _mixture)}
"""Maps the form of each model that is no plain MLP to the function that runs it."""
