"""A hypothesis strategy that draws descriptions of random trees of blocks (models), and the models made from them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.problem import ACTIVATIONS

GATES = ("SwiGLU", "GEGLU", "ReGLU")
HIDDEN = 4
"""Number of columns within an MLP and a gated block."""
DEPTH = 4
"""The largest depth of a tree of blocks."""


@dataclass(frozen=True)
class Tree:
    """Description of a block.

    Attributes:
        kind: name of the block's class.
        inputs, outputs: numbers of columns; `inputs` is a tuple if the block takes a tuple of arrays.
        parts: the descriptions of the blocks inside.
        options: further arguments of the class.
        shares: the linear layer whose weight this one shares, and whether transposed; None for a weight of its own.
        seed: the block's seed. Parts with the same description, their seeds included, are one block that runs again.
    """

    kind: str
    inputs: Any
    outputs: int
    parts: tuple[Tree, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    shares: tuple[Tree, bool] | None = None
    seed: int = 0

    def option(self, name: str, default: Any) -> Any:
        """An option of the block by name; if the description lacks it, the class's default."""
        return dict(self.options).get(name, default)


def build(lt: Any, tree: Tree, made: dict[Tree, Any] | None = None, **options: Any) -> Any:
    """Makes the block of a description.

    Args:
        lt: the package, or a pretended GPU's copy of it.
        made: the blocks of the model that are made already.
        options: arguments of every block with parameters: `device`, `dtype`.
    """
    made = {} if made is None else made
    if tree not in made:
        arguments = [build(lt, part, made, **options) for part in tree.parts] or _sizes(tree)
        own = dict(tree.options)
        own |= {} if tree.parts or tree.kind in ("LayerNorm", "RMSNorm") else {"seed": tree.seed}
        own |= {} if tree.parts or tree.kind == "Dropout" else options
        if tree.shares is not None:
            weight, transposed = made[tree.shares[0]].weight, tree.shares[1]
            own["weight"] = weight.T if transposed else weight
        made[tree] = getattr(lt, tree.kind)(*arguments, **own)
    return made[tree]


def _sizes(leaf: Tree) -> list[Any]:
    """The sizes as constructor arguments, for a block that contains no other blocks."""
    if leaf.kind == "MLP":
        return [[leaf.inputs, HIDDEN, leaf.outputs]]
    sizes = {"Linear": [leaf.inputs, leaf.outputs], "LayerNorm": [leaf.inputs], "RMSNorm": [leaf.inputs], "Dropout": []}
    return sizes.get(leaf.kind, [leaf.inputs, HIDDEN])


