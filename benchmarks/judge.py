"""What the priors would reach, from committed times and without a GPU: `python -m benchmarks judge-priors [FILE...]`.

FILE is what the suite `wide` writes, with the times of parts. For every row the priors choose strategies, and
`fastest_first` and `most_promising` the algorithms of their products. What that changes against the run's own untuned
choice is added to the run's untuned time, from the times of the parts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from benchmarks import report
from benchmarks.layers import Block
from benchmarks.splits import DEVICE, chain_of, roles, strategy_name
from lt_runtime.cublaslt.tiles import tile_shape
from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.layout import Layout, Order
from lt_runtime.plans import priors
from lt_runtime.plans.decisions import LayerProblem, priors_of
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.methods import K_MAJOR, LIBRARY, NARROW, PADDED, TILE, Method, estimated_us, fastest_first
from lt_runtime.products.offered import Offered, is_split_for_nothing, most_promising
from lt_runtime.products.padded import padded_problem

Row: TypeAlias = Mapping[str, Any]


class Times(NamedTuple):
    """Microseconds of a product in one way."""

    first: float
    """By the algorithm that was chosen untuned when it was measured."""
    now: float
    """By the one that is chosen now."""


Product: TypeAlias = tuple[MatmulProblem, Mapping[Method, Times]]
_WAYS: Final = {
    "plain": LIBRARY,
    "PADDED": PADDED,
    "K_MAJOR": K_MAJOR,
    "ours": NARROW,
    "TILE_MATMUL": TILE,
}
_ROLES: Final = ("forward", "last forward", "backward", "last backward")
# A measurement was disturbed if the first algorithm takes so many times the best of its way, or the parts so many
# times the whole.
_DISTURBED: Final = 4.0
_DISTURBED_SUM: Final = 1.15
_OFFERED: Final = 8  # what a query of the heuristic returns at most


def products_of(row: Row) -> list[Product]:
    """The products of a row, with their microseconds in each way."""
    problems = [_problem(each) for each in row["products"]]
    return [(each, _times(each, of["algorithms"])) for each, of in zip(problems, row["products"], strict=True)]


def _times(problem: MatmulProblem, algorithms: Sequence[Sequence[Any]]) -> dict[Method, Times]:
    inner = {
        LIBRARY: problem,
        PADDED: padded_problem(problem),
        K_MAJOR: padded_problem(problem, k_major=True),
    }
    found: dict[Method, Times] = {}
    for way in dict.fromkeys(_WAYS[name] for name, *_ in algorithms):
        entries = [each for each in algorithms if _WAYS[each[0]] is way]
        least, made = min(us for *_, us in entries), inner.get(way)
        first, now = entries[0][-1], entries[_promising(made, entries) if made else 0][-1]
        found[way] = Times(*(us if us < _DISTURBED * least else least for us in (first, now)))
    return found


def _promising(problem: MatmulProblem, entries: Sequence[Sequence[Any]]) -> int:
    """The number of the algorithm that is chosen untuned.

    What other queries offered begins with a repetition; a product asks them where the first splits short sums.
    """
    offers: dict[tuple[Any, ...], Offered] = {}
    for _, algo_id, tile, stages, splitk, swizzling, cluster, waves, _ in entries:
        key = algo_id, tile, stages, splitk, swizzling, cluster
        is_of_others = len(offers) == _OFFERED or key in offers
        if is_of_others and not all(is_split_for_nothing(problem, each) for each in offers.values()):
            break
        offers.setdefault(key, Offered(algo_id, tile_shape(tile), splitk, waves))
    chosen = [*offers][most_promising(problem, [*offers.values()])]
    return next(i for i, (_, *config, _, _) in enumerate(entries) if tuple(config) == chosen)


def _problem(product: Mapping[str, Any]) -> MatmulProblem:
    (m, n, k), epilogue = product["shape"], Epilogue(product["epilogue"])
    dtype, d_dtype, compute = product["types"]
    shapes = {"a": (m, k), "b": (k, n), "d": (m, n)}
    specs = {
        name: Spec(Layout(*shapes[name], Order(order), leading))
        for name, (order, leading) in product["layouts"].items()
    }
    aux = specs["d"] if epilogue.has_aux_output or epilogue.is_derivative else None
    return MatmulProblem(DType(dtype), DType(d_dtype), Compute(compute), **specs, epilogue=epilogue, aux=aux)


def _untuned(product: Product) -> tuple[Method, float] | None:
    """The way that is chosen untuned, and its microseconds, estimated where copies had no room when it was measured."""
    problem, times = product
    estimates = estimated_us(problem)
    for way in fastest_first(problem):
        if way in times or way in (PADDED, K_MAJOR):
            return way, times[way].now if way in times else estimates[way]
    return None


def _change(product: Product, us: float, preferred: Method) -> float:
    """How much more than in the way that was preferred when it was measured a product takes, if it takes `us` now."""
    problem, times = product
    own = next((way for way in (preferred, *fastest_first(problem)) if way in times), None)
    return 0.0 if own is None else us - times[own].first


class Parts:
    """What a row's passes take by their strategies, with the algorithms that are chosen untuned."""

    def __init__(self, row: Row) -> None:
        self._row, self._m, self._n, self._k = row, *row["layer"]
        self._strategies, self._products = row["strategies"], products_of(row)
        block = Block(row["stratum"], *row["layer"], row["type"], row["activation"])
        self.problems: dict[str, LayerProblem] = dict(roles(chain_of(block)))

    def chosen(self, role: str) -> tuple[str, float]:
        """The first strategy of the priors that is possible, and its microseconds."""
        for strategy in map(strategy_name, priors_of(self.problems[role], DEVICE)):
            us = self.us(role, strategy)
            if us is not None:
                return strategy, us
        raise ValueError(f"{self._row['case']}: no strategy of the priors was measured for {role}")

    def us(self, role: str, strategy: str) -> float | None:
        """The time on the operands as they are, or on copies, but for what its products take in other ways.

        The measurement whose products change the least counts: a far slower product hides what runs beside it. If both
        measurements were disturbed, the time untuned, by the products that were chosen then, counts as it is.
        """
        found: list[tuple[float, float]] = []
        least = min((ways[strategy] for ways in self._strategies[role].values() if strategy in ways), default=math.inf)
        products = [(product, _untuned(product)) for product in self._of(role, strategy)]
        now = [(product, chosen[1]) for product, chosen in products if chosen is not None]
        # What two products beside each other save does not add up: the pass takes no less than the longer product.
        longest = max(us for _, us in now) if len(now) > 1 else 0.0
        for name, preferred in (("plain", LIBRARY), ("padded", PADDED)):
            us = self._strategies[role][name].get(strategy)
            if us is None or us > _DISTURBED * least:
                continue
            if all(extent % 8 == 0 for extent in (self._n, self._k)):
                us = least
            if len(now) < len(products):
                return None
            changes = [_change(*each, preferred) for each in now]
            found.append((sum(map(abs, changes)), max(us + sum(changes), longest)))
        return min(found)[1] if found else self._strategies[role]["heuristic"].get(strategy)

    def _of(self, role: str, strategy: str) -> Iterator[Product]:
        parts, (m, n, k) = strategy.split(), (self._m, self._n, self._k)
        if role.endswith("forward"):
            yield from self._find((m, n, k) if role == "forward" else (m, k, n), parts[0], Order.COLUMN)
            return
        db, derivative, below, _ = parts
        is_last = role == "last backward"
        epilogue = f"d{self._row['activation']}" + ("_bgrad" if below == "epilogue" else "")
        yield from self._find((m, k, n) if is_last else (m, n, k), epilogue if derivative == "epilogue" else "none")
        yield from self._find((n, k, m) if is_last else (k, n, m), "bgrada" if db == "epilogue" else "none")

    def _find(self, shape: tuple[int, int, int], epilogue: str, order: Order = Order.ROW) -> Iterator[Product]:
        for problem, times in self._products:
            is_it = (problem.m, problem.n, problem.k) == shape and problem.epilogue.value == epilogue
            if is_it and problem.b.layout.order is order:
                yield problem, times
                return


