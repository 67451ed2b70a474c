"""Matrix products of which one dimension is tiny, as kernels of our own: what they take is latency, and one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.launch import Launch
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import MAX_GRID_Y, OCTET, THREADS, get_kernel
from lt_runtime.kernels.params import SCALAR, Matrix, NarrowParams
from lt_runtime.kernels.tiling import Tiling, are_aligned, next_power_of_two, wave_of
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import DType, MatmulProblem, Spec

MAX_WIDTH: Final = 16
_WARP: Final = 32
_BUSY_THREADS: Final = 1024  # of a multiprocessor: with more, memory's latency is hidden by other threads' work
_SHARED_ROWS: Final = 4  # that a thread has where there is more to do than threads
_QUAD: Final = 4
_K_THREADS: Final = 128  # of a block of narrow_k, but for sums
_SUM_OCTETS: Final = 4  # side by side in a block of narrow_k whose rows are summed up: a line of the cache
_MAX_SIDE: Final = 16  # quads side by side in a block of narrow_m: 64 columns
_LONG: Final = 16  # rows that a thread of narrow_m goes through; where it would be more, blocks share them
_PART: Final = 4  # rows that it then has at least
_DERIVATIVES: Final = (Epilogue.DRELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU, Epilogue.DGELU_BGRAD)


@dataclass(frozen=True, slots=True)
class _Form:
    """A product as one of the kernels takes it: all matrices row-major.

    Attributes:
        entry: the kernel, by the dimension that is tiny.
        a, b: some as their transposes, see the kernel.
        width: of the tiny dimension.
        c, aux: None where there is none.
    """

    entry: str
    a: Spec
    b: Spec
    c: Spec | None
    d: Spec
    aux: Spec | None
    width: int


def takes(problem: MatmulProblem) -> bool:
    """Whether one of the kernels makes this product: tiny in a dimension, and its matrices lie as a layer's do."""
    return _form_of(problem) is not None


def _form_of(problem: MatmulProblem) -> _Form | None:
    """The product as the first kernel takes it that does; None if none does."""
    alike = problem.dtype is problem.d_dtype is not DType.FLOAT64
    empty = 0 in (problem.m, problem.n, problem.k)
    if not alike or empty or problem.batch != 1 or problem.device_scalars or not _fits_aux(problem):
        return None
    a, b, c, d = problem.a, problem.b, problem.c, problem.d
    none = Epilogue.NONE
    kinds = (
        ("narrow_n", problem.n, a, b.transposed, (none, Epilogue.BIAS)),
        ("narrow_k", problem.k, a, b, (none, *_DERIVATIVES)),
        ("narrow_m", problem.m, a.transposed, b, (none, Epilogue.BGRADA)),
    )
    for entry, width, first, second, epilogues in kinds:
        x, w, addend, out = _row_major(first), _row_major(second), _row_major(c or d), _row_major(d)
        fits = width <= MAX_WIDTH and problem.epilogue in epilogues
        if fits and x is not None and w is not None and addend is not None and out is not None:
            return _Form(entry, x, w, addend if c else None, out, problem.aux, width)
    return None


def _fits_aux(problem: MatmulProblem) -> bool:
    """Whether there is an auxiliary matrix where one is read, and only there; it lies as D, row-major."""
    aux, d = problem.aux, problem.d
    if aux is None:
        return not problem.epilogue.is_derivative
    return problem.epilogue.is_derivative and aux.layout.order is d.layout.order is Order.ROW


def _row_major(spec: Spec) -> Spec | None:
    """The matrix as a row-major one; None if it is not. One of a single row or column may be both."""
    layout = spec.layout
    if layout.order is Order.ROW:
        return spec
    if layout.cols == 1:
        return Spec(Layout(layout.rows, 1, Order.ROW, 1), spec.alignment)
    if layout.rows == 1 and layout.leading_dimension == 1:
        return Spec(Layout(1, layout.cols, Order.ROW, layout.cols), spec.alignment)
    return None


