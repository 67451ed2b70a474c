"""Binary and multi-label classification, compared with scikit-learn's MLPClassifier."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, make_multilabel_classification
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import scale

import lt_runtime as lt

BATCH, EPOCHS = 64, 60


def fit(xp: Any, device: str, x: Any, y: Any) -> lt.MLP:
    """Builds a model with one output for each label; a row may have any number of labels."""
    model = lt.MLP([x.shape[1], 32, y.shape[1]], seed=0, device=device)
    optimizer = lt.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    step = lt.TrainStep(model, optimizer, loss="bce_with_logits", batch_size=BATCH)
    rng, count = np.random.default_rng(0), len(x) // BATCH
    for _ in range(EPOCHS):
        for rows in np.split(rng.permutation(len(x))[: count * BATCH], count):
            step(xp.asarray(x[rows]), xp.asarray(y[rows]))
    return model


def main(xp: Any, device: str) -> dict[str, tuple[float, float]]:
    """Returns for each task the areas under the ROC curve on held-out rows: lt_runtime's and scikit-learn's."""
    binary = load_breast_cancer(return_X_y=True)
    several = make_multilabel_classification(1500, 20, n_classes=4, random_state=0)
    areas = {}
    for name, (x, y) in {"binary": binary, "multi-label": several}.items():
        x, y = scale(x).astype(np.float32), y.reshape(len(y), -1).astype(np.float32)
        x, x_test, y, y_test = train_test_split(x, y, random_state=0)
        logits = fit(xp, device, x, y)(xp.asarray(x_test))
        ours = roc_auc_score(y_test, logits.get() if hasattr(logits, "get") else logits)
        other = MLPClassifier(hidden_layer_sizes=(32,), batch_size=BATCH, max_iter=EPOCHS, random_state=0)
        other.fit(x, y.ravel() if y.shape[1] == 1 else y)
        theirs = other.predict_proba(x_test)
        areas[name] = ours, roc_auc_score(y_test, theirs[:, -1] if y.shape[1] == 1 else theirs)
    return areas
