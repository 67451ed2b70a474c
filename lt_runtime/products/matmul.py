"""`MatmulPlan`: a matrix product by cuBLASLt, with descriptors and algorithm, ready to launch."""

from __future__ import annotations

import threading
from functools import partial
from typing import Final

from lt_runtime import cublaslt
from lt_runtime.cublaslt.algorithms import Types
from lt_runtime.cublaslt.library import failure, version_text
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import CublasLtError, GpuError, PlanError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import call as driver_call
from lt_runtime.gpu.graphs import rehearse
from lt_runtime.gpu.memory import StreamMemory, workspace_size
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.tiling import are_whole
from lt_runtime.layout import Order
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products import offered
from lt_runtime.products.plan import AlgorithmPlan

_REQUESTED: Final = 8
_MAX_KERNELS: Final = 2
# Partial sums of a split K stay in FP32, because in the output type they would lose precision.
_REDUCTIONS: Final = cublaslt.ReductionScheme.NONE | cublaslt.ReductionScheme.COMPUTE_TYPE
# Stand-in for pointers that each call sets later, aligned because cuBLASLt's heuristic reads the pointers' alignment.
_ANY_ADDRESS: Final = 256
_DATA_TYPES: Final = {
    DType.FLOAT32: cublaslt.DataType.R_32F,
    DType.FLOAT16: cublaslt.DataType.R_16F,
    DType.BFLOAT16: cublaslt.DataType.R_16BF,
    DType.FLOAT64: cublaslt.DataType.R_64F,
    DType.FLOAT8_E4M3FN: cublaslt.DataType.R_8F_E4M3,
    DType.FLOAT8_E5M2: cublaslt.DataType.R_8F_E5M2,
}
_POINTERS: Final = {
    "scale_a": cublaslt.MatmulDescAttribute.A_SCALE_POINTER,
    "scale_b": cublaslt.MatmulDescAttribute.B_SCALE_POINTER,
    "scale_d": cublaslt.MatmulDescAttribute.D_SCALE_POINTER,
    "amax_d": cublaslt.MatmulDescAttribute.AMAX_D_POINTER,
}
"""Descriptor attributes for the addresses of `SCALES`. C has none: cuBLASLt before 13.4 may hang if scaleC is 0."""
_VECTORS_CAPABILITY: Final = 90
_VECTORS_VERSION: Final = 120900
_COMPUTE_TYPES: Final = {
    Compute.FLOAT32: cublaslt.ComputeType.COMPUTE_32F,
    Compute.TF32: cublaslt.ComputeType.COMPUTE_32F_FAST_TF32,
    Compute.FLOAT64: cublaslt.ComputeType.COMPUTE_64F,
}


def library_types(problem: MatmulProblem) -> Types:
    """The types by which cuBLASLt lists algorithms: compute type, type of α and β, types of A, B, C and D."""
    first, second = problem.types[::-1] if _is_swapped(problem) else problem.types
    scale = cublaslt.DataType.R_64F if problem.compute is Compute.FLOAT64 else cublaslt.DataType.R_32F
    a, b, c, d = (_DATA_TYPES[each] for each in (first, second, problem.aux_dtype, problem.d_dtype))
    return _COMPUTE_TYPES[problem.compute], scale, a, b, c, d


def _is_swapped(problem: MatmulProblem) -> bool:
    """Whether cuBLASLt computes the transpose of D, from the transposes of B and A."""
    return problem.d.layout.order is Order.ROW


def library_epilogue(epilogue: Epilogue, swapped: bool) -> cublaslt.Epilogue:
    """cuBLASLt's constant for an epilogue. Swapped operands exchange BGRADA and BGRADB, the sums of A and of B."""
    if epilogue is Epilogue.NONE:
        return cublaslt.Epilogue.DEFAULT
    if epilogue.sums_operand and swapped:
        return cublaslt.Epilogue.BGRADB if epilogue is Epilogue.BGRADA else cublaslt.Epilogue.BGRADA
    return cublaslt.Epilogue[epilogue.name]


