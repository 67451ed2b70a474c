"""The calls that put work on a stream: the matrix product and the matrix transform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from lt_runtime.cublaslt.algorithms import Algorithm
from lt_runtime.cublaslt.attributes import MatmulDescAttribute, MatrixLayoutAttribute, MatrixTransformDescAttribute
from lt_runtime.cublaslt.descriptors import MatmulDesc, MatrixLayout, MatrixTransformDesc
from lt_runtime.cublaslt.enums import PointerMode
from lt_runtime.cublaslt.handles import Handle, pointer
from lt_runtime.cublaslt.library import call, failure, function
from lt_runtime.cublaslt.operands import Reader, Scalar, alignment_of, check_address, check_workspace, scalar_readers
from lt_runtime.cublaslt.validation import check_layout, check_pointers, read_shape, validate
from lt_runtime.cublaslt.values import MAX_ADDRESS
from lt_runtime.errors import ArgumentError, ShapeError

_PLAIN: Final = [attribute for attribute in MatrixLayoutAttribute if attribute <= MatrixLayoutAttribute.BATCH_MODE]


@dataclass(frozen=True, slots=True)
class _Checked:
    """The results of all checks of a product that depend on its descriptors alone.

    Attributes:
        revisions: of the descriptor and of the layouts. The results hold until one of them changes.
        handles: the C pointers of the descriptor and of the layouts.
        alignments: what the addresses of A to D must be multiples of, in bytes.
        mask: the largest of these, less 1.
        in_place: whether C and D may have one address.
        alpha, beta: convert α and β to what the library reads.
    """

    revisions: tuple[int, ...]
    handles: tuple[int, ...]
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
        alpha, beta: numbers, which are rounded to the descriptor's scale type; or, if its pointer mode says so, device
            addresses. The kernel reads these when it runs, so that each replay of a captured graph reads them again.
        a, b, c, d: device addresses, multiples of the element's size. Pass `d` and `d_layout` for C where there is
            none; `c` may equal `d` only if their layouts agree.
        algorithm: from `get_heuristics` or `algo_check`; with None the library asks its own heuristic, without a
            workspace.
        workspace: a device address, a multiple of 256 bytes; 0 without a workspace.
        workspace_size: its bytes, at least as many as the algorithm needs.
        stream: a stream handle.

    Raises:
        ArgumentError, ShapeError, LayoutError, DTypeError: see `validate`; or an address is missing.
        AlignmentError: an address is not a multiple of what it must be.
        CublasLtError: the library refused the call.
    """
    checked = _checked(desc, a_layout, b_layout, c_layout, d_layout)
    _check_matrices(checked, a, b, c, d)
    check_workspace(workspace, workspace_size, 0 if algorithm is None else algorithm.workspace_size)
    operation, first, second, third, fourth = checked.handles
    blob = None if algorithm is None else algorithm.blob
    call(
        "cublasLtMatmul", pointer(handle), operation, checked.alpha(alpha), a, first, b, second, checked.beta(beta),
        c, third, d, fourth, blob, workspace, workspace_size, stream,
    )  # fmt: skip


class PreparedMatmul:
    """A product that is launched many times: all work that does not depend on addresses is done once, here.

    Launches do not check addresses. Until the last launch `handle` must stay open, and the descriptors may not change,
    except for the addresses in `desc`.

    The arguments are as of `matmul`.

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
        checked = _checked(desc, a_layout, b_layout, c_layout, d_layout)
        self._handle, self._algorithm, self._handles = pointer(handle), algorithm.blob, checked.handles
        self._alpha, self._beta = checked.alpha, checked.beta
        on_host = desc.recall(MatmulDescAttribute.POINTER_MODE) == PointerMode.HOST
        usual = (1.0, 0.0) if on_host else ()  # packed once here: most launches pass one of these
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
        """Puts the product on `stream`; the arguments are as of `matmul`.

        Raises:
            ArgumentError: α or β does not fit the scale type.
            CublasLtError: the library refused the call.
        """
        desc, a_layout, b_layout, c_layout, d_layout = self._handles
        factor, c_factor = self._alphas.get(alpha) or self._alpha(alpha), self._betas.get(beta) or self._beta(beta)
        status = self._matmul(
            self._handle, desc, factor, a, a_layout, b, b_layout, c_factor, c, c_layout, d, d_layout,
            self._algorithm, workspace, workspace_size, stream,
        )  # fmt: skip
        if status:
            raise failure("cublasLtMatmul", status)


def _checked(desc: MatmulDesc, *layouts: MatrixLayout) -> _Checked:
    """The results of the checks, from memory if no descriptor has changed since the last call."""
    revisions = (desc.revision, *(layout.revision for layout in layouts))
    known: _Checked | None = desc.prepared
    if known is None or known.revisions != revisions:
        known = desc.prepared = _check(desc, layouts, revisions)
    return known


def _check(desc: MatmulDesc, layouts: tuple[MatrixLayout, ...], revisions: tuple[int, ...]) -> _Checked:
    a, b, c, d = layouts
    handles = (desc.handle, a.handle, b.handle, c.handle, d.handle)
    validate(desc, a, b, c, d)
    check_pointers(desc)
    mode, scale = desc.recall(MatmulDescAttribute.POINTER_MODE), desc.recall(MatmulDescAttribute.SCALE_TYPE)
    alignments = tuple(alignment_of(layout) for layout in layouts)
    in_place = c is d or all(c.recall(attribute) == d.recall(attribute) for attribute in _PLAIN)
    return _Checked(revisions, handles, alignments, max(alignments) - 1, in_place, *scalar_readers(mode, scale))


def _check_matrices(checked: _Checked, a: int, b: int, c: int, d: int) -> None:
    try:  # one test of all addresses together; only if it fails is each looked at
        together = a | b | c | d
        sound = a and b and c and d and 0 < together <= MAX_ADDRESS and not together & checked.mask
    except TypeError:
        sound = False
    if not sound:
        for name, address, alignment in zip("abcd", (a, b, c, d), checked.alignments, strict=True):
            check_address(name, address, alignment)
    if c == d and not checked.in_place:
        raise ArgumentError("c is d, and their layouts differ; accepted: equal layouts, or another place for C")


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
    """C = α·op(A) + β·op(B), on `stream`: converts between orders and types, scales and adds.

    Args:
        handle: see `handle`.
        desc: the transform.
        alpha, beta: as of `matmul`.
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
    second = (b or None, None if b_layout is None else b_layout.handle)
    scaled = (read_alpha(alpha), a, a_layout.handle, read_beta(beta), *second)
    call("cublasLtMatrixTransform", pointer(handle), desc.handle, *scaled, c, c_layout.handle, stream)


def _check_transformed(name: str, address: int, layout: MatrixLayout, operation: int, c: MatrixLayout) -> None:
    check_layout(name, layout)
    check_address(name.lower(), address, alignment_of(layout))
    own, wanted = read_shape(layout, operation), read_shape(c, 0)
    if own != wanted:
        raise ShapeError(f"op({name}) is {own[0]}×{own[1]}; C is {wanted[0]}×{wanted[1]}")
