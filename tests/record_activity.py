"""What CUPTI says of a GPU: `python -m tests.record_activity [FILE]` prints it, and keeps the records as JSON.

It shows whether the ids of a graph's nodes join its records as `lt_runtime.profiling.attribution` takes them to, for a
graph of our own, captured before, and for one that CuPy captures meanwhile.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.gpu.graphs import Graph
from lt_runtime.profiling.collector import Collector
from lt_runtime.profiling.cupti import library as cupti
from lt_runtime.ranges import range_of


def main(arguments: list[str]) -> int:
    """The command."""
    print("version:", cupti.version())
    cupti.check_layouts()
    kept: list[cupti.Filled] = []
    session = cupti.Session
    original = session.stop

    def stop(self: Any) -> Any:
        filled, dropped = original(self)
        kept.extend(filled)
        return filled, dropped

    session.stop = stop  # type: ignore[method-assign]
    collector, graph_ids = run()
    for line in graph_ids:
        print(line)
    print("sources of graphs:", {hex(one): hex(other) for one, other in collector._notes.sources.items()})
    print("places:", {(hex(graph), node): path for (graph, node), path in collector._notes.places.items()})
    for each in collector.activities:
        if each.kind != "call":
            print(each.kind, each.name[:40], each.range, f"graph {each.graph:#x} node {each.node:#x}", each.size)
    print("calls:", Counter(each.name for each in collector.activities if each.kind == "call"))
    print("dropped:", collector.dropped, "| unattributed:", sum(not each.range for each in collector.activities))
    print("microseconds of a range while listening:", cost())
    if arguments:
        data = [{"bytes": base64.b64encode(each.buffer).decode(), "offsets": [*each.offsets]} for each in kept]
        Path(arguments[0]).write_text(json.dumps({"version": cupti.version(), "buffers": data}))
    return 0


def run() -> tuple[Collector, list[str]]:
    """A bit of everything, in ranges."""
    x, stream = cp.ones(1 << 16, np.float32), cp.cuda.Stream(non_blocking=True)

    def work(handle: int) -> None:
        with cupy_stream(0, handle):
            for name in ("mul", "add"):
                with range_of(name):
                    getattr(cp, "multiply" if name == "mul" else name)(x, 2, out=x)
                    x.data.memset_async(0, 64)

    work(stream.ptr)
    stream.synchronize()
    with Graph(work, stream.ptr) as graph, Collector() as collector:
        ids = [f"own graph: executable {cupti.executable_id(graph.executable):#x}"]
        ids += [f"  node {cupti.node_id(node):#x} in {path}" for node, path in graph.ranges.items()]
        with range_of("eager"):
            work(stream.ptr)
            x.get()
        with range_of("own replay"):
            graph.launch(stream.ptr)
        with stream:
            stream.begin_capture()
            with range_of("captured"):
                cp.add(x, 1, out=x)
            other = stream.end_capture()
            with range_of("others' replay"):
                other.launch(stream)
        with range_of("allocate"):
            cp.cuda.runtime.free(cp.cuda.runtime.malloc(1 << 20))
    return collector, ids


def cost(count: int = 100_000) -> float:
    """Microseconds that a range takes while it is collected."""
    with Collector():
        start = time.perf_counter()
        for _ in range(count):
            with range_of("cost"):
                pass
        return (time.perf_counter() - start) / count * 1e6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
