"""Calls on explicit streams, in captures of the caller's, and from several threads."""

from __future__ import annotations

import threading
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import CaptureError
from lt_runtime.gpu.memory import release


class _Layer:
    def __init__(self, seed: int, m: int = 96, n: int = 64, k: int = 80) -> None:
        generator = np.random.default_rng(seed)
        self.x, self.w, self.b, self.dy = (
            cp.asarray(generator.standard_normal(s).astype(np.float32)) for s in ((m, k), (n, k), (n,), (m, n))
        )
        self.y, self.z = cp.empty((m, n), cp.float32), cp.empty((m, n), cp.float32)
        self.dx, self.dw, self.db = cp.empty_like(self.x), cp.empty_like(self.w), cp.empty_like(self.b)
        self.step = cp.zeros(1, cp.uint32)

    def run(self, stream: Any) -> None:
        _, ctx = lt.linear_fwd(
            self.x, self.w, self.b, activation="gelu", dropout=0.5, rng=lt.Philox(1, 2, self.step),
            out=self.y, out_z=self.z, stream=stream,
        )  # fmt: skip
        lt.linear_bwd(self.dy, ctx, out_dx=self.dx, out_dw=self.dw, out_db=self.db, stream=stream)

    def results(self) -> list[bytes]:
        return [cp.asnumpy(a).tobytes() for a in (self.y, self.dx, self.dw, self.db)]


def test_replay_repeats_eager_and_masks_advance() -> None:
    layer, stream = _Layer(2), cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()
    eager = []
    for step in range(3):
        layer.step.fill(step)
        layer.run(None)
        eager.append(layer.results())
    layer.run(stream)  # the first call makes the plans and allocates this stream's memory
    stream.begin_capture()
    layer.run(stream)
    graph = stream.end_capture()
    for step in range(3):
        layer.step.fill(step)
        cp.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert layer.results() == eager[step]
    assert eager[0][0] != eager[1][0]


def test_first_run_on_a_stream_in_a_capture_is_refused() -> None:
    layer, stream = _Layer(5), cp.cuda.Stream(non_blocking=True)
    layer.run(None)
    cp.cuda.get_current_stream().synchronize()
    release(0, stream.ptr)  # a new stream may get the handle of a destroyed stream of another test
    stream.begin_capture()
    with pytest.raises(CaptureError, match="scratch"):
        layer.run(stream)
    stream.end_capture()
    layer.run(stream)
    stream.synchronize()


def test_threads_on_their_own_streams_give_the_serial_result() -> None:
    layers = [_Layer(10 + i) for i in range(8)]
    for layer in layers:
        layer.run(None)
    serial = [layer.results() for layer in layers]
    cp.cuda.get_current_stream().synchronize()
    failures: list[BaseException] = []

    def work(layer: _Layer) -> None:
        try:
            stream = cp.cuda.Stream(non_blocking=True)
            for _ in range(20):
                layer.run(stream)
            stream.synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [layer.results() for layer in layers] == serial


def test_threads_sharing_a_stream_do_not_mix_their_scratch_memory() -> None:
    layers, stream = [_Layer(20 + i) for i in range(4)], cp.cuda.Stream(non_blocking=True)
    for layer in layers:
        layer.run(None)
    serial = [layer.results() for layer in layers]
    cp.cuda.get_current_stream().synchronize()
    threads = [
        threading.Thread(target=lambda chosen=layer: [chosen.run(stream) for _ in range(30)]) for layer in layers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize()
    assert [layer.results() for layer in layers] == serial
