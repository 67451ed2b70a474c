"""An estimator in the manner of scikit-learn, with fit, predict and score, made of `lt.fit`."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

import lt_runtime as lt


class Classifier:
    """Classifies rows by an MLP with one hidden layer. A tenth of the rows decides when training stops."""

    def __init__(self, hidden: int = 32, epochs: int = 40, patience: int = 5, device: object = "auto") -> None:
        self.hidden, self.epochs, self.patience, self.device = hidden, epochs, patience, device

    def fit(self, x: Any, labels: Any, batch: int = 64) -> Self:
        """Trains on rows x (M, inputs) with labels (M,), which may be any values."""
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        rng, x = np.random.default_rng(0), np.asarray(x, np.float32)
        order, held = rng.permutation(len(x)), len(x) // 10

        def batches() -> Any:
            rows = rng.permutation(order[held:])
            for start in range(0, len(rows) - batch + 1, batch):
                each = rows[start : start + batch]
                yield x[each], numbers[each]

        self.model_ = lt.MLP([x.shape[1], self.hidden, len(self.classes_)], "relu", seed=0, device=self.device)
        step = lt.TrainStep(self.model_, lt.AdamW(self.model_.parameters(), lr=1e-2), batch_size=batch)
        valid = [(x[order[:held]], numbers[order[:held]])]
        self.history_ = lt.fit(step, batches, epochs=self.epochs, valid=valid, patience=self.patience)
        return self

    def predict(self, x: Any) -> Any:
        """Returns the most likely class of each row."""
        device = self.model_.device
        return self.classes_[device.to_host(self.model_(device.asarray(np.asarray(x, np.float32)))).argmax(axis=1)]

    def score(self, x: Any, labels: Any) -> float:
        """Returns the share of rows that are classified correctly."""
        return float(np.mean(self.predict(x) == labels))


def main(device: object = "auto") -> list[float]:
    """Fits the estimator to points within and outside a circle; returns the losses of the epochs."""
    x = np.random.default_rng(1).uniform(-1, 1, (2000, 2))
    labels = np.where((x * x).sum(1) < 0.6, "inside", "outside")
    classifier = Classifier(device=device).fit(x[:1500], labels[:1500])
    for each in classifier.history_[::5]:
        print(f"epoch {each.epoch}: loss {each.loss:.4f}, validation {each.valid_loss:.4f}")
    print(f"accuracy on other points {classifier.score(x[1500:], labels[1500:]):.3f}")
    return [each.loss for each in classifier.history_]


if __name__ == "__main__":
    main()
