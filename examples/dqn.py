"""DQN with a target network: the moving average of the network's parameters gives the value of the next state."""

from __future__ import annotations

from typing import Any

import numpy as np

import lt_runtime as lt

LENGTH, ACTIONS, ACTORS, BATCH, STEPS, DISCOUNT = 8, 2, 32, 128, 500, 0.9
STATES = np.eye(LENGTH, dtype=np.float32)


def walk(places: Any, actions: Any) -> tuple[Any, Any]:
    """A corridor: action 1 goes right, 0 left. The right end gives a reward of 1, and leads back to the left end."""
    moved = np.clip(places + 2 * actions - 1, 0, LENGTH - 1)
    arrived = moved == LENGTH - 1
    return np.where(arrived, 0, moved), arrived.astype(np.float32)


def loss_of_taken(outputs: Any, target: Any, gradient: Any, stream: Any) -> Any:
    """The squared error of the taken actions' values: the target has a 1 for the taken action, and then the value."""
    actions = outputs.shape[1]
    error = target[:, :actions] * (outputs - target[:, actions:])
    gradient[...] = 2.0 / len(outputs) * error
    return (error * error).sum() / len(outputs)


def main(device: object = "auto") -> list[float]:
    """Trains the network; prints and returns the mean losses of groups of steps. Prints the rewards as well."""
    rng = np.random.default_rng(0)
    model, goal = (lt.MLP([LENGTH, 32, ACTIONS], "tanh", seed=0, device=device) for _ in range(2))
    optimizer, ema = lt.AdamW(model.parameters(), lr=1e-2, weight_decay=0), lt.EMA(model, decay=0.8)
    step = lt.TrainStep(model, optimizer, loss=loss_of_taken, batch_size=BATCH, ema=ema)
    places, memory, losses, rewards = rng.integers(0, LENGTH - 1, ACTORS), [], [], 0.0
    for i in range(1, STEPS + 1):
        best = model.device.to_host(model(model.device.asarray(STATES[places]))).argmax(axis=1)
        actions = np.where(rng.random(ACTORS) < 0.2, rng.integers(0, ACTIONS, ACTORS), best)
        after, reward = walk(places, actions)
        memory.append((places, actions, reward, after))
        places, rewards = after, rewards + float(reward.sum())

        chosen = rng.integers(0, len(memory), BATCH // ACTORS)
        before, taken, gained, later = (np.concatenate(each) for each in zip(*(memory[j] for j in chosen), strict=True))
        value = model.device.to_host(goal(model.device.asarray(STATES[later]))).max(axis=1)
        target = np.c_[np.eye(ACTIONS)[taken], gained + DISCOUNT * value * (gained == 0)].astype(np.float32)
        step(model.device.asarray(STATES[before]), model.device.asarray(target))
        ema.copy_to(goal)
        if i % 100 == 0:
            losses.append(step.metrics().loss)
            print(f"step {i}: loss {losses[-1]:.4f}, reward of an actor and step {rewards / 100 / ACTORS:.3f}")
            rewards = 0.0
    return losses


if __name__ == "__main__":
    main()
