"""narrow_n.cu, narrow_k.cu and narrow_m.cu: matrix products with one tiny dimension, bound by memory latency."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, define
from lt_runtime.kernels.tiling import MAX_GRID_Y, OCTET, THREADS, WARP, Tiling, are_aligned, next_power_of_two, wave_of
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import DType, MatmulProblem, Spec

MAX_WIDTH: Final = 16
"""The largest size of the tiny dimension that the kernels support."""
# Number of resident threads of a multiprocessor that hides the latency of memory.
_BUSY_THREADS: Final = 1024
# Rows that a thread computes if there are many more rows than threads that the GPU runs at a time; otherwise it is one.
_SHARED_ROWS: Final = 4
# Columns that a thread of narrow_m computes.
_QUAD: Final = 4
# Threads of a block of narrow_k for an epilogue without sums over rows.
_K_THREADS: Final = 128
# Largest number of octets (eight columns each) across a block of narrow_k that also sums over rows.
_SUM_OCTETS: Final = 4
# Largest number of quads (four columns each) across a block of narrow_m: 64 columns.
_MAX_SIDE: Final = 16
# If a thread of narrow_m had more rows of the large dimension K than this, several blocks share them.
_LONG: Final = 16
# Fewest rows of K that each thread of narrow_m keeps if several blocks share them.
_PART: Final = 4
_DERIVATIVES: Final = (Epilogue.DRELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU, Epilogue.DGELU_BGRAD)


NARROW_N: Final = Entry("narrow_n", "narrow_n.cu")
NARROW_K: Final = Entry("narrow_k", "narrow_k.cu")
NARROW_M: Final = Entry("narrow_m", "narrow_m.cu")


class _Form(NamedTuple):
    """Which kernel computes a product, and the matrices as this kernel reads them.

    Attributes:
        entry: the kernel: NARROW_N, NARROW_K or NARROW_M, named for the tiny dimension.
        width: size of the tiny dimension.
        matrices: A, B, C and D, all row-major; D's spec stands in for an absent C. narrow_n reads Bᵀ, narrow_m Aᵀ.
    """

    entry: Entry
    width: int
    matrices: list[Spec]


def supports(problem: MatmulProblem) -> bool:
    """Whether a kernel computes the product: x · Wᵀ with a tiny N, dy · W with a tiny K, or dyᵀ · x with a tiny M.

    x, W, dy and the results are row-major.
    """
    return _form_of(problem) is not None


def _form_of(problem: MatmulProblem) -> _Form | None:
    """The form of a product for the first kernel that supports it; None if no kernel does."""
    alike = problem.dtype is problem.d_dtype and problem.dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    if not alike or problem.is_empty or problem.batch != 1 or problem.device_scalars or not _fits_aux(problem):
        return None
    a, b, d = problem.a, problem.b, problem.d
    kinds = (
        (NARROW_N, problem.n, a, b.transposed, (Epilogue.BIAS,)),
        (NARROW_K, problem.k, a, b, _DERIVATIVES),
        (NARROW_M, problem.m, a.transposed, b, (Epilogue.BGRADA,)),
    )
    for entry, width, first, second, epilogues in kinds:
        lying = [_row_major(each) for each in (first, second, problem.c or d, d)]
        matrices = [each for each in lying if each is not None]
        if width <= MAX_WIDTH and problem.epilogue in (Epilogue.NONE, *epilogues) and len(matrices) == len(lying):
            return _Form(entry, width, matrices)
    return None


def _fits_aux(problem: MatmulProblem) -> bool:
    """Whether the auxiliary matrix is supported: row-major, as D, with a derivative's epilogue; otherwise absent."""
    aux, d = problem.aux, problem.d
    if aux is None:
        return not problem.epilogue.is_derivative
    return problem.epilogue.is_derivative and aux.layout.order is d.layout.order is Order.ROW


