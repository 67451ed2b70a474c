"""Blocks that contain blocks: in sequence (`Chain`), with a residual connection, or in parallel."""

from __future__ import annotations

import inspect
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
    """Runs blocks in sequence. Neighbouring `Linear` blocks run as one group of layers, as in `lt.MLP`.

    Parts are named by their index. A chain within a chain is flattened: its parts run as parts of the outer chain.

    Args:
        blocks: one or more.

    Raises:
        ArgumentError: there are no blocks, or an argument is no block.
        ShapeError: a block takes another number of columns than the block before gives.
    """

    has_range: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False

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
        self._steps: list[Any] = []  # what forward runs in order: a block, or a list of neighbouring linear layers
        for is_linear, group in groups:
            self._steps += [[*group]] if is_linear else group

    def parts(self) -> Iterable[tuple[str, Any]]:
        """See `Block`."""
        return [(str(i), block) for i, block in enumerate(self.sequence)]

    def forward(self, x: Any, run: Pass, add: Any = None, out: Any = None) -> Any:
        """See `Block`. The last part adds `add` to its outputs, and writes them into the buffer `out`."""
        for i, step in enumerate(self._steps, 1):
            is_last = i == len(self._steps)
            more = {"add": add} if add is not None and is_last else {}
            if isinstance(step, list):
                x = forward_layers(step, x, run, **more, out=out if is_last else None)
            elif out is not None and is_last:
                x = _forward_into(out, step, x, run, **more)
            else:
                x = step.forward(x, run, **more)
        return x

    def backward(self, dy: Any, run: Pass, add: Any = None) -> Any:
        """See `Block`; the first part adds `add` to its dx."""
        held = [dy]
        del dy  # `held` has the only reference, so that each gradient is freed after its last reader
        for i, step in reversed([*enumerate(self._steps)]):
            more = {"add": add} if add is not None and i == 0 else {}
            if isinstance(step, list):
                dx = backward_layers(step, held, run, **more)
            else:
                dx = step.backward(held.pop(), run, **more)
            held[:] = [dx]
            del dx
        return held.pop()


def _flat(blocks: Iterable[Block]) -> Iterable[Block]:
    """The blocks, with every `Chain` replaced by the blocks in it."""
    for block in blocks:
        if type(block) is Chain:
            yield from _flat(block.sequence)
        else:
            yield block


def _forward_into(out: Any, block: Any, x: Any, run: Pass, **more: Any) -> Any:
    """Runs a block's forward with `out` as the buffer of its outputs; copies them if the block takes no `out`."""
    if "out" in inspect.signature(block.forward).parameters:
        return block.forward(x, run, out=out, **more)
    y = block.forward(x, run, **more)
    run.release(y)
    return dropout(y, 0.0, out=out, stream=run.stream)


class Residual(Block):
    """y = x + block(x).

    Args:
        block: a block with as many outputs as inputs.
    """

    has_range: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False

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
    """Several blocks (towers) in parallel, whose outputs are concatenated or added.

    Args:
        towers: two or more blocks.
        join: "concatenate" the towers' columns in their order, or the "sum" of equally wide outputs.
        split: whether x is a tuple with an array for each tower; False gives all towers the same x.

    Raises:
        ArgumentError: fewer than two towers, or one that is no block.
        ShapeError: outputs to be added have different widths, or a tower that shares x takes another width.
    """

    has_range: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False

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
        self._widths: list[Any] = widths
        self._sizes = widths + inputs
        self.outputs = widths[0] if join == "sum" else None if None in widths else sum(filter(None, widths))

    def parts(self) -> Iterable[tuple[str, Any]]:
        """See `Block`."""
        return [(str(i), tower) for i, tower in enumerate(self.towers)]

    def forward(self, x: Any, run: Pass) -> Any:
        """See `Block`."""
        xs = self._inputs(x)
        if self.join == "concatenate" and None not in self._sizes:
            return self._side_by_side(xs, run)
        outputs = [tower.forward(each, run) for tower, each in zip(self.towers, xs, strict=True)]
        if self.join == "sum":
            total = outputs[0]
            for each in outputs[1:]:
                total = add(total, each, stream=run.stream)
            return total
        run.keep([each.shape[-1] for each in outputs])
        whole = _new_rows(outputs[0], sum(each.shape[-1] for each in outputs), run.stream)
        for part, each in zip(_columns(whole, [each.shape[-1] for each in outputs]), outputs, strict=True):
            dropout(each, 0.0, out=part, stream=run.stream)  # a copy
        return whole

    def _side_by_side(self, xs: Sequence[Any], run: Pass) -> Any:
        """Forward of towers with known numbers of outputs: each writes into its columns of one array."""
        whole = _new_rows(xs[0], sum(self._widths), run.stream)
        for part, tower, each in zip(_columns(whole, self._widths), self.towers, xs, strict=True):
            _forward_into(part, tower, each, run)
            run.release(part)
        run.keep(self._widths)
        return whole

    def backward(self, dy: Any, run: Pass) -> Any:
        """See `Block`. With `split` the result is a tuple of gradients."""
        parts = [dy] * len(self.towers)
        if self.join == "concatenate":
            parts = _columns(dy, run.take())
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


def _columns(whole: Any, widths: Iterable[int]) -> list[Any]:
    """Divides an array into views of consecutive columns, of the given widths."""
    ends = [*itertools.accumulate(widths)]
    return [whole[..., start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _new_rows(like: Any, width: int, stream: Any) -> Any:
    """A new array of `like`'s kind, type and rows, with another number of columns."""
    device, shape, library = device_of("x", like), (*like.shape[:-1], width), library_of(like)
    if device == HOST:
        return np.empty(shape, like.dtype)
    return library.empty(shape, like.dtype, device, stream_handle(stream, device, library.current_stream))