def column_major(spec: Spec, data_type: cublaslt.DataType, batch: int) -> cublaslt.MatrixLayout:
    """The column-major layout of a matrix or a batch for cuBLASLt; a row-major matrix is described as its transpose."""
    layout = spec.layout
    rows, cols = layout.shape if layout.order is Order.COLUMN else (layout.cols, layout.rows)
    stride = spec.batch_stride if batch > 1 else 0
    extents = rows, cols, layout.leading_dimension
    return cublaslt.MatrixLayout(data_type, *extents, batch_count=batch, batch_stride=stride)


def rounds_before_epilogue(problem: MatmulProblem) -> bool:
    """Whether cuBLASLt would round twice: the product to 16 bits before the epilogue, and then the result.

    cuBLASLt 13.1 rounds twice on an H200 if rows of A, B, C or D are ragged, whether it launches one kernel or two.
    """
    specs = problem.a, problem.b, problem.d, *([problem.c] if problem.c else [])
    return _changes_16_bits(problem) and not are_whole(problem.dtype, *specs)


def _changes_16_bits(problem: MatmulProblem) -> bool:
    """Whether the product has 16 bits, and an epilogue that changes its values."""
    epilogue = problem.epilogue
    return epilogue is not Epilogue.NONE and not epilogue.sums_operand and problem.d_dtype.itemsize == 2


def rounds_over_c(problem: MatmulProblem) -> bool:
    """Whether cuBLASLt rounds a 16-bit product several times if C is D's memory. `MatmulPlan` then copies C first.

    On an H200 cuBLASLt 13.1 rounds the sum of product and bias, and adds the rounded sum to D in memory. If C lies
    elsewhere, it rounds once. Without an epilogue it also rounds before it adds to D, which is documented and not
    prevented.
    """
    return problem.c is not None and problem.epilogue is Epilogue.BIAS and problem.d_dtype.itemsize == 2


def lacks_scale_vectors(device: int) -> str | None:
    """Why cuBLASLt does not multiply FP8 matrices with vectors of scales on the GPU; None if it does.

    The documentation of cublasLtMatmul lists the scaling mode OUTER_VEC_32F for compute capability 9.0 alone.
    """
    info, version = device_info(device), cublaslt.get_version()
    if info.capability == _VECTORS_CAPABILITY and version >= _VECTORS_VERSION:
        return None
    has = f"GPU {device} ({info.name}) has compute capability {info.capability / 10} and cuBLASLt is "
    needs = f"vectors of scales need compute capability {_VECTORS_CAPABILITY / 10} and cuBLASLt "
    return f"{has}{version_text(version)}; {needs}{version_text(_VECTORS_VERSION)} or newer"


