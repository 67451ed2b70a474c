"""Checks of the programs' figures, the same on the CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np

from tests.programs import actor_critic, autoencoder, classification, pytorch_weights, regression, residual


def check_regression(xp: Any, device: str) -> None:
    figures = regression.main(xp, device)
    assert figures["ours"] >= figures["scikit-learn"] - 0.005, figures
    assert figures["ours"] > 0.97


def check_classification(xp: Any, device: str) -> None:
    for name, (ours, theirs) in classification.main(xp, device).items():
        assert ours >= theirs - 0.005, name
        assert ours > 0.9


def check_residual(xp: Any, device: str) -> None:
    for name, error in residual.main(xp).items():
        assert error < 1e-3, name


def check_actor_critic(xp: Any, device: str) -> None:
    figures = actor_critic.main(xp, device)
    assert figures["last"] > figures["first"] + 0.08, figures


def check_autoencoder(xp: Any, device: str) -> None:
    figures = autoencoder.main(xp)
    assert figures["last"] < 0.15 * figures["first"], figures
    assert figures["error"] < 1e-5


def check_example(path: Path, device: str) -> None:
    """Checks that the losses that the program's `main` returns fall."""
    first, *_, last = run_path(str(path))["main"](device)
    assert last < 0.5 * first


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

CHECKS = (check_regression, check_classification, check_residual, check_actor_critic, check_autoencoder)


def check_weights(xp: Any, device: str, dtype: str, state: dict[str, Any], x: Any, outputs: Any) -> None:
    """Checks that weights come back bit for bit with a learning rate of 0 and otherwise change, and that the outputs
    are PyTorch's.

    Args:
        state, x, outputs: PyTorch's weights, inputs and outputs, as NumPy arrays.
    """
    to_host, place = pytorch_weights.to_host, xp.asarray
    y, back = pytorch_weights.main(xp, device, dtype, state, place(x))
    bound = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(to_host(y).astype(np.float64), outputs.astype(np.float64), rtol=bound, atol=bound)
    assert {*back} == {*state}
    for name, array in back.items():
        assert to_host(array).tobytes() == state[name].tobytes(), name
    _, trained = pytorch_weights.main(xp, device, dtype, state, place(x), lr=0.1)
    assert all(to_host(array).tobytes() != state[name].tobytes() for name, array in trained.items())