def random_state(model: Any, generator: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """Sets all parameters to random values, also those of norms and biases."""
    shapes = {each.name: tuple(each.data.shape) for each in model.parameters()}
    return {
        name: generator.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }


class _Drawing:
    """Draws one tree; remembers the leaves, so that later leaves can share their weights or be the same block."""

    def __init__(self, seed: int, activations: Sequence[str], gates: Sequence[str], widths: Sequence[int]) -> None:
        self.random, self.activations, self.gates = random.Random(seed), activations, gates
        self.widths, self.leaves = widths, list[Tree]()

    def width(self) -> int:
        return self.random.choice(self.widths)

    def tree(self, inputs: int, outputs: int, depth: int) -> Tree:
        """Draws a tree of at most the given depth."""
        is_square = inputs == outputs
        leaves = ["Linear", "Linear", "MLP"] + ["LayerNorm", "RMSNorm", "Dropout", *self.gates] * is_square
        around = ["Chain", "Chain", "Parallel"] * 2 + ["Residual"] * 4 * is_square
        kinds = leaves if depth == 1 else around if depth == DEPTH else leaves + around
        kind = self.random.choice(kinds)
        if kind == "Chain":
            return self.chain(inputs, outputs, depth)
        if kind == "Residual":
            return Tree(kind, inputs, outputs, (self.tree(inputs, outputs, depth - 1),))
        if kind == "Parallel":
            return self.parallel(inputs, outputs, depth)
        return self.leaf(kind, inputs, outputs)

    def chain(self, inputs: int, outputs: int, depth: int) -> Tree:
        """Draws two or three parts; in one of four cases a part is the previous block again, if the sizes allow it."""
        between, parts = [self.width() for _ in range(self.random.randint(1, 2))], list[Tree]()
        for sizes in itertools.pairwise([inputs, *between, outputs]):
            fits = parts and sizes == (parts[-1].inputs, parts[-1].outputs)
            again = fits and self.random.random() < 1 / 4
            parts.append(parts[-1] if again else self.tree(*sizes, depth - 1))
        return Tree("Chain", inputs, outputs, tuple(parts))

    def parallel(self, inputs: Any, outputs: int, depth: int) -> Tree:
        """Two towers, each with an input of its own if `inputs` is a tuple."""
        split, first = isinstance(inputs, tuple), self.random.randint(0, outputs - 1)
        join, widths = ("concatenate", (first, outputs - first)) if first else ("sum", (outputs, outputs))
        pairs = zip(inputs if split else (inputs, inputs), widths, strict=True)
        towers = tuple(self.tree(*pair, depth - 1) for pair in pairs)
        return Tree("Parallel", inputs, outputs, towers, (("join", join), ("split", split)))

    def leaf(self, kind: str, inputs: int, outputs: int) -> Tree:
        """Draws a block without parts; in one of three cases one that the tree already has, if the sizes allow it."""
        earlier = [each for each in self.leaves if (each.kind, each.inputs, each.outputs) == (kind, inputs, outputs)]
        if earlier and self.random.random() < 1 / 3:
            return self.random.choice(earlier)
        options: dict[str, Any] = {}
        if kind in ("Linear", "MLP"):
            options["activation"] = self.random.choice(self.activations)
        if kind in ("Linear", "MLP", *GATES):
            options["dropout"] = self.random.choice((0.0, 0.25))
        if kind in ("Linear", "MLP", "LayerNorm", *GATES):
            options["bias"] = self.random.random() < 1 / 2
        if kind in ("LayerNorm", "RMSNorm"):
            options["eps"] = 0.1  # large, so that the gradient of a row of zeros, a multiple of 1 / √eps, stays small
        if kind == "Dropout":
            options["p"] = 0.25
        shares = self.shared(inputs, outputs) if kind == "Linear" else None
        self.leaves.append(Tree(kind, inputs, outputs, (), tuple(options.items()), shares, seed=len(self.leaves)))
        return self.leaves[-1]

    def shared(self, inputs: int, outputs: int) -> tuple[Tree, bool] | None:
        """Draws the layer to share a weight with: in one of three cases an earlier layer of these sizes, else None."""
        layers = [each for each in self.leaves if each.kind == "Linear"]
        fitting = [(each, False) for each in layers if (each.inputs, each.outputs) == (inputs, outputs)]
        fitting += [(each, True) for each in layers if (each.outputs, each.inputs) == (inputs, outputs)]
        return self.random.choice(fitting) if fitting and self.random.random() < 1 / 3 else None


def random_tree(
    seed: int,
    *,
    activations: Sequence[str] = ACTIVATIONS,
    gates: Sequence[str] = GATES,
    widths: Sequence[int] = (4, 4, 4, 4, 3),
) -> Tree:
    """A model of at most four blocks above each other, with one input or, in one of four cases, two.

    Args:
        seed: decides the tree, and is the seed of the outermost block.
        activations: names of the linear layers' activations.
        gates: names of the gated blocks.
        widths: numbers of columns between blocks; the parts of a concatenation have fewer.
    """
    drawing = _Drawing(seed, activations, gates, widths)
    inputs, between, outputs = (drawing.width() for _ in range(3))
    if drawing.random.random() < 3 / 4:
        return replace(drawing.tree(inputs, outputs, DEPTH), seed=seed)
    towers = drawing.parallel((inputs, drawing.width()), between, DEPTH - 1)
    return Tree("Chain", towers.inputs, outputs, (towers, drawing.tree(between, outputs, DEPTH - 1)), seed=seed)


def trees(**choices: Any) -> st.SearchStrategy[Tree]:
    """Random trees; the arguments are those of `random_tree`. Test data are to be drawn from the outermost seed.

    The seed is hypothesis's only draw: with several, it repeats most of an example in the next one.
    """
    return st.integers(0, 2**32 - 1).map(lambda seed: random_tree(seed, **choices))
