"""Launches matrix products and matrix transforms on a stream, and checks their arguments."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from lt_runtime.cublaslt.algorithms import Algorithm
from lt_runtime.cublaslt.attributes import MatmulDescAttribute, MatrixLayoutAttribute, MatrixTransformDescAttribute
from lt_runtime.cublaslt.descriptors import MatmulDesc, MatrixLayout, MatrixTransformDesc
from lt_runtime.cublaslt.enums import BatchMode, DataType, PointerMode
from lt_runtime.cublaslt.library import Handle, call, failure, function, pointer
from lt_runtime.cublaslt.validation import check_pointers, element_bytes, read_shape, validate
from lt_runtime.errors import AlignmentError, ArgumentError, ShapeError

Scalar = int | float | complex
Layouts = tuple[MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout]
_Reader = Callable[[Scalar], bytes | int | None]
"""Function that converts α or β to the argument that cuBLASLt reads: a pointer to the number's bytes, or an address."""

_LAYOUT: Final = [attribute for attribute in MatrixLayoutAttribute if attribute <= MatrixLayoutAttribute.BATCH_MODE]
_T: Final = DataType
_CODES: Final = {_T.R_16F: "e", _T.R_32F: "f", _T.R_64F: "d", _T.R_32I: "i", _T.C_32F: "ff", _T.C_64F: "dd"}
# "=" selects standard sizes: with native packing, a float that is too large would silently become infinity.
_SCALARS: Final = {kind: struct.Struct(f"={code}") for kind, code in _CODES.items()}


def matmul(
    handle: Handle | int,
    desc: MatmulDesc,
    alpha: Scalar,
    a: int,
    a_layout: MatrixLayout,
    b: int,
    b_layout: MatrixLayout,
    beta: Scalar,
    c: int,
    c_layout: MatrixLayout,
    d: int,
    d_layout: MatrixLayout,
    algorithm: Algorithm | None,
    workspace: int,
    workspace_size: int,
    stream: int,
) -> None:
    """Launches D = α·op(A)·op(B) + β·C with the descriptor's epilogue on `stream`, as cublasLtMatmul.

    For a product that is launched many times, `PreparedMatmul` does the checks once.

    Args:
        handle: see `handle`.
        desc: the product.
        alpha, beta: numbers, which are rounded to the descriptor's scale type; or, if its pointer mode says so, device
            addresses. The kernel reads device addresses when it runs, so each replay of a captured graph reads them
            again.
        a, b, c, d: device addresses, multiples of the element's size. Pass `d` and `d_layout` for C where there is
            none; `c` may equal `d` only if their layouts agree.
        algorithm: from `get_heuristics` or `algo_check`; with None the library asks its own heuristic, without a
            workspace.
        workspace: a device address, a multiple of 256 bytes; 0 without a workspace.
        workspace_size: bytes of the workspace, at least as many as the algorithm needs.
        stream: a stream handle.

    Raises:
        ArgumentError, ShapeError, LayoutError, DTypeError: see `validate`; or an address is missing.
        AlignmentError: an address is not a multiple of the required alignment.
        CublasLtError: the library refused the call.
    """
    layouts = a_layout, b_layout, c_layout, d_layout
    prepared = PreparedMatmul(handle, desc, layouts, algorithm)
    for name, address, layout in zip("abcd", (a, b, c, d), layouts, strict=True):
        _check_address(name, address, _alignment_of(layout))
    if c == d and any(c_layout.recall(each) != d_layout.recall(each) for each in _LAYOUT):
        raise ArgumentError("c is d, and their layouts differ; accepted: equal layouts, or another place for C")
    least = 0 if algorithm is None else algorithm.workspace_size
    if not least <= workspace_size < 2**64:
        raise ArgumentError(f"workspace_size is {workspace_size}; accepted: {least} or more, which the algorithm needs")
    if workspace_size:
        _check_address("workspace", workspace, 256)
    prepared(alpha, a, b, beta, c, d, workspace, workspace_size, stream)


class PreparedMatmul:
    """A product that is launched many times: its constructor does all work that does not depend on addresses.

    Launches do not check addresses. Until the last launch `handle` must stay open, and the descriptors may not change,
    except for the addresses in `desc`. The arguments are those of `matmul`; `layouts` has those of A, B, C and D.

    Attributes:
        launch: the C function cublasLtMatmul, which takes the tuple that `arguments` returns, any number of times, and
            returns a status.

    Raises:
        ArgumentError, ShapeError, LayoutError, DTypeError: see `validate`.
    """

    def __init__(self, handle: Handle | int, desc: MatmulDesc, layouts: Layouts, algorithm: Algorithm | None) -> None:
        validate(desc, *layouts)
        check_pointers(desc)
        self._kept = desc, *layouts  # keeps the descriptors alive, because cuBLASLt reads them at each launch
        self._handles = tuple(each.handle for each in self._kept)
        self._handle, self._algorithm = pointer(handle), None if algorithm is None else algorithm.blob
        mode = desc.recall(MatmulDescAttribute.POINTER_MODE)
        self._alpha, self._beta = _scalar_readers(mode, desc.recall(MatmulDescAttribute.SCALE_TYPE))
        usual = (1.0, 0.0) if mode == PointerMode.HOST else ()  # α and β of most launches, which are packed once
        self._packed: dict[Scalar, Any] = {value: self._alpha(value) for value in usual}
        self.launch = function("cublasLtMatmul")

    def __call__(self, *arguments: Any) -> None:
        """Launches the product on `stream`; takes the arguments of the method `arguments`.

        Raises:
            ArgumentError: α or β does not fit the scale type.
            CublasLtError: the library refused the call.
        """
        if status := self.launch(*self.arguments(*arguments)):
            raise failure("cublasLtMatmul", status)

    def arguments(
        self, alpha: Scalar, a: int, b: int, beta: Scalar, c: int, d: int, workspace: int, size: int, stream: int
    ) -> tuple[Any, ...]:
        """The library's arguments for a launch on `stream`, from `matmul`'s arguments; `size` is its `workspace_size`.

        Raises:
            ArgumentError: α or β does not fit the scale type.
        """
        desc, a_layout, b_layout, c_layout, d_layout = self._handles
        packed = self._packed
        try:
            factor, c_factor = packed.get(alpha) or self._alpha(alpha), packed.get(beta) or self._beta(beta)
        except TypeError:  # a scalar cannot be hashed, and so is no number: the readers raise the error that names it
            factor, c_factor = self._alpha(alpha), self._beta(beta)
        return (
            self._handle, desc, factor, a, a_layout, b, b_layout, c_factor, c, c_layout, d, d_layout,
            self._algorithm, workspace, size, stream,
        )  # fmt: skip


