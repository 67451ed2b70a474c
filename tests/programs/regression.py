"""Regression with early stopping, compared with scikit-learn's MLPRegressor."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import make_friedman1
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor

import lt_runtime as lt

BATCH, PATIENCE, EPOCHS = 100, 10, 60


def main(xp: Any, device: str) -> dict[str, float]:
    """Returns R² on held-out rows: lt_runtime's and scikit-learn's."""
    x, y = make_friedman1(3000, noise=0.1, random_state=0)
    x, y = (x * 2 - 1).astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)
    x, x_test, y, y_test = train_test_split(x, y, random_state=0)
    x, x_valid, y, y_valid = train_test_split(x, y, test_size=0.1, random_state=0)

    model = lt.MLP([10, 64, 64, 1], seed=0, device=device)
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = lt.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4, schedule=lt.schedules.warmup_cosine(50, steps))
    step = lt.TrainStep(model, optimizer, loss="mse", batch_size=BATCH)
    rng, best, since, kept = np.random.default_rng(0), np.inf, 0, None
    validation = xp.asarray(x_valid), xp.asarray(y_valid[:, None])
    for _ in range(EPOCHS):
        for rows in np.split(rng.permutation(len(x))[: len(x) // BATCH * BATCH], len(x) // BATCH):
            step(xp.asarray(x[rows]), xp.asarray(y[rows, None]))
        loss = lt.evaluate(model, [validation], loss="mse").loss
        since = 0 if loss < best else since + 1
        if not since:
            best, kept = loss, model.state_dict()
        if since == PATIENCE:
            break
    model.load_state_dict(kept)

    predicted = model(xp.asarray(x_test))
    ours = r2_score(y_test, predicted.get() if hasattr(predicted, "get") else predicted)
    options = {"learning_rate_init": 3e-3, "early_stopping": True, "n_iter_no_change": PATIENCE, "max_iter": EPOCHS}
    other = MLPRegressor(hidden_layer_sizes=(64, 64), random_state=0, **options)
    return {"ours": ours, "scikit-learn": other.fit(x, y).score(x_test, y_test)}
