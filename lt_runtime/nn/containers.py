"""Blocks that are made of blocks: one after the other, beside an identity, or beside each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np

from lt_runtime.arguments import check_instance, flag, one_of, shown
from lt_runtime.arrays.operand import HOST, device_of, library_of
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.nn.block import Block
from lt_runtime.nn.linear import Linear, backward_layers, forward_layers
from lt_runtime.nn.run import Pass
from lt_runtime.ops.add import add
from lt_runtime.ops.dropout import dropout

JoinName: TypeAlias = Literal["concatenate", "sum"]


class Chain(Block):
    """Blocks one after the other. Neighbouring `Linear` blocks run as one group of layers, as those of `lt.MLP`.

    Parts have their index as their name; the parts of a chain within a chain run as if they were this chain's.

    Args:
        blocks: one or more.

    Raises:
        ArgumentError: there are no blocks, or an argument is no block.
        ShapeError: a block takes another number of columns than the block before gives.
    """

    has_range: ClassVar[bool] = False

    def __init__(self, *blocks: Block) -> None:
        if not blocks:
            raise ArgumentError("a chain needs one block or more")
        self.sequence: Final = blocks
        for i, block in enumerate(blocks):
            check_instance(f"number {i} of the blocks", block, Block, "an lt.Block")
        self.inputs = blocks[0].inputs
        self.outputs = blocks[0].outputs
        for i, block in enumerate(blocks[1:], 1):
            if None not in (self.outputs, block.inputs) and self.outputs != block.inputs:
                before = f"block {i - 1} ({type(blocks[i - 1]).__name__}) gives {self.outputs}"
                raise ShapeError(f"block {i} ({type(block).__name__}) takes {block.inputs} columns, {before}")
            self.outputs = block.outputs or (self.outputs if block.inputs is None else None)
        groups = itertools.groupby(_flat(blocks), lambda each: type(each) is Linear)
        self._steps: list[Any] = []  # blocks, and lists of neighbouring linear layers
        for is_linear, group in groups:
            self._steps += [[*group]] if is_linear else group

    def parts(self) -> Iterable[tuple[str, Any]]:
        """See `Block`."""
        return [(str(i), block) for i, block in enumerate(self.sequence)]

    def forward(self, x: Any, run: Pass, add: Any = None) -> Any:
        """See `Block`; the last part adds `add` to its outputs."""
        for step in self._steps:
            more = {"add": add} if add is not None and step is self._steps[-1] else {}
            x = forward_layers(step, x, run, **more) if isinstance(step, list) else step.forward(x, run, **more)
        return x

    def backward(self, dy: Any, run: Pass, add: Any = None) -> Any:
        """See `Block`; the first part adds `add` to its dx."""
        held = [dy]
        del dy  # `held` has the only reference, so that each gradient is freed after its last reader
        for step in reversed(self._steps):
            more = {"add": add} if add is not None and step is self._steps[0] else {}
            if isinstance(step, list):
                dx = backward_layers(step, held, run, **more)
            else:
                dx = step.backward(held.pop(), run, **more)
            held[:] = [dx]
            del dx
        return held.pop()


def _flat(blocks: Iterable[Block]) -> Iterable[Block]:
    """The blocks, with the blocks of chains in the chains' places."""
    for block in blocks:
        if type(block) is Chain:
            yield from _flat(block.sequence)
        else:
            yield block


class Residual(Block):
    """y = x + block(x).

    Args:
        block: gives as many columns as it takes.
    """

    has_range: ClassVar[bool] = False

    def __init__(self, block: Block) -> None:
        check_instance("block", block, Block, "an lt.Block")
        if None not in (block.inputs, block.outputs) and block.inputs != block.outputs:
            sizes = f"takes {block.inputs} columns and gives {block.outputs}"
            raise ShapeError(f"the block of a Residual {sizes}; both must be equal, to be added")
        self.inner: Final[Any] = block
        self.inputs, self.outputs = block.inputs, block.outputs

    def forward(self, x: Any, run: Pass) -> Any:
        """See `Block`."""
        return self.inner.forward(x, run, add=x)

    def backward(self, dy: Any, run: Pass) -> Any:
        """See `Block`."""
        return self.inner.backward(dy, run, add=dy)


