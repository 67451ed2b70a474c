"""The methods that can compute a matrix product, by cuBLASLt or by our own kernels, and the choice among them.

A product uses the algorithm that was measured to be the fastest, or the method that is estimated to be the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from lt_runtime import cublaslt
from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import CublasLtError, LtError, PlanError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.memory import MAX_TICKETS, StreamMemory, workspace_size
from lt_runtime.kernels import narrow, tile_matmul
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.narrow import NarrowPass
from lt_runtime.kernels.tile_matmul import TileMatmulPass
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.cost import copies_us, library_us, narrow_us, tile_us
from lt_runtime.products.matmul import MatmulPlan, library_types, rounds_before_epilogue
from lt_runtime.products.padded import K_MAJOR_MARK, PADDED_MARK, PaddedPlan, padded_problem
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import plan_store

Choose: TypeAlias = Callable[[MatmulProblem, int], AlgorithmPlan]
"""Function that makes the plan of a product on the current device; PlanError if no method supports the product."""

NARROW_MATMUL: Final = Algorithm(b"lt_runtime: narrow_matmul".ljust(64, b"\0"))
TILE_MATMUL: Final = Algorithm(b"lt_runtime: tile_matmul".ljust(64, b"\0"))
"""`NARROW_MATMUL` and `TILE_MATMUL`: bytes that name our two kinds of kernels in the plan cache, in place of a cuBLASLt
algorithm. No algorithm of any version of cuBLASLt has these bytes.
"""

_ALGORITHM: Final = 64  # bytes of a `cublasLtMatmulAlgo_t`
_COPIES_MARGIN_US: Final = 1.6
"""Padded copies must be estimated to be faster by this many microseconds: estimates of small products err by as much.

The margin is fitted to whole backward passes, because two ragged products that run concurrently can take longer than
one after the other. Example: the backward pass of 2590x12x832 takes 29.5 µs on the operands as they are and 15.5 µs on
copies, although dx and dw alone take 15.0 and 16.7 µs.
"""
_TILE_MARGIN: Final = 1.15
_TILE_MARGIN_US: Final = 0.6
"""Handicap of our kernel for ragged rows (`TILE`) without an epilogue: its estimated time is multiplied by the factor,
and the microseconds are added.