def untuned_us(row: Row) -> float:
    """What the row's block would take untuned."""
    parts, before, after = Parts(row), 0.0, 0.0
    was = dict(zip(_ROLES, row["splits"]["lt_priors"].split(" | "), strict=True))
    for role in _ROLES:
        own = role if role != "backward" else f"backward {was['forward'].split()[1]}"
        before += _was_us(row["strategies"][own], was[role], row)
    forward, us = parts.chosen("forward")
    after += us + parts.chosen("last forward")[1] + parts.chosen("last backward")[1]
    after += parts.chosen(f"backward {forward.split()[1]}")[1]
    was_us: float = row["us"]["lt_priors"]
    return was_us + after - (before if before < _DISTURBED_SUM * was_us else was_us)


def _was_us(times: Mapping[str, Mapping[str, float]], strategy: str, row: Row) -> float:
    us = times["heuristic"][strategy]
    if any(extent % 8 for extent in row["layer"][1:]):
        return us
    return min(ways[strategy] for ways in times.values() if strategy in ways)


def main(argv: Sequence[str]) -> None:
    """Prints by half and stratum what untuned reaches of tuned: as it was measured, and as the priors are now."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks judge-priors", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", default=[report.RESULTS / "wide.json"])
    parser.add_argument("--rows", action="store_true", help="show the rows as well")
    arguments = parser.parse_args(argv)
    priors.device_info = lambda _: DeviceInfo(0, "", 90, multiprocessors=132, memory=0)
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in (row for file in arguments.files for row in json.loads(file.read_text())["rows"]):
        now, tuned = untuned_us(row), row["us"]["lt"]
        was = tuned / row["us"]["lt_priors"]
        groups.setdefault((row["half"], row["stratum"]), []).append((was, tuned / now))
        if arguments.rows:
            print(f"{row['case']}: {was:.2f} -> {tuned / now:.2f}")
    for (half, stratum), ratios in groups.items():
        columns = [*zip(*ratios, strict=True)]
        texts = [
            f"mean {math.exp(sum(map(math.log, each)) / len(each)):.3f}, worst {min(each):.2f}" for each in columns
        ]
        print(f"{half} {stratum}: {texts[0]} -> {texts[1]}")