class Parallel(Block):
    """Several towers beside each other, whose outputs are concatenated or added.

    Args:
        towers: two or more blocks.
        join: "concatenate" the towers' columns in their order, or the "sum" of equally wide outputs.
        split: whether x is a tuple with an array for each tower; False gives all towers the same x.

    Raises:
        ArgumentError: fewer than two towers, or one that is no block.
        ShapeError: outputs to be added have different widths, or a tower that shares x takes another width.
    """

    has_range: ClassVar[bool] = False

    def __init__(self, *towers: Block, join: JoinName = "concatenate", split: bool = True) -> None:
        if len(towers) < 2:
            raise ArgumentError(f"Parallel has {len(towers)} towers; it needs two or more")
        for i, tower in enumerate(towers):
            check_instance(f"number {i} of the towers", tower, Block, "an lt.Block")
        self.towers, self.split = towers, flag("split", split)
        self.join: Final = one_of("join", join, ("concatenate", "sum"))
        widths, inputs = [each.outputs for each in towers], [each.inputs for each in towers]
        for name, sizes, applies in (("give", widths, join == "sum"), ("take", inputs, not split)):
            if applies and len({*sizes} - {None}) > 1:
                raise ShapeError(f"the towers {name} {sizes} columns; with this join and split they must be equal")
        self.inputs = None if split else inputs[0]
        self._widths = widths
        self.outputs = widths[0] if join == "sum" else None if None in widths else sum(filter(None, widths))

    def parts(self) -> Iterable[tuple[str, Any]]:
        """See `Block`."""
        return [(str(i), tower) for i, tower in enumerate(self.towers)]

    def forward(self, x: Any, run: Pass) -> Any:
        """See `Block`."""
        xs = self._inputs(x)
        outputs = [tower.forward(each, run) for tower, each in zip(self.towers, xs, strict=True)]
        if self.join == "sum":
            total = outputs[0]
            for each in outputs[1:]:
                total = add(total, each, stream=run.stream)
            return total
        run.keep([each.shape[-1] for each in outputs])
        return _concatenated(outputs, run.stream)

    def backward(self, dy: Any, run: Pass) -> Any:
        """See `Block`: with `split` a tuple of gradients."""
        parts = [dy] * len(self.towers)
        if self.join == "concatenate":
            ends = [*itertools.accumulate(run.take())]
            parts = [dy[..., start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        pairs = zip(reversed(self.towers), reversed(parts), strict=True)
        found = [tower.backward(part, run) for tower, part in pairs][::-1]
        if self.split:
            return tuple(found)
        total = None
        for each in found:
            total = each if total is None or each is None else add(total, each, stream=run.stream)
        return total

    def _inputs(self, x: Any) -> Sequence[Any]:
        if not self.split:
            return [x] * len(self.towers)
        if not isinstance(x, tuple) or len(x) != len(self.towers):
            found = f"{len(x)} arrays" if isinstance(x, tuple) else shown(x)
            raise ArgumentError(f"{self.title} was given {found}; it takes a tuple of {len(self.towers)} arrays")
        return x


def _concatenated(parts: Sequence[Any], stream: Any) -> Any:
    """The columns of arrays, side by side in one new array."""
    first, library = parts[0], library_of(parts[0])
    device, ends = device_of("y", first), [*itertools.accumulate(each.shape[-1] for each in parts)]
    shape = *first.shape[:-1], ends[-1]
    if device == HOST:
        whole: Any = np.empty(shape, first.dtype)
    else:
        whole = library.empty(shape, first.dtype, device, stream_handle(stream, device, library.current_stream))
    for part, end in zip(parts, ends, strict=True):
        dropout(part, 0.0, out=whole[..., end - part.shape[-1] : end], stream=stream)  # a copy
    return whole