def _row_major(spec: Spec) -> Spec | None:
    """The matrix as a row-major one; None if it is column-major. A single row or column counts as either."""
    layout = spec.layout
    if layout.order is Order.ROW:
        return spec
    if layout.cols == 1:
        return Spec(Layout(layout.rows, 1, Order.ROW, 1), spec.alignment)
    if layout.rows == 1 and layout.leading_dimension == 1:
        return Spec(Layout(1, layout.cols, Order.ROW, layout.cols), spec.alignment)
    return None


_Geometry: TypeAlias = tuple[Tiling, int | None, int]
"""Work division of a narrow product: tiling, rows per thread, number of partial sums.

The rows per thread are None for narrow_m, which is not compiled for a number of rows. The number of partial sums
is that of the blocks in a column of the grid, which add up their sums; 0 if the kernel needs none.
"""


def _share_rows(problem: MatmulProblem, width: int, aligned: bool, device: int) -> _Geometry:
    """Tiling of narrow_n: one thread for each octet of a row of A, or for several if the GPU has too few threads.

    Rows are divided among at least one block for each SM, if there are enough rows.
    """
    busy, octets = wave_of(device, _BUSY_THREADS), -(-problem.k // OCTET)
    least = max(width, min(OCTET, next_power_of_two(octets)))
    lanes = min(THREADS, max(least, next_power_of_two(octets)))
    while lanes > least and problem.m * lanes > busy:
        lanes //= 2
    many = aligned and lanes <= WARP and problem.m * lanes >= _SHARED_ROWS * busy
    rows = _SHARED_ROWS if many else 1
    threads = THREADS
    while threads > max(WARP, lanes) and 2 * problem.m * lanes < threads * rows * wave_of(device, 1):
        threads //= 2
    y = threads // lanes
    return Tiling((-(-problem.m // (y * rows)), 1), (lanes, y)), rows, 0


def _share_octets(problem: MatmulProblem, aligned: bool, device: int) -> _Geometry:
    """Tiling of narrow_k without sums over rows: a thread computes an octet of D in one row or in several rows."""
    octets = -(-problem.n // OCTET)
    many = aligned and problem.m * octets >= _SHARED_ROWS * wave_of(device, _BUSY_THREADS)
    rows = _SHARED_ROWS if many else 1
    x = min(WARP, next_power_of_two(octets))
    lines = -(-problem.m // rows)
    y = min(_K_THREADS // x, next_power_of_two(lines))
    return Tiling((-(-octets // x), min(-(-lines // y), MAX_GRID_Y)), (x, y)), rows, 0


def _share_strips(problem: MatmulProblem, aligned: bool, device: int) -> _Geometry:
    """Tiling of narrow_k with sums over rows: one block for each strip of columns, or several if there are many rows.

    If a block can have a thread for each row, it computes its strip alone and waits for no other block; strips are then
    so narrow that all multiprocessors have one. A multiprocessor holds one such block, because a thread that has all
    rows of B in flight needs many registers.
    """
    wave, octets = wave_of(device, 1), -(-problem.n // OCTET)
    x, is_alone = min(_SUM_OCTETS, next_power_of_two(octets)), problem.m <= THREADS
    if is_alone:
        x = min(x, next_power_of_two(-(-octets // wave)))
    y, strips = min(THREADS // x, next_power_of_two(problem.m)), -(-octets // x)
    most = 1 if is_alone else max(1, wave // strips)
    rows = _SHARED_ROWS if aligned and problem.m > most * y else 1
    parts = min(most, -(-problem.m // (rows * y)))
    return Tiling((strips, parts), (x, y)), rows, OCTET


def _share_terms(problem: MatmulProblem, device: int) -> _Geometry:
    """Tiling of narrow_m: strips of columns, narrow enough to occupy the GPU; blocks share the rows of a long strip."""
    wave = wave_of(device, 2)
    quads = -(-(problem.n + problem.epilogue.sums_operand) // _QUAD)
    widest = min(_MAX_SIDE, next_power_of_two(quads))
    x = min(widest, next_power_of_two(-(-quads // wave)))
    parts = 1
    if problem.k > _LONG * THREADS // x:
        x = widest
        y = THREADS // x
        parts = max(1, min(wave // -(-quads // x), -(-problem.k // (_PART * y)), MAX_GRID_Y))
    y = min(THREADS // x, max(WARP // x, next_power_of_two(problem.k)))
    return Tiling((-(-quads // x), parts), (x, y)), None, _QUAD * problem.m


class NarrowPass:
    """Computes a product that `supports` accepts, with its epilogue, in one kernel.

    Attributes:
        tiling: blocks and threads.
        scratch_bytes: bytes for sums over parts of K or M. They lie in the stream's workspace, because its scratch
            memory may hold an operand.
        tickets: number of counters for blocks that share sums.

    Raises:
        PlanError: no kernel supports the product.
    """

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        form = _form_of(problem)
        if form is None:
            raise PlanError(f"the kernel for narrow products does not take {problem}")
        entry, epilogue = form.entry, problem.epilogue
        self._has_c, self._has_aux = problem.c is not None, problem.aux is not None
        self._has_vector = epilogue is not Epilogue.NONE
        aligned, width = _is_aligned(form, problem), next_power_of_two(form.width)
        self.tiling, rows, sums = _geometry(entry, problem, aligned, width, device)
        (columns, parts), (x, _) = self.tiling
        self.scratch_bytes = 4 * parts * columns * x * sums if parts > 1 else 0
        self.tickets = columns if self.scratch_bytes else 0
        macros = narrow_macros(problem.dtype, width, aligned, rows, epilogue if entry is NARROW_K else None)
        params = entry.params(*map(Matrix.of, form.matrices), rows=problem.m, cols=problem.n, depth=problem.k)
        params.aux = Matrix.of(problem.aux, is_mask=_reads_mask(epilogue))
        self._launches = Launches(entry, macros, device, self.tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the product on `memory.stream`; the caller must hold `memory.lock`."""
        params, launch = self._launches[memory.stream]
        a, b, c, vector, aux, d = call.addresses
        alpha, beta = call.scalars
        params.a.data, params.b.data, params.d.data = a, b, d
        params.c.data = c if self._has_c and beta else 0
        params.vector = vector if self._has_vector else 0
        params.aux.data = aux if self._has_aux else 0
        params.alpha, params.beta = alpha, beta
        if self.scratch_bytes:
            params.partial, params.tickets = memory.workspace, memory.tickets
        launch()


def _geometry(entry: Entry, problem: MatmulProblem, aligned: bool, width: int, device: int) -> _Geometry:
    if entry is NARROW_N:
        return _share_rows(problem, width, aligned, device)
    if entry is NARROW_M:
        return _share_terms(problem, device)
    share = _share_strips if problem.epilogue.has_bias_gradient else _share_octets
    return share(problem, aligned, device)


def _reads_mask(epilogue: Epilogue) -> bool:
    return epilogue.is_derivative and epilogue.activation == "relu"


def _is_aligned(form: _Form, problem: MatmulProblem) -> bool:
    """Whether all matrices that the kernel moves in octets have aligned rows of whole octets; see `are_aligned`."""
    (a, b, c, d), aux = form.matrices, None if _reads_mask(problem.epilogue) else problem.aux
    moved = {NARROW_N: (a, b), NARROW_K: (b, c, d, aux), NARROW_M: (b,)}
    return are_aligned(problem.dtype, *moved[form.entry])


def narrow_macros(dtype: DType, width: int, aligned: bool, rows: int | None, epilogue: Epilogue | None) -> Macros:
    """Preprocessor definitions of a narrow kernel; `rows` and `epilogue` are None if it lacks these."""
    shared = define() if rows is None else define(ROWS=rows)
    macros = (*define(SCALAR=dtype, WIDTH=width), *shared, *define(ALIGNED=aligned))
    if epilogue is None:
        return macros
    aux = 2 if _reads_mask(epilogue) else epilogue.is_derivative
    return (*macros, *define(AUX=aux, SUMS=epilogue.has_bias_gradient))
