"""Arguments that the raw-pointer interface refuses before it needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from lt_runtime import raw
from lt_runtime.errors import (
    AlignmentError,
    ArgumentError,
    DeviceError,
    LtError,
    MissingLibraryError,
    OverlapError,
    ShapeError,
)

M, K, N = 8, 16, 4
BASE = 1 << 40
"""Arguments with addresses that belong to no GPU: using one would raise another error than these tests expect."""


def addresses(*names: str) -> dict[str, int]:
    return {name: BASE + 4096 * i for i, name in enumerate(names)}


FORWARD: dict[str, Any] = {
    **addresses("A", "B", "bias", "Y", "Z"),
    "m": M, "k": K, "n": N, "trans_a": False, "trans_b": False, "act": "gelu", "with_bias": True, "leaky_slope": 0.1,
    "save_z": True,
}  # fmt: skip
BACKWARD: dict[str, Any] = {
    **addresses("A", "B", "C", "gY", "Z", "gA", "gB", "gC", "gBias"),
    "m": M, "k": K, "n": N, "trans_a": False, "trans_b": False, "act": "gelu", "with_bias": True, "leaky_slope": 0.1,
}  # fmt: skip

SCALARS: list[tuple[dict[str, Any], type[LtError], str]] = [
    *(({name: -1}, ShapeError, f"{name} is -1; it must not be negative") for name in ("m", "k", "n")),
    ({"act": "softmax"}, ArgumentError, "act is 'softmax'; accepted are none, relu"),
    ({"act": "leaky_relu", "leaky_slope": float("inf")}, ArgumentError, "negative_slope is inf"),
]


def bad_addresses(names: str, required: str) -> list[tuple[dict[str, Any], type[LtError], str]]:
    """Yields arguments in which one address is replaced by 0, a misaligned or a negative address."""
    return [
        *(({name: 0}, ArgumentError, f"^{name} is 0; an address is needed for its") for name in required.split()),
        *(
            ({name: BASE + offset}, AlignmentError, f"^{name} is 0x.*; it must be a multiple of 4")
            for name in names.split()
            for offset in (1, 2)
        ),
        *(({name: -4}, AlignmentError, f"^{name} is -0x4") for name in names.split()),
    ]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *SCALARS,
        *bad_addresses("A B bias Y Z", "A B bias Y Z"),
        ({"Y": FORWARD["A"]}, OverlapError, "Y shares memory with A"),
        ({"Y": FORWARD["B"] + 4 * (K * N - 1)}, OverlapError, "Y shares memory with B"),
        ({"Y": FORWARD["bias"]}, OverlapError, "Y shares memory with bias"),
        ({"Z": FORWARD["Y"] + 4 * (M * N - 1)}, OverlapError, "Z shares memory with Y"),
    ],
)
def test_forward(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        raw.forward_raw(**{**FORWARD, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *SCALARS,
        *bad_addresses("A B C gY Z gA gB gC gBias", "A B gY Z"),
        ({"gA": BACKWARD["A"]}, OverlapError, "gA shares memory with A"),
        ({"gC": BACKWARD["gY"]}, OverlapError, "gC shares memory with gY"),
        ({"gBias": BACKWARD["gB"] + 4 * (K * N - 1)}, OverlapError, "gBias shares memory with gB"),
    ],
)
def test_backward(changes: dict[str, Any], error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        raw.backward_raw(**{**BACKWARD, **changes})


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (raw.forward_raw, FORWARD),
        (raw.forward_raw, {**FORWARD, "with_bias": False, "bias": 0, "save_z": False, "Z": 0}),
        (raw.forward_raw, {**FORWARD, "with_bias": False, "bias": 3, "save_z": False, "Z": FORWARD["A"]}),
        (raw.forward_raw, {**FORWARD, "k": 0, "A": 0, "B": 0}),
        # The two matrices touch each other without overlapping.
        (raw.forward_raw, {**FORWARD, "Y": FORWARD["A"] + 4 * M * K}),
        (raw.backward_raw, BACKWARD),
        (raw.backward_raw, {**BACKWARD, "C": 0, "gA": 0, "gB": 0, "gC": 0, "gBias": 0}),
        (raw.backward_raw, {**BACKWARD, "act": "none", "Z": 0}),
        (raw.backward_raw, {**BACKWARD, "with_bias": False, "gBias": BACKWARD["A"]}),
    ],
)
def test_what_is_absent_or_unused_is_not_judged(function: Any, arguments: dict[str, Any]) -> None:
    # The only possible error is that there is no GPU, or that an address is not a GPU's.
    with pytest.raises((MissingLibraryError, DeviceError), match=r"driver|not an address of GPU memory"):
        function(**arguments)
