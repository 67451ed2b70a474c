"""The memory that a launch of one of our kernels reads and writes, as far as its argument block (its parameters) tells.

Where the argument block does not tell an operand's extent, the operand is taken to end with its allocation.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from lt_runtime.kernels.kernel import Matrix, struct
from lt_runtime.kernels.tiling import Access
from tests.support.device_memory import DeviceMemory
from tests.support.races import Touch

_WRITTEN: Final = frozenset(
    (
        *("amax", "average", "bias_gradient", "claimed", "copy", "counted", "d", "db", "dgate", "dvalue", "dz"),
        *("gradient", "growth_tracker", "history", "slots"),
        *("kept", "loss", "m", "mean", "out", "partial", "parts", "preactivation", "state", "sum", "sums", "targets"),
        *("ticket", "tickets", "to", "transposed", "v", "v_max"),
    )
)
"""Members of argument blocks and tables that hold the addresses of written operands; kernels only read the others."""
_OTHERWISE: Final[Mapping[str, str]] = {
    "optimizer": "value scale",
    "optimizer_fp8": "value state",
    "matmul_forward": "aux mask",
    "mlp_fwd": "y",
    "mlp_gradients": "layers",
    "narrow_k": "vector",
    "narrow_m": "vector",
    "norm_bwd": "mean dx",
    "norm_fwd": "total rstd",
    "norm_sums": "partial dweight dbias",
    "scale": "target",
    "tally": "loss",
}
"""Exceptions from `_WRITTEN`: for a kernel, names of members of its argument block that do not follow the general rule.

A member listed here is only read if `_WRITTEN` has its name, and written if `_WRITTEN` lacks it.
"""
_SHAPES: Final[Mapping[str, tuple[str, str]]] = {
    "a": ("rows", "depth"),
    "b": ("depth", "cols"),
    "from_": ("from_rows", "from_cols"),
    "transposed": ("cols", "rows"),
}
"""The names of the members that hold the rows and columns of a matrix, if they are not `rows` and `cols`."""
_VECTORS: Final = ("bias_gradient", "sum", "sums", "vector")
"""Members that hold addresses of vectors, which have an element for each row or for each column."""
_TABLES: Final[Mapping[str, tuple[str, str]]] = {
    "optimizer": ("chunks", "OptimizerChunk"),
    "optimizer_fp8": ("tiles", "OptimizerTile"),
    "copy_rows": ("table", "Rows"),
    "mlp_bwd": ("table", "Rows"),
    "ema": ("chunks", "EmaChunk"),
    "gradient_norm": ("chunks", "GradientChunk"),
}
"""Kernels that read addresses from a table on the device.

For each kernel, the member with the table's address, and the struct of the table's rows.
"""
_BLOCKS_OF_A_CHUNK: Final = 8  # number of blocks of the kernel optimizer for each chunk of its table


class KernelCall(NamedTuple):
    """A launch of a kernel on the pretended GPU.

    Attributes:
        macros: the definitions that the kernel is compiled under.
        params: a copy of the argument block.
    """

    name: str
    macros: Mapping[str, str]
    params: Any
    grid: tuple[int, int, int]

    def touches(self, memory: DeviceMemory) -> list[Touch]:
        """Yields the accesses to operands whose addresses are in the argument block."""
        found = list[Touch]()
        for path, owner, pointer in pointers(self.params):
            # Without partial sums, `db.partial` is unused, and its address may be that of something else.
            if path != "db.partial" or self.grid[1] > 1 or self.macros.get("ALIGNED") == str(int(Access.FLAT)):
                found += memory.touched(pointer, self._size(path, owner), path, writes=self._writes(path))
        return found

    def touches_by_table(self, memory: DeviceMemory) -> Iterator[Touch]:
        """Yields the accesses to operands whose addresses are in a table on the device, as the table is now."""
        member, kind = _TABLES.get(self.name, ("", ""))
        table = getattr(self.params, member, None)
        count = {"copy_rows": self.grid[1], "mlp_bwd": 2}.get(self.name, self.grid[0])
        count //= _BLOCKS_OF_A_CHUNK if self.name == "optimizer" else 1
        for row in (struct(kind) * count).from_address(table) if table else ():
            for path, _, pointer in pointers(row):
                size = 4 * row.count if hasattr(row, "count") else None
                yield from memory.touched(pointer, size, path, writes=self._writes(path))

    def _writes(self, path: str) -> bool:
        if path in ("fp8.row_scales", "fp8.col_scales"):
            return self.macros["VECTORS"] == "1"
        makes_aux = self.name == "tile_matmul" and self.macros["DERIVATIVE"] == "0"
        return _is_written(path, "aux" if makes_aux else _OTHERWISE.get(self.name, ""))

    def _size(self, path: str, owner: Any) -> int | None:
        """Returns the number of bytes from an operand's address to its end; None if it is unknown."""
        p, field = getattr(self.params, "fp8", self.params), path.rpartition(".")[2]
        operand, kinds = getattr(owner, field), (self.macros.get("SCALAR", "float"), self.macros.get("PRODUCT"))
        item = 4 if "float" in kinds else 2
        if path.startswith("fp8"):
            item = 1
        if not isinstance(operand, Matrix):
            return item * min(p.rows, p.cols) if field in _VECTORS else None
        lengths = [getattr(owner, each, None) for each in _SHAPES.get(field, ("rows", "cols"))]
        if None in lengths:
            return None
        strides = operand.row_stride, operand.col_stride, getattr(owner, f"{field}_batch_stride", 0)
        steps = zip((*lengths, self.grid[2]), strides, strict=True)
        return item * (sum((length - 1) * stride for length, stride in steps) + 1)


@functools.cache
def _is_written(path: str, otherwise: str) -> bool:
    names = re.findall(r"[a-z_]+", path)
    return _WRITTEN.isdisjoint(names) != {*otherwise.split()}.isdisjoint(names)


def pointers(params: ctypes.Structure) -> Iterator[tuple[str, Any, int]]:
    """Yields the addresses in a struct: the path of their members, the struct that has the member, and the address."""
    start = ctypes.addressof(params)
    for path, kind, owner, place in _members(type(params)):
        address = ctypes.c_void_p.from_address(start + place).value
        if address:
            yield path, kind.from_address(start + owner), address


@functools.cache
def _members(kind: Any, prefix: str = "", start: int = 0) -> list[tuple[str, Any, int, int]]:
    """Lists a struct's members that hold addresses.

    Returns:
        For each member its path, the type and the offset of the struct that has the member, and the member's offset.
    """
    found: list[tuple[str, Any, int, int]] = []
    for field, held, *_ in kind._fields_:
        path, place = prefix + field, start + getattr(kind, field).offset
        if held in (Matrix, ctypes.c_void_p):
            found.append((path, kind, start, place + (Matrix.data.offset if held is Matrix else 0)))
        elif issubclass(held, ctypes.Structure):
            found += _members(held, f"{path}.", place)
        elif issubclass(held, ctypes.Array) and issubclass(held._type_, ctypes.Structure):
            for i in range(held._length_):
                found += _members(held._type_, f"{path}[{i}].", place + i * ctypes.sizeof(held._type_))
    return found
