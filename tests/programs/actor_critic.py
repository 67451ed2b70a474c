"""An actor and a critic that learn to walk along a corridor: the loop calls forward, backward and step itself."""

from __future__ import annotations

from typing import Any

import numpy as np

import lt_runtime as lt

PLACES, WALKERS, HORIZON, UPDATES = 12, 64, 16, 120


def walk(actor: lt.MLP, xp: Any, rng: np.random.Generator) -> tuple[Any, Any, Any, Any]:
    """Simulates walkers in a corridor, who choose their steps by the actor.

    Gives the walkers' states, actions and returns (sums of later rewards), and the mean reward: 1 at the corridor's far
    end, -0.02 for each step.
    """
    place = rng.integers(0, PLACES - 1, WALKERS)
    seen, done, earned = [], [], []
    for _ in range(HORIZON):
        x = np.eye(PLACES, dtype=np.float32)[place]
        logits = actor(xp.asarray(x))
        logits = logits.get() if hasattr(logits, "get") else logits
        right = rng.random(WALKERS) < 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
        moved = np.clip(place + np.where(right, 1, -1), 0, PLACES - 1)
        arrived = moved == PLACES - 1
        for values, value in ((seen, x), (done, right), (earned, np.where(arrived, 1.0, -0.02))):
            values.append(value)
        place = np.where(arrived, rng.integers(0, PLACES - 1, WALKERS), moved)
    returns = np.stack(earned)
    for t in range(HORIZON - 2, -1, -1):
        returns[t] += 0.9 * returns[t + 1] * (returns[t] < 0)
    flat = np.concatenate(seen), np.concatenate(done).astype(np.int32), returns.reshape(-1, 1).astype(np.float32)
    return *(xp.asarray(each) for each in flat), float(np.mean(earned))


def main(xp: Any, device: str) -> dict[str, float]:
    """Trains actor and critic; returns the mean reward of a step in the first and in the last ten updates."""
    actor = lt.MLP([PLACES, 32, 2], activation="tanh", seed=1, device=device)
    critic = lt.MLP([PLACES, 32, 1], activation="tanh", seed=2, device=device)
    optimizers = [lt.AdamW(each.parameters(), lr=1e-2, weight_decay=0) for each in (actor, critic)]
    rng, rewards = np.random.default_rng(0), []
    for _ in range(UPDATES):
        x, actions, returns, reward = walk(actor, xp, rng)
        values, kept = critic.forward(x)
        advantage = returns - values
        _, dvalues = lt.mse_loss(values, returns)
        critic.backward(dvalues, kept)
        logits, kept = actor.forward(x)
        _, dlogits = lt.cross_entropy(logits, actions)
        actor.backward(dlogits * advantage, kept)  # the policy's gradient: each row weighted by its advantage
        for optimizer in optimizers:
            optimizer.step()
        rewards.append(reward)
    return {"first": float(np.mean(rewards[:10])), "last": float(np.mean(rewards[-10:]))}