Factor and microseconds are fitted to 30 products of tuned passes: if the kernel is estimated to be faster than
cuBLASLt by less than the handicap, the whole pass is often faster with cuBLASLt.
"""


class OwnPlan(AlgorithmPlan):
    """The plan of a product that one of our own kernels computes on one device.

    Raises:
        PlanError: the kernel does not support the problem or the GPU, or its partial sums exceed the workspace.
    """

    def __init__(
        self, problem: MatmulProblem, device: int, algorithm: Algorithm, kernel: NarrowPass | TileMatmulPass
    ) -> None:
        self.problem, self.device, self.algorithm = problem, device, algorithm
        self._pass = kernel
        if kernel.scratch_bytes > workspace_size(device) or kernel.tickets > MAX_TICKETS:
            raise PlanError(f"our kernel has no room for the partial sums of {problem}")

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        self._pass.launch(call, memory)


class NarrowPlan(OwnPlan):
    """The plan of a product with one tiny dimension, by our narrow kernels."""

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        super().__init__(problem, device, NARROW_MATMUL, NarrowPass(problem, device))


class TilePlan(OwnPlan):
    """The plan of a product of 16-bit matrices with ragged rows, by our kernel `tile_matmul`."""

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        if not tile_matmul.supports(problem):
            raise PlanError(f"the kernel for ragged rows does not take {problem}")
        capability, least = device_info(device).capability, tile_matmul.CAPABILITY
        if capability < least:
            has = f"GPU {device} has compute capability {capability}"
            raise PlanError(f"{has}; our kernel's products on tensor cores need {least} or more")
        super().__init__(problem, device, TILE_MATMUL, TileMatmulPass(problem, device))


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """One way to compute a matrix product.

    Attributes:
        name: key of the method in an algorithm's configuration; "" for cuBLASLt on the operands as they are.
        words: the method's name in reports.
        mark: prefix of 64 bytes of the method's algorithms in the plan cache. For cuBLASLt on padded copies the 64
            bytes of its algorithm follow; for our own kernels the mark is the whole algorithm.
        is_own: whether one of our own kernels computes the product.
        supports: function that tells whether the method can compute a product.
        estimate_us: function that estimates the microseconds of a product.
        build: function that makes the plan on the current device, with a given cuBLASLt `algorithm` or the heuristic's
            choice; raises PlanError if cuBLASLt refuses it.
    """

    name: str
    words: str
    mark: bytes
    is_own: bool
    supports: Callable[[MatmulProblem], bool]
    estimate_us: Callable[[MatmulProblem], float]
    build: Callable[..., AlgorithmPlan]


def _is_copied(problem: MatmulProblem, *, k_major: bool = False) -> bool:
    """Whether padding copies an operand; with `k_major`, whether copies contiguous along K are supported too."""
    return padded_problem(problem) is not None and (not k_major or padded_problem(problem, k_major=True) is not None)


LIBRARY: Final = Method("", "cuBLASLt", b"", False, lambda _: True, library_us, MatmulPlan)
PADDED: Final = Method("PADDED", "padded", PADDED_MARK, False, _is_copied, copies_us, PaddedPlan)
_ALONG_K: Final = partial(_is_copied, k_major=True), partial(copies_us, k_major=True), partial(PaddedPlan, k_major=True)
"""The functions `supports`, `estimate_us` and `build` of `K_MAJOR`, whose copies of A and B are contiguous along K."""
K_MAJOR: Final = Method("K_MAJOR", "along K", K_MAJOR_MARK, False, *_ALONG_K)
NARROW: Final = Method(
    "NARROW_MATMUL", "our kernel for narrow products", NARROW_MATMUL.blob, True, narrow.supports, narrow_us, NarrowPlan
)
TILE: Final = Method(
    "TILE_MATMUL", "our kernel for ragged rows", TILE_MATMUL.blob, True, tile_matmul.supports, tile_us, TilePlan
)
METHODS: Final = (LIBRARY, PADDED, K_MAJOR, NARROW, TILE)
"""All methods. If estimates are equal, the earlier method is preferred."""


def split_blob(blob: bytes) -> tuple[Method, bytes]:
    """Splits the bytes of an algorithm in the plan cache into its method and the part that is cuBLASLt's.

    Raises:
        PlanError: another version of the package wrote the bytes.
    """
    method = next((each for each in METHODS if each.mark and blob.startswith(each.mark)), LIBRARY)
    algorithm = blob[len(method.mark) :]
    if len(algorithm) != (0 if method.is_own else _ALGORITHM):
        raise PlanError(f"no method is known for the algorithm {blob[:_ALGORITHM]!r}")
    return method, algorithm


def fastest_first(problem: MatmulProblem) -> list[Method]:
    """The methods to try for a product that was not measured, those estimated to be fastest first.

    Padded copies must be faster by a margin, see `_COPIES_MARGIN_US`. So must our kernel for ragged rows if there is no
    epilogue to fuse: it occupies the GPU, so that no weight gradient runs concurrently, and it does not share a padded
    copy with the weight gradient.

    With an epilogue, methods that are estimated to be slower than cuBLASLt are left out, except our own kernels, which
    can fuse it. If cuBLASLt would round the product before the epilogue, or if the epilogue sums an operand, slower
    kernels of ours are left out too: a pass of ours after cuBLASLt's plain product is then faster.
    """
    estimates = estimated_us(problem)
    for method in estimates:
        if method.mark and not method.is_own:
            estimates[method] += _COPIES_MARGIN_US
    if problem.epilogue is Epilogue.NONE:
        if TILE in estimates:
            estimates[TILE] = _TILE_MARGIN * estimates[TILE] + _TILE_MARGIN_US
        return sorted(estimates, key=estimates.__getitem__)
    methods = sorted(estimates, key=estimates.__getitem__)
    library = methods.index(LIBRARY)
    has_pass = problem.epilogue.sums_operand or rounds_before_epilogue(problem)
    return methods[: library + 1] + [each for each in methods[library:] if each.is_own and not has_pass]


def estimated_us(problem: MatmulProblem) -> dict[Method, float]:
    """Estimated microseconds of a product by each possible method."""
    return {each: each.estimate_us(problem) for each in METHODS if each.supports(problem)}


def known_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """The plan with the algorithm that was measured to be the fastest; without a measurement, `heuristic_algorithm`.

    A measured algorithm that cuBLASLt now refuses, or that is now known to compute wrong results, is barred in the plan
    cache.
    """
    if problem.is_empty:
        return MatmulPlan(problem, device)
    store, key = plan_store(device), problem_key(problem)
    entry = store.product(key)
    if entry is not None:
        try:
            return plan_from_blob(problem, device, entry.algorithm)
        except PlanError as error:
            store.bar(key, entry, str(error))
    return heuristic_algorithm(problem, device)


def heuristic_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """The plan by the first method of `fastest_first` that supports the product; measurements are not read.

    Raises:
        PlanError: no method can compute the product; the message says why cuBLASLt cannot on the operands as they are.
    """
    refused: PlanError | None = None
    for method in fastest_first(problem):
        try:
            return method.build(problem, device)
        except PlanError as error:
            refused = error if method is LIBRARY or refused is None else refused
    assert refused is not None, "the library is always tried"
    raise refused


def plan_from_blob(problem: MatmulProblem, device: int, blob: bytes) -> AlgorithmPlan:
    """The plan of a product with the method and algorithm from an earlier plan's `blob`.

    Raises:
        PlanError: see `MatmulPlan`, `OwnPlan` and `PaddedPlan`; or another version wrote the blob.
    """
    method, algorithm = split_blob(blob)
    return method.build(problem, device, algorithm=algorithm) if algorithm else method.build(problem, device)


def configuration(blob: bytes) -> dict[str, int]:
    """An algorithm's configuration for the plan cache: cuBLASLt's attributes by name, and the method's name."""
    method, algorithm = split_blob(blob)
    attributes = AlgoConfigAttribute if algorithm else ()
    found = {attribute.name: int(Algorithm(algorithm).get(attribute)) for attribute in attributes}
    return found | ({method.name: 1} if method.name else {})


def plan_from_config(problem: MatmulProblem, device: int, config: Mapping[str, int]) -> AlgorithmPlan:
    """The plan of a product with an algorithm that is rebuilt from its `configuration`.

    Raises:
        PlanError: see `plan_from_blob`; or no algorithm has the configuration.
        CublasLtError: cuBLASLt failed for a reason other than the algorithm.
    """
    marks = [each for each in METHODS if each.name in config]
    mark = b"".join(each.mark for each in marks)
    values = {name: value for name, value in config.items() if name not in {each.name for each in marks}}
    if not values and any(each.is_own for each in marks):
        return plan_from_blob(problem, device, mark)
    try:
        algorithm = cublaslt.algo_init(cublaslt.handle(device), library_types(problem), values["ID"])
        for attribute in [AlgoConfigAttribute[name] for name in values]:
            if algorithm.get(attribute) != values[attribute.name]:
                algorithm = algorithm.set(attribute, values[attribute.name])
    except (KeyError, LtError) as error:
        if isinstance(error, CublasLtError) and not cublaslt.is_refusal(error):
            raise
        raise PlanError(f"no algorithm has the configuration {dict(config)} ({error})") from error
    return plan_from_blob(problem, device, mark + algorithm.blob)