class MatmulPlan(AlgorithmPlan):
    """One matrix product on one device, with an algorithm from cuBLASLt's heuristic or a given one.

    cuBLASLt reads column-major matrices. A row-major D is the column-major Dᵀ = Bᵀ·Aᵀ, so that the operands swap. An
    operand of D's order is then read as it is, an operand of the other order with the transpose flag. Nothing is
    transposed in memory.

    Args:
        device: ordinal of the GPU, which must be current.
        rank: index of the candidate to use; None for the most promising candidate that launches at most two kernels,
            see `most_promising`.
        algorithm: the 64 bytes of an earlier plan's `algorithm.blob`, used instead of the heuristic if `check` accepts
            them.

    Attributes:
        types: the types by which cuBLASLt lists algorithms; see `library_types`.
        reductions: how an algorithm may sum the parts of a split K.
        workspace_size: bytes that cuBLASLt may use.
        candidates: the algorithms that the heuristic returns, without those known to compute wrong results; of each
            query the best first. Empty if `algorithm` is given.
        algorithm: the algorithm that is used; None if there is nothing to multiply.

    Raises:
        PlanError: there is no candidate of this rank, `check` refuses the given algorithm, or cuBLASLt's epilogue is
            less accurate than our pass.
        GpuError: the product has vectors of scales, which cuBLASLt does not support on the GPU.
    """

    def __init__(
        self, problem: MatmulProblem, device: int, rank: int | None = None, *, algorithm: bytes | None = None
    ) -> None:
        self.problem, self.device = problem, device
        self.types = library_types(problem)
        self.reductions = cublaslt.ReductionScheme.NONE if problem.no_split_k else _REDUCTIONS
        self.workspace_size = workspace_size(device)
        self.candidates: tuple[cublaslt.Algorithm, ...] = ()
        self._swapped = _is_swapped(problem)
        self._first, self._second = (problem.b, problem.a) if self._swapped else (problem.a, problem.b)
        self._lock = threading.Lock()
        self._prepared: cublaslt.PreparedMatmul | None = None
        self._set: dict[cublaslt.MatmulDescAttribute, int] = {}
        spans = (problem.batch - 1) * problem.d.batch_stride + problem.d.layout.extent
        self._copied_bytes = spans * problem.d_dtype.itemsize if rounds_over_c(problem) else 0
        vectors = cublaslt.MatmulDescAttribute.BIAS_POINTER, cublaslt.MatmulDescAttribute.EPILOGUE_AUX_POINTER
        # These objects are kept alive, because the descriptor stores their addresses.
        self._held = *vectors, *map(self._pointer, problem.scales)
        self.algorithm = None
        if not problem.is_empty:
            self._refuse_inaccurate()
            if problem.scale_vectors and (lack := lacks_scale_vectors(device)):
                raise GpuError(lack)
            self._describe()
            self.algorithm = self._choose(rank) if algorithm is None else self.check(cublaslt.Algorithm(algorithm))
            self._prepared = self._prepare(self.algorithm)

    @property
    def launches_at_most_two_kernels(self) -> bool:
        """See `AlgorithmPlan`."""
        return self.algorithm is not None and self.launches_at_most_two_kernels_by(self.algorithm)

    def _refuse_inaccurate(self) -> None:
        """Raises `PlanError` if cuBLASLt's epilogue is less accurate than our pass."""
        problem, (compute, *_, result) = self.problem, self.types
        effect = cublaslt.is_inaccurate(library_epilogue(problem.epilogue, self._swapped), compute, result)
        if effect is None and rounds_before_epilogue(problem):
            effect = "with ragged rows it rounds the product to 16 bits before the epilogue"
        if effect is not None:
            raise PlanError(f"cuBLASLt is not asked for {problem}: {effect}")

    def _choose(self, rank: int | None) -> cublaslt.Algorithm:
        """Chooses one of the algorithms that cuBLASLt's heuristic offers.

        If `rank` is given, the algorithm is the candidate with this index. Otherwise it is the one that
        `most_promising` chooses. If that launches more than two kernels, it is the first candidate or, with an
        epilogue, the first candidate that launches at most two.

        The limit of two exists because three kernels, which some algorithms launch for an epilogue, take longer than a
        plain product and a pass of ours. For a plain product small enough to fill the GPU at most once, an algorithm
        without a memset is preferred, because the memset would take as long as the product.
        """
        found = self.query(self.workspace_size, self.reductions)
        if not found and self.problem.no_split_k:
            # For some products cuBLASLt offers only algorithms that split K; a second kernel is better than no plan.
            found = self.query(self.workspace_size, _REDUCTIONS)
        splits_all = all(offered.is_split_for_nothing(self.problem, _offered(each)) for each in found)
        has_many = offered.has_many_tiles(self.problem)
        if rank is None and found and (splits_all or has_many):
            found += self.query(self.workspace_size, cublaslt.ReductionScheme.NONE)
        # Further queries allow less workspace, because they return algorithms with smaller tiles.
        if rank is None and has_many:
            for workspace in (self.workspace_size // 8, 0):
                found += self.query(workspace, cublaslt.ReductionScheme.NONE)
        self.candidates = tuple(found)
        if len(self.candidates) <= (rank or 0):
            raise PlanError(f"cuBLASLt offers {len(self.candidates)} sound algorithms for {self.problem}")
        if rank is not None:
            return self.candidates[rank]
        first = self.candidates[0]
        promising = self.candidates[offered.most_promising(self.problem, [*map(_offered, self.candidates)])]
        if self.problem.epilogue is Epilogue.NONE:
            chosen = promising if promising is first or self.launches_at_most_two_kernels_by(promising) else first
            is_short = 0.0 < chosen.waves_count <= 1.0 and not offered.is_large(self.problem)
            fitting = dict.fromkeys((chosen, *self.candidates)) if is_short else ()
            return next((each for each in fitting if {*self.nodes(each)} == {"KERNEL"}), chosen)
        for candidate in dict.fromkeys((promising, *self.candidates)):
            if self.launches_at_most_two_kernels_by(candidate):
                return candidate
        raise PlanError(f"none of cuBLASLt's {len(self.candidates)} algorithms is lean enough for {self.problem}")

    def launches_at_most_two_kernels_by(self, algorithm: cublaslt.Algorithm) -> bool:
        """Whether a launch with the given algorithm succeeds, with at most two kernels besides memsets.

        The limit is one kernel with `no_split_k`, or if a second kernel would round again (see `_is_cut_in_two`).
        """
        nodes = self.nodes(algorithm)
        most = 1 if self.problem.no_split_k or self._is_cut_in_two(algorithm) else _MAX_KERNELS
        return 0 < nodes.count("KERNEL") <= most and set(nodes) <= {"KERNEL", "MEMSET"}

    def _is_cut_in_two(self, algorithm: cublaslt.Algorithm) -> bool:
        """Whether a second kernel of the algorithm would apply the epilogue to an already rounded 16-bit product.

        If the algorithm splits K, the result is False: its second kernel then reads partial sums in FP32.
        """
        return _changes_16_bits(self.problem) and algorithm.get(cublaslt.AlgoConfigAttribute.SPLITK_NUM) <= 1

    def nodes(self, algorithm: cublaslt.Algorithm) -> list[str]:
        """The kinds of the graph nodes that one launch creates, such as "KERNEL"; empty if cuBLASLt refuses the launch.

        The launch is captured with placeholder addresses, and the graph is never run.
        """
        on_device, prepared = self.problem.device_scalars, self._prepare(algorithm)
        alpha, beta = (_ANY_ADDRESS, _ANY_ADDRESS) if on_device else (1.0, 0.0)
        a = b = d = _ANY_ADDRESS
        c = self._unread(d) if self.problem.c is None else 2 * _ANY_ADDRESS
        try:
            return rehearse(partial(prepared, alpha, a, b, beta, c, d, _ANY_ADDRESS, self.workspace_size), self.device)
        except CublasLtError:  # cuBLASLt refuses to launch some algorithms that its heuristic offers
            return []

    def _unread(self, d: int) -> int:
        """The address that cuBLASLt gets for C if the product adds no C: D's address, or NULL if D is in FP8.

        If D is in FP8, C has another type and therefore another layout than D, which cuBLASLt refuses at D's address.
        """
        return d if self._operands[2] is self._operands[3] else 0

    def _prepare(self, algorithm: cublaslt.Algorithm) -> cublaslt.PreparedMatmul:
        return cublaslt.PreparedMatmul(self.handle, self._desc, self._operands, algorithm)

    @property
    def adds_memsets(self) -> bool:
        """See `AlgorithmPlan`."""
        return self.algorithm is not None and "MEMSET" in self.nodes(self.algorithm)

    def _describe(self) -> None:
        """Creates cuBLASLt's descriptors of the operands, the transposes and the epilogue."""
        problem, batch, own = self.problem, self.problem.batch, self.problem.d.layout.order
        compute, scale, first, second, third, result = self.types
        self.handle = cublaslt.handle(self.device)
        d = column_major(problem.d, result, batch)
        c = d if problem.c is None and third is result else column_major(problem.c or problem.d, third, batch)
        self._operands = column_major(self._first, first, batch), column_major(self._second, second, batch), c, d
        attribute, operation = cublaslt.MatmulDescAttribute, cublaslt.Operation
        self._desc = desc = cublaslt.MatmulDesc(compute, scale)
        desc.set(attribute.TRANSA, operation.N if self._first.layout.order is own else operation.T)
        desc.set(attribute.TRANSB, operation.N if self._second.layout.order is own else operation.T)
        desc.set(attribute.EPILOGUE, library_epilogue(problem.epilogue, self._swapped))
        if problem.device_scalars:
            desc.set(attribute.POINTER_MODE, cublaslt.PointerMode.DEVICE)
        if problem.epilogue.has_bias or problem.epilogue.has_bias_gradient:
            desc.set(attribute.BIAS_POINTER, _ANY_ADDRESS)
            desc.set(attribute.BIAS_DATA_TYPE, _DATA_TYPES[problem.bias_dtype])
        if problem.aux is not None:
            desc.set(attribute.EPILOGUE_AUX_POINTER, _ANY_ADDRESS)
            desc.set(attribute.EPILOGUE_AUX_LD, problem.aux.layout.leading_dimension)
            desc.set(attribute.EPILOGUE_AUX_BATCH_STRIDE, problem.aux.batch_stride)
            if problem.dtype.is_float8 and problem.epilogue.activation == "gelu":
                desc.set(attribute.EPILOGUE_AUX_DATA_TYPE, _DATA_TYPES[problem.aux_dtype])
        if problem.fast_accumulation:
            desc.set(attribute.FAST_ACCUM, 1)
        for name in problem.scales:
            desc.set(self._pointer(name), _ANY_ADDRESS)
        if problem.scale_vectors:
            for mode in (attribute.A_SCALE_MODE, attribute.B_SCALE_MODE):
                desc.set(mode, cublaslt.MatmulMatrixScale.OUTER_VEC_32F)

    def _pointer(self, name: str) -> cublaslt.MatmulDescAttribute:
        """The descriptor attribute of one of `SCALES`. If the operands are swapped, our A is cuBLASLt's B."""
        exchanged = {"scale_a": "scale_b", "scale_b": "scale_a"} if self._swapped else {}
        return _POINTERS[exchanged.get(name, name)]

    def query(self, workspace: int, reductions: cublaslt.ReductionScheme) -> list[cublaslt.Algorithm]:
        """Algorithms that cuBLASLt's heuristic returns, best first, without those known to compute wrong results.

        Args:
            workspace: bytes that an algorithm may use.
            reductions: how an algorithm may sum the parts of a split K.
        """
        attribute, problem = cublaslt.PreferenceAttribute, self.problem
        with cublaslt.MatmulPreference() as preference:
            preference.set(attribute.MAX_WORKSPACE_BYTES, workspace)
            preference.set(attribute.REDUCTION_SCHEME_MASK, reductions)
            for name, spec in zip("ABCD", (self._first, self._second, problem.c or problem.d, problem.d), strict=True):
                preference.set(attribute[f"MIN_ALIGNMENT_{name}_BYTES"], spec.alignment)
            found = cublaslt.get_heuristics(self.handle, self._desc, *self._operands, preference, _REQUESTED)
        return [each for each in found if cublaslt.is_known_bad(self._facts(each)) is None]

    def check(self, algorithm: cublaslt.Algorithm) -> cublaslt.Algorithm:
        """Asks cuBLASLt whether it can run an algorithm; returns the algorithm with its workspace size.

        Launches nothing.

        Raises:
            PlanError: cuBLASLt refuses the algorithm, the algorithm is known to be wrong, needs too much workspace, or
                sums the parts of a split K in a way that is not allowed.
            CublasLtError: cuBLASLt failed for another reason.
        """
        try:
            checked = cublaslt.algo_check(self.handle, self._desc, *self._operands, algorithm)
        except CublasLtError as error:
            if not cublaslt.is_refusal(error):
                raise
            raise PlanError(f"cuBLASLt refuses the algorithm for {self.problem}: {error}") from error
        facts, most = self._facts(checked), self.workspace_size
        effect = cublaslt.is_known_bad(facts)
        if effect is not None:
            raise PlanError(f"the algorithm is known to be wrong for {self.problem}: {effect}")
        if checked.workspace_size > most:
            raise PlanError(f"the algorithm needs {checked.workspace_size} bytes of workspace; there are {most}")
        if facts.splitk > 1:
            scheme = cublaslt.ReductionScheme(checked.get(cublaslt.AlgoConfigAttribute.REDUCTION_SCHEME))
            if scheme & ~self.reductions:
                raise PlanError(f"the algorithm sums the parts of a split K as {scheme!r}; {self.problem} rules it out")
        return checked

    def _facts(self, algorithm: cublaslt.Algorithm) -> cublaslt.Candidate:
        problem, config, (m, n) = self.problem, cublaslt.AlgoConfigAttribute, offered.library_shape(self.problem)
        # The types of A and B have the same size.
        specs = [(spec.layout, problem.dtype) for spec in (problem.a, problem.b)]
        specs += [(spec.layout, problem.d_dtype) for spec in (problem.c, problem.d) if spec is not None]
        return cublaslt.Candidate(
            version=cublaslt.get_version(),
            capability=device_info(self.device).capability,
            m=m,
            n=n,
            k=problem.k,
            epilogue=library_epilogue(problem.epilogue, self._swapped),
            largest_pitch=max(layout.leading_dimension * dtype.itemsize for layout, dtype in specs),
            largest_span=max(layout.extent for layout, _ in specs),
            vector_alignment=problem.bias_alignment,
            c_alignment=_row_alignment(problem.c or problem.d, problem.d_dtype),
            d_alignment=_row_alignment(problem.d, problem.d_dtype),
            asked_alignment=algorithm.capability(cublaslt.AlgoCapAttribute.MIN_ALIGNMENT_D_BYTES),
            algo_id=algorithm.get(config.ID),
            splitk=algorithm.get(config.SPLITK_NUM),
            stages=algorithm.get(config.STAGES_ID),
        )

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.copies(self._copied_bytes)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        prepared = self._prepared
        if prepared is None:
            self._put_without(call, memory.stream)
            return
        is_copied = self._copied_bytes > 0 and call.addresses[2] == call.addresses[5]
        if call.computed[0] is not self or call.computed[1] is not memory:
            a, b, c, vector, aux, d, *scales = call.addresses
            alpha, beta = call.scalars
            if self._swapped:
                a, b = b, a
            if self.problem.c is None:
                c = self._unread(d)
                beta = memory.zeros if self.problem.device_scalars else 0.0
            elif is_copied:
                c = memory.copies(self._copied_bytes)
            at = alpha, a, b, beta, c, d, memory.workspace, memory.workspace_size, memory.stream
            held = zip(self._held, (vector, aux, *filter(None, scales)), strict=True)
            pointers = tuple([each for each in held if each[1]]) if vector or aux or scales else ()
            call.computed = self, memory, pointers, prepared.arguments(*at)
        _, _, pointers, arguments = call.computed
        if is_copied:
            copy = memory.copies(self._copied_bytes)
            driver_call("cuMemcpyDtoDAsync", copy, call.addresses[2], self._copied_bytes, memory.stream)
        with self._lock:  # so that no other thread changes the descriptor's addresses before the launch has returned
            for attribute, address in pointers:
                if address != self._set.get(attribute):
                    self._desc.set(attribute, address)
                    self._set[attribute] = address
            status = prepared.launch(*arguments)
        if status:
            raise failure("cublasLtMatmul", status)

    def _put_without(self, call: Call, stream: int) -> None:
        """Writes β·C to D if K is 0, because sums over no terms are zero."""
        problem = self.problem
        if not (problem.batch and problem.m and problem.n):
            return
        _, _, c, _, _, d, *_ = call.addresses
        beta = call.scalars[1]
        if problem.c is None:
            layout, itemsize = problem.d.layout, problem.d_dtype.itemsize
            lines, width = layout.shape if layout.order is Order.ROW else (layout.cols, layout.rows)
            area = layout.leading_dimension * itemsize, 0, width * itemsize, lines
            for batch in range(problem.batch):
                driver_call("cuMemsetD2D8Async", d + batch * problem.d.batch_stride * itemsize, *area, stream)
            return
        if c == d and not problem.device_scalars and beta == 1.0:
            return
        _, scale, *_, kind = self.types
        with (
            cublaslt.MatrixTransformDesc(scale) as desc,
            column_major(problem.c, kind, problem.batch) as source,
            column_major(problem.d, kind, problem.batch) as target,
        ):
            unused: float = 0.0  # beta of cublasLtMatrixTransform: it has no effect, because the operand B is NULL
            if problem.device_scalars:
                desc.set(cublaslt.MatrixTransformDescAttribute.POINTER_MODE, cublaslt.PointerMode.DEVICE)
                unused = beta
            handle = cublaslt.handle(self.device)
            cublaslt.matrix_transform(handle, desc, beta, c, source, unused, 0, None, d, target, stream)


def _row_alignment(spec: Spec, dtype: DType) -> int:
    """The largest power of two that divides the address of every line (row or column) of a matrix, in bytes."""
    together = spec.alignment | (spec.layout.leading_dimension | spec.batch_stride) * dtype.itemsize
    return together & -together


def _offered(algorithm: cublaslt.Algorithm) -> offered.Offered:
    config = cublaslt.AlgoConfigAttribute
    algo_id, splitk = algorithm.get(config.ID), algorithm.get(config.SPLITK_NUM)
    return offered.Offered(algo_id, algorithm.tile, splitk, algorithm.waves_count)
