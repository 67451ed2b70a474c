"""Activations and their derivatives against scalar formulas, published values and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_runtime.problem import ACTIVATIONS, Activation
from lt_runtime.reference import activate, derivative
from tests.support.numpy_cases import FORMULAS

PUBLISHED = [
    # Sources: tables of the standard normal distribution for Φ(1) and Φ(2); Hendrycks and Gimpel 2016 for GELU's tanh
    # form, as PyTorch and JAX evaluate it; Elfwing et al. 2018 for SiLU's minimum.
    ("gelu_erf", 1.0, 0.8413447460685429),
    ("gelu_erf", -1.0, -0.15865525393145707),
    ("gelu_erf", 2.0, 2 * 0.9772498680518208),
    ("gelu", 1.0, 0.8411919906082768),
    ("gelu", -1.0, -0.15880800939172324),
    ("gelu", 3.0, 2.996362607918227),
    ("sigmoid", 1.0, 0.7310585786300049),
    ("tanh", 1.0, 0.7615941559557649),
    ("silu", 1.0, 0.7310585786300049),
    ("silu", -1.2784645427610738, -0.27846454276107374),
    ("relu", -3.5, 0.0),
    ("leaky_relu", -3.5, -0.035),
    ("none", -3.5, -3.5),
]
SMOOTH = [name for name in ACTIVATIONS if name not in ("relu", "leaky_relu")]


def test_every_activation_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(ACTIVATIONS)


@pytest.mark.parametrize(("name", "z", "expected"), PUBLISHED)
def test_published_values(name: str, z: float, expected: float) -> None:
    assert activate(np.array([z]), Activation(name))[0] == pytest.approx(expected, rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
@settings(max_examples=60, deadline=None)
@given(z=st.floats(-60, 60), slope=st.floats(-2, 2))
def test_formulas(name: str, z: float, slope: float) -> None:
    value = activate(np.array([z]), Activation(name, slope))
    assert value.dtype == np.float64
    assert value[0] == pytest.approx(FORMULAS[name](z, slope), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", ACTIVATIONS)
@settings(max_examples=60, deadline=None)
@given(z=st.floats(-12, 12).filter(lambda z: abs(z) > 1e-2), slope=st.floats(-2, 2))
def test_derivatives(name: str, z: float, slope: float) -> None:
    # The derivative is approximated by the five-point central difference, whose error, h⁴/30 of the fifth derivative,
    # is below 1e-10.
    h, formula = 1e-3, FORMULAS[name]
    near, far = (formula(z + d, slope) - formula(z - d, slope) for d in (h, 2 * h))
    slope_there = (8 * near - far) / (12 * h)
    assert derivative(np.array([z]), Activation(name, slope))[0] == pytest.approx(slope_there, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize(
    ("name", "at_zero"),
    [
        ("none", 1), ("relu", 0), ("leaky_relu", 0.3), ("sigmoid", 0.25), ("tanh", 1), ("gelu", 0.5),
        ("gelu_erf", 0.5), ("silu", 0.5),
    ],
)  # fmt: skip
def test_derivatives_at_zero(name: str, at_zero: float) -> None:
    assert derivative(np.array([0.0, -0.0]), Activation(name, 0.3)).tolist() == [at_zero, at_zero]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_stays_nan(name: str) -> None:
    assert np.isnan(activate(np.array([math.nan], np.float32), Activation(name))).all()


def test_relu_hands_on_the_gradient_of_nan() -> None:
    assert derivative(np.array([math.nan], np.float32), Activation("relu")).tolist() == [1.0]


@pytest.mark.parametrize("name", SMOOTH)
def test_the_largest_fp32_numbers_overflow_nowhere(name: str) -> None:
    largest = float(np.finfo(np.float32).max)
    z = np.array([-largest, largest], np.float32)
    limits = {"none": (-largest, largest), "sigmoid": (0, 1), "tanh": (-1, 1)}.get(name, (0, largest))
    slopes = {"none": (1, 1), "sigmoid": (0, 0), "tanh": (0, 0)}.get(name, (0, 1))
    assert activate(z, Activation(name)).tolist() == list(limits)
    assert derivative(z, Activation(name)).tolist() == list(slopes)


def test_the_slope_has_a_meaning_for_leaky_relu_alone() -> None:
    assert Activation("gelu", 0.5) == Activation("gelu")
    assert Activation("leaky_relu", 0.5) != Activation("leaky_relu")
