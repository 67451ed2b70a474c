"""The calls that put work on a stream: the matrix product and the matrix transform."""

from __future__ import annotations

from typing import Any, Final

from lt_runtime.cublaslt.algorithms import Algorithm
from lt_runtime.cublaslt.attributes import MatmulDescAttribute, MatrixLayoutAttribute, MatrixTransformDescAttribute
from lt_runtime.cublaslt.descriptors import MatmulDesc, MatrixLayout, MatrixTransformDesc
from lt_runtime.cublaslt.enums import PointerMode
from lt_runtime.cublaslt.handles import Handle, pointer
from lt_runtime.cublaslt.library import call, failure, function
from lt_runtime.cublaslt.operands import Scalar, alignment_of, check_address, check_workspace, scalar_readers
from lt_runtime.cublaslt.validation import check_layout, check_pointers, read_shape, validate
from lt_runtime.errors import ArgumentError, ShapeError

_PLAIN: Final = [attribute for attribute in MatrixLayoutAttribute if attribute <= MatrixLayoutAttribute.BATCH_MODE]


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
    layouts = a_layout, b_layout, c_layout, d_layout
    key = (pointer(handle), algorithm, desc.revision, *(layout.revision for layout in layouts))
    known, prepared = desc.prepared
    if known != key:
        prepared = PreparedMatmul(handle, desc, *layouts, algorithm)
        prepared.kept = ()  # the descriptor that remembers it must not be kept by it
        desc.prepared = key, prepared
    for name, address, alignment in zip("abcd", (a, b, c, d), prepared.alignments, strict=True):
        check_address(name, address, alignment)
    if c == d and any(c_layout.recall(each) != d_layout.recall(each) for each in _PLAIN):
        raise ArgumentError("c is d, and their layouts differ; accepted: equal layouts, or another place for C")
    check_workspace(workspace, workspace_size, 0 if algorithm is None else algorithm.workspace_size)
    prepared(alpha, a, b, beta, c, d, workspace, workspace_size, stream)


class PreparedMatmul:
    """A product that is launched many times: all work that does not depend on addresses is done once, here.

    Launches do not check addresses. Until the last launch `handle` must stay open, and the descriptors may not change,
    except for the addresses in `desc`.

    The arguments are as of `matmul`.

    Attributes:
        kept: the descriptors, which the library reads at each launch.
        alignments: what the addresses of A to D must be multiples of, in bytes.

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
        algorithm: Algorithm | None,
    ) -> None:
        validate(desc, a_layout, b_layout, c_layout, d_layout)
        check_pointers(desc)
        self.kept: tuple[Any, ...] = (desc, a_layout, b_layout, c_layout, d_layout)
        self._handles = tuple(each.handle for each in self.kept)
        self.alignments = [alignment_of(layout) for layout in (a_layout, b_layout, c_layout, d_layout)]
        self._handle, self._algorithm = pointer(handle), None if algorithm is None else algorithm.blob
        ids = MatmulDescAttribute
        mode = desc.recall(ids.POINTER_MODE)
        self._alpha, self._beta = scalar_readers(mode, desc.recall(ids.SCALE_TYPE))
        usual = (1.0, 0.0) if mode == PointerMode.HOST else ()  # packed once here: most launches pass one of these
        self._alphas: dict[Scalar, Any] = {value: self._alpha(value) for value in usual}
        self._betas: dict[Scalar, Any] = {value: self._beta(value) for value in usual}
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
        try:
            factor, c_factor = self._alphas.get(alpha) or self._alpha(alpha), self._betas.get(beta) or self._beta(beta)
        except TypeError:  # what cannot be hashed is no number; the readers say so
            factor, c_factor = self._alpha(alpha), self._beta(beta)
        status = self._matmul(
            self._handle, desc, factor, a, a_layout, b, b_layout, c_factor, c, c_layout, d, d_layout,
            self._algorithm, workspace, workspace_size, stream,
        )  # fmt: skip
        if status:
            raise failure("cublasLtMatmul", status)


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
