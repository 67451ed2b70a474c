"""The calls that put work on a stream: the matrix product and the matrix transform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from lt_runtime.cublaslt.algorithms import Algorithm
from lt_runtime.cublaslt.attribute_ids import MatmulDescAttribute, MatrixLayoutAttribute, MatrixTransformDescAttribute
from lt_runtime.cublaslt.descriptors import MatmulDesc, MatrixLayout, MatrixTransformDesc
from lt_runtime.cublaslt.enums import PointerMode
from lt_runtime.cublaslt.handles import Handle, pointer
from lt_runtime.cublaslt.library import call, failure, function
from lt_runtime.cublaslt.operands import (
    MAX_ADDRESS,
    Reader,
    Scalar,
    check_address,
    check_workspace,
    matrix_alignment,
    scalar_readers,
)
from lt_runtime.cublaslt.validation import check_layout, check_pointers, read_shape, validate
from lt_runtime.errors import ArgumentError, ShapeError

_Layouts = tuple[MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout]


@dataclass(frozen=True, slots=True)
class _Checked:
    """What holds for every launch of a product, for as long as its descriptors stay in one state.

    Attributes:
        state: the descriptors' revisions.
        handles: of the descriptor and of the layouts.
        alignments: what the addresses of A to D must be multiples of. mask: the largest of them, less 1.
        in_place: whether C may be D.
        alpha, beta: turn numbers or addresses into what the library reads.
    """

    state: tuple[int, ...]
    handles: tuple[int, int, int, int, int]
    alignments: tuple[int, ...]
    mask: int
    in_place: bool
    alpha: Reader
    beta: Reader


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
    """D = α·op(A)·op(B) + β·C with the descriptor's epilogue, on `stream`. The arguments are cublasLtMatmul's.

    Args:
        handle: see `handle`.
        desc: the product.
        alpha, beta: numbers, rounded to the descriptor's scale type; device addresses if its pointer mode says so,
            which are read when the kernel runs, at each replay of a captured graph anew.
        a, b, c, d: device addresses, multiples of the element's size. Pass `d` and `d_layout` for C where there is
            none; `c` may be `d` only if their layouts agree.
        algorithm: from `get_heuristics` or `algo_check`; None has the library ask its heuristic, without a workspace.
        workspace: device address, 256-byte aligned; 0 without one.
        workspace_size: its bytes, at least what the algorithm needs.
        stream: a stream handle.

    Raises:
        ArgumentError, ShapeError, LayoutError, DTypeError: see `validate`; or an address is missing.
        AlignmentError: an address is not a multiple of what it must be.
        CublasLtError: the library refused the call.
    """
    prepared = _checked(desc, (a_layout, b_layout, c_layout, d_layout))
    _check_matrices(prepared, a, b, c, d)
    check_workspace(workspace, workspace_size, 0 if algorithm is None else algorithm.workspace_size)
    operation, first, second, third, fourth = prepared.handles
    call(
        "cublasLtMatmul",
        pointer(handle),
        operation,
        prepared.alpha(alpha),
        a,
        first,
        b,
        second,
        prepared.beta(beta),
        c,
        third,
        d,
        fourth,
        None if algorithm is None else algorithm.blob,
        workspace,
        workspace_size,
        stream,
    )


class PreparedMatmul:
    """A product that is launched again and again, with the least work: whatever does not depend on addresses is done.

    Addresses are not looked at. Until the last launch the descriptors must stay as they are but for the addresses in
    `desc`, and `handle` must stay open.

    Args:
        As of `matmul`.

    Raises:
        ArgumentError, ShapeError, LayoutError, DTypeError: see `validate`.
    """

    def __init__(
        self,
        handle: Handle | int,
        desc: MatmulDesc,
        a_layout: MatrixLayout,
        b_layout: MatrixLayout,
        c_layout: MatrixLayout,
        d_layout: MatrixLayout,
        algorithm: Algorithm,
    ) -> None:
        self._kept = desc, a_layout, b_layout, c_layout, d_layout
        checked = _checked(desc, (a_layout, b_layout, c_layout, d_layout))
        self._handle, self._algorithm, self._handles = pointer(handle), algorithm.blob, checked.handles
        self._alpha, self._beta = checked.alpha, checked.beta
        in_host_memory = desc.recall(MatmulDescAttribute.POINTER_MODE) == PointerMode.HOST
        usual = (1.0, 0.0) if in_host_memory else ()
        self._alphas: dict[Scalar, Any] = {value: checked.alpha(value) for value in usual}
        self._betas: dict[Scalar, Any] = {value: checked.beta(value) for value in usual}
        self._matmul = function("cublasLtMatmul")

    def __call__(
        self,
        alpha: Scalar,
        a: int,
        b: int,
        beta: Scalar,
        c: int,
        d: int,
        workspace: int,
        workspace_size: int,
        stream: int,
    ) -> None:
        """Puts the product on `stream`; the arguments are those of `matmul`.

        Raises:
            ArgumentError: a scalar that its type cannot hold.
            CublasLtError: the library refused the call.
        """
        desc, a_layout, b_layout, c_layout, d_layout = self._handles
        status = self._matmul(
            self._handle,
            desc,
            self._alphas.get(alpha) or self._alpha(alpha),
            a,
            a_layout,
            b,
            b_layout,
            self._betas.get(beta) or self._beta(beta),
            c,
            c_layout,
            d,
            d_layout,
            self._algorithm,
            workspace,
            workspace_size,
            stream,
        )
        if status:
            raise failure("cublasLtMatmul", status)


def _checked(desc: MatmulDesc, layouts: _Layouts) -> _Checked:
    """What holds for the descriptors in the state in which they are."""
    state = (desc.revision, *(layout.revision for layout in layouts))
    known: _Checked | None = desc.prepared
    if known is None or known.state != state:
        known = desc.prepared = _check(desc, layouts, state)
    return known


def _check(desc: MatmulDesc, layouts: _Layouts, state: tuple[int, ...]) -> _Checked:
    a, b, c, d = layouts
    handles = (desc.handle, a.handle, b.handle, c.handle, d.handle)
    validate(desc, a, b, c, d)
    check_pointers(desc)
    mode, scale = desc.recall(MatmulDescAttribute.POINTER_MODE), desc.recall(MatmulDescAttribute.SCALE_TYPE)
    alpha, beta = scalar_readers(mode, scale)
    alignments = tuple(matrix_alignment(layout) for layout in layouts)
    return _Checked(state, handles, alignments, max(alignments) - 1, c is d or _agree(c, d), alpha, beta)


def _check_matrices(prepared: _Checked, a: int, b: int, c: int, d: int) -> None:
    try:  # the least work where nothing is wrong
        together = a | b | c | d
        sound = a and b and c and d and 0 < together <= MAX_ADDRESS and not together & prepared.mask
    except TypeError:
        sound = False
    if not sound:
        for name, address, alignment in zip("abcd", (a, b, c, d), prepared.alignments, strict=True):
            check_address(name, address, alignment)
    if c == d and not prepared.in_place:
        raise ArgumentError("c is d, and their layouts differ; accepted: equal layouts, or another place for C")


_PLAIN: Final = [attribute for attribute in MatrixLayoutAttribute if attribute <= MatrixLayoutAttribute.BATCH_MODE]


def _agree(c: MatrixLayout, d: MatrixLayout) -> bool:
    return all(c.recall(attribute) == d.recall(attribute) for attribute in _PLAIN)


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
    """C = α·op(A) + β·op(B), on `stream`: copies between orders, scales, converts, adds.

    Args:
        handle: see `handle`.
        desc: the transform.
        alpha, beta: as for `matmul`.
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
    read_alpha, read_beta = scalar_readers(desc.recall(ids.POINTER_MODE), desc.recall(ids.SCALE_TYPE))
    call(
        "cublasLtMatrixTransform",
        pointer(handle),
        desc.handle,
        read_alpha(alpha),
        a,
        a_layout.handle,
        read_beta(beta),
        b or None,
        None if b_layout is None else b_layout.handle,
        c,
        c_layout.handle,
        stream,
    )


def _check_transformed(name: str, address: int, layout: MatrixLayout, operation: int, c: MatrixLayout) -> None:
    check_layout(name, layout)
    check_address(name.lower(), address, matrix_alignment(layout))
    own, wanted = read_shape(layout, operation), read_shape(c, 0)
    if own != wanted:
        raise ShapeError(f"op({name}) is {own[0]}×{own[1]}; C is {wanted[0]}×{wanted[1]}")
