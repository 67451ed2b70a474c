"""One launch of a matrix product."""

from __future__ import annotations

from typing import NamedTuple


class ProductCall(NamedTuple):
    """Where a product's operands are, and on which stream it runs; addresses are 0 where there is no such operand.

    Attributes:
        vector: address of the bias or the bias gradient. aux: of the auxiliary matrix.
        alpha, beta: numbers, or addresses if the problem has `device_scalars`.
    """

    a: int
    b: int
    d: int
    stream: int
    c: int = 0
    vector: int = 0
    aux: int = 0
    alpha: float = 1.0
    beta: float = 0.0