@dataclass(frozen=True, slots=True)
class _Geometry:
    """How a kernel's threads share a product.

    Attributes:
        rows: that a thread has at a time; None where the kernel is not compiled for it.
        sums: of a thread, which the blocks of a grid's column add up; 0 where they have none in common.
    """

    tiling: Tiling
    rows: int | None
    sums: int = 0


def _share_rows(problem: MatmulProblem, width: int, aligned: bool, device: int) -> _Geometry:
    """Of narrow_n: a thread for each octet of a row as long as the GPU has so many, and blocks for all of it."""
    busy, octets = wave_of(device, _BUSY_THREADS), -(-problem.k // OCTET)
    least = max(width, min(OCTET, next_power_of_two(octets)))
    lanes = min(THREADS, max(least, next_power_of_two(octets)))
    while lanes > least and problem.m * lanes > busy:
        lanes //= 2
    many = aligned and lanes <= _WARP and problem.m * lanes >= _SHARED_ROWS * busy
    rows = _SHARED_ROWS if many else 1
    threads = THREADS
    while threads > max(_WARP, lanes) and 2 * problem.m * lanes < threads * rows * wave_of(device, 1):
        threads //= 2
    y = threads // lanes
    return _Geometry(Tiling((-(-problem.m // (y * rows)), 1), (lanes, y)), rows)


def _share_octets(problem: MatmulProblem, aligned: bool, device: int) -> _Geometry:
    """Of narrow_k: a thread for each octet of D, or for several in a column."""
    octets = -(-problem.n // OCTET)
    many = aligned and problem.m * octets >= _SHARED_ROWS * wave_of(device, _BUSY_THREADS)
    rows = _SHARED_ROWS if many else 1
    x = min(_WARP, next_power_of_two(octets))
    lines = -(-problem.m // rows)
    y = min(_K_THREADS // x, next_power_of_two(lines))
    return _Geometry(Tiling((-(-octets // x), min(-(-lines // y), MAX_GRID_Y)), (x, y)), rows)


def _share_strips(problem: MatmulProblem, aligned: bool, device: int) -> _Geometry:
    """Of narrow_k with sums: blocks share a strip of columns, unless there are no more rows than threads.

    That one waits for no other, and its strip is as narrow as it takes to occupy the GPU. A multiprocessor holds a
    block: so many registers it takes to have all of B's rows under way.
    """
    wave, octets = wave_of(device, 1), -(-problem.n // OCTET)
    x, is_alone = min(_SUM_OCTETS, next_power_of_two(octets)), problem.m <= THREADS
    if is_alone:
        x = min(x, next_power_of_two(-(-octets // wave)))
    y, strips = min(THREADS // x, next_power_of_two(problem.m)), -(-octets // x)
    most = 1 if is_alone else max(1, wave // strips)
    rows = _SHARED_ROWS if aligned and problem.m > most * y else 1
    parts = min(most, -(-problem.m // (rows * y)))
    return _Geometry(Tiling((strips, parts), (x, y)), rows, OCTET)


def _share_terms(problem: MatmulProblem, device: int) -> _Geometry:
    """Of narrow_m: strips of columns so narrow that they occupy the GPU, and blocks that share long ones."""
    wave = wave_of(device, 2)
    quads = -(-(problem.n + problem.epilogue.sums_operand) // _QUAD)
    widest = min(_MAX_SIDE, next_power_of_two(quads))
    x = min(widest, next_power_of_two(-(-quads // wave)))
    parts = 1
    if problem.k > _LONG * THREADS // x:
        x = widest
        y = THREADS // x
        parts = max(1, min(wave // -(-quads // x), -(-problem.k // (_PART * y)), MAX_GRID_Y))
    y = min(THREADS // x, max(_WARP // x, next_power_of_two(problem.k)))
    return _Geometry(Tiling((-(-quads // x), parts), (x, y)), None, _QUAD * problem.m)


class NarrowPass:
    """A product that `takes` accepts, in one kernel."""

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        form = _form_of(problem)
        if form is None:
            raise ValueError(f"no dimension of {problem} is tiny, or its matrices do not lie as they have to")
        self._problem, self._form = problem, form
        aligned, width = _is_aligned(form, problem), next_power_of_two(form.width)
        if form.entry == "narrow_n":
            geometry = _share_rows(problem, width, aligned, device)
        elif form.entry == "narrow_m":
            geometry = _share_terms(problem, device)
        elif problem.epilogue.has_bias_gradient:
            geometry = _share_strips(problem, aligned, device)
        else:
            geometry = _share_octets(problem, aligned, device)
        self._tiling, self._sums = geometry.tiling, geometry.sums
        derivative = problem.epilogue if form.entry == "narrow_k" else None
        macros = narrow_macros(problem.dtype, width, aligned, geometry.rows, derivative)
        self._kernel = get_kernel(form.entry, macros, device)
        self._launches: dict[int, tuple[NarrowParams, Launch]] = {}

    @property
    def scratch_bytes(self) -> int:
        """Bytes of a stream's workspace for sums over parts of K or M: its scratch memory may hold an operand."""
        (columns, parts), (x, _) = self._tiling
        return 4 * parts * columns * x * self._sums if parts > 1 else 0

    @property
    def tickets(self) -> int:
        """Counters that blocks which share sums need."""
        return self._tiling.grid[0] if self.scratch_bytes else 0

    def run(self, call: Call, memory: StreamMemory) -> None:
        """Puts the product on the memory's stream; the caller holds the memory's lock."""
        params, launch = self._launches.get(memory.stream) or self._prepare(memory.stream)
        a, b, c, vector, aux, d = call.addresses
        alpha, beta = call.scalars
        params.a.data, params.b.data, params.d.data = a, b, d
        params.c.data = c if self._form.c and beta else 0
        params.vector = vector if self._problem.epilogue is not Epilogue.NONE else 0
        params.aux.data = aux if self._form.aux else 0
        params.alpha, params.beta = alpha, beta
        if self.scratch_bytes:
            params.partial, params.tickets = memory.workspace, memory.tickets
        launch()

    def _prepare(self, stream: int) -> tuple[NarrowParams, Launch]:
        """The argument block of a stream, without addresses, and the launch that it is of."""
        form, problem = self._form, self._problem
        params = NarrowParams(
            a=Matrix.at(0, form.a.layout),
            b=Matrix.at(0, form.b.layout),
            c=Matrix.at(0, form.c.layout) if form.c else Matrix(),
            d=Matrix.at(0, form.d.layout),
            rows=problem.m,
            cols=problem.n,
            depth=problem.k,
            aux=self._aux(),
        )
        self._launches[stream] = params, self._kernel.prepare(*self._tiling, params, stream)
        return self._launches[stream]

    def _aux(self) -> Matrix:
        """How the auxiliary matrix lies; a mask is one of bytes to the kernel, each eight columns of a row."""
        aux = self._form.aux
        if aux is None:
            return Matrix()
        if _reads_mask(self._problem.epilogue):
            return Matrix(0, aux.layout.leading_dimension // OCTET, 1)
        return Matrix.at(0, aux.layout)


def _reads_mask(epilogue: Epilogue) -> bool:
    return epilogue.is_derivative and epilogue.activation == "relu"


def _is_aligned(form: _Form, problem: MatmulProblem) -> bool:
    """Whether all rows that the kernel moves in vectors are whole octets on 16 bytes."""
    aux = None if _reads_mask(problem.epilogue) else form.aux
    moved = {"narrow_n": (form.a, form.b), "narrow_k": (form.b, form.c, form.d, aux), "narrow_m": (form.b,)}
    return are_aligned(problem.dtype, *moved[form.entry])


def narrow_macros(dtype: DType, width: int, aligned: bool, rows: int | None, epilogue: Epilogue | None) -> Macros:
    """What a kernel is compiled under; `rows` and `epilogue` are None where it is not compiled for them."""
    shared = () if rows is None else (("ROWS", str(rows)),)
    macros = (("SCALAR", SCALAR[dtype]), ("WIDTH", str(width)), *shared, ("ALIGNED", str(int(aligned))))
    if epilogue is None:
        return macros
    aux = 2 if _reads_mask(epilogue) else int(epilogue.is_derivative)
    return (*macros, ("AUX", str(aux)), ("SUMS", str(int(epilogue.has_bias_gradient))))