def matrix_transform(
    handle: Handle | int,
    desc: MatrixTransformDesc,
    alpha: Scalar,
    a: int,
    a_layout: MatrixLayout,
    beta: Scalar,
    b: int,
    b_layout: MatrixLayout | None,
    c: int,
    c_layout: MatrixLayout,
    stream: int,
) -> None:
    """Launches C = α·op(A) + β·op(B) on `stream`; C may have another order and another type than A and B.

    Args:
        handle: see `handle`.
        desc: the transform.
        alpha, beta: as in `matmul`.
        a, b, c: device addresses; `b` is 0 and `b_layout` None where there is no B.
        stream: a stream handle.

    Raises:
        ArgumentError, ShapeError, AlignmentError: as for `matmul`.
        CublasLtError: the library refused the call.
    """
    ids = MatrixTransformDescAttribute
    _check_transformed("C", c, c_layout, 0, c_layout)
    _check_transformed("A", a, a_layout, desc.recall(ids.TRANSA), c_layout)
    if b_layout is not None:
        _check_transformed("B", b, b_layout, desc.recall(ids.TRANSB), c_layout)
    read_alpha, read_beta = _scalar_readers(desc.recall(ids.POINTER_MODE), desc.recall(ids.SCALE_TYPE))
    second = (b or None, None if b_layout is None else b_layout.handle)
    scaled = (read_alpha(alpha), a, a_layout.handle, read_beta(beta), *second)
    call("cublasLtMatrixTransform", pointer(handle), desc.handle, *scaled, c, c_layout.handle, stream)


def _check_transformed(name: str, address: int, layout: MatrixLayout, operation: int, c: MatrixLayout) -> None:
    layout.check_leading_dimension(f"layout of {name}: ")
    _check_address(name.lower(), address, _alignment_of(layout))
    own, wanted = read_shape(layout, operation), read_shape(c, 0)
    if own != wanted:
        raise ShapeError(f"op({name}) is {own[0]}×{own[1]}; C is {wanted[0]}×{wanted[1]}")


def _scalar_readers(mode: int, scale_type: int) -> tuple[_Reader, _Reader]:
    """Functions that convert α and β; the pointer mode says whether each is a number, an address or ignored.

    Raises:
        ArgumentError: the library does not have this scale type.
    """
    kind = DataType(scale_type)
    if kind not in _SCALARS:
        raise ArgumentError(f"the scale type is {kind.name}; accepted: {', '.join(known.name for known in _SCALARS)}")
    number, address = partial(_number, kind=kind), partial(_check_address, alignment=_SCALARS[kind].size)
    alpha: _Reader = partial(number if mode == PointerMode.HOST else address, "alpha")
    if mode == PointerMode.ALPHA_DEVICE_VECTOR_BETA_ZERO:
        return alpha, lambda _: None
    reads_number = mode in (PointerMode.HOST, PointerMode.ALPHA_DEVICE_VECTOR_BETA_HOST)
    return alpha, partial(number if reads_number else address, "beta")


def _number(name: str, value: Scalar, kind: DataType) -> bytes:
    packer = _SCALARS[kind]
    try:
        if kind is DataType.R_32I and isinstance(value, float) and value.is_integer():
            value = int(value)
        is_complex = len(packer.format) == 3
        return packer.pack(value.real, value.imag) if is_complex else packer.pack(value)
    except (struct.error, OverflowError, AttributeError) as error:
        raise ArgumentError(f"{name} is {value!r}; accepted: a number of type {kind.name}") from error


def _check_address(name: str, address: object, alignment: int) -> int:
    """Checks that a value can be a device address, and returns it.

    Raises:
        ArgumentError: the value is not an int, not positive, or too large.
        AlignmentError: the address is not a multiple of `alignment`.
    """
    if not isinstance(address, int) or not 0 < address < 2**64:
        raise ArgumentError(f"{name} is {address!r}; accepted: a device address")
    if address % alignment:
        raise AlignmentError(f"{name} is {address:#x}; accepted: a multiple of {alignment}")
    return address


def _alignment_of(layout: MatrixLayout) -> int:
    """The alignment that a matrix's address needs: an element's size, or 8 for an array of pointers to matrices."""
    if layout.recall(MatrixLayoutAttribute.BATCH_MODE) == BatchMode.STRIDED:
        return element_bytes(layout.recall(MatrixLayoutAttribute.TYPE))
    return 8
