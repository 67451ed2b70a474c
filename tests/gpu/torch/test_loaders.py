"""`lt.prefetch` of a DataLoader's batches on a GPU: values behind a slow reader, types, and a captured step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import lt_runtime as lt
import lt_runtime.torch as ltt
from lt_runtime.plans import cache
from tests.support.threads import hide_other_threads

pytestmark = pytest.mark.gpu


def in_one_tensor(count: int, x: Any) -> Iterator[dict[str, Any]]:
    """Yields every batch in the same tensor, whose contents it overwrites."""
    for i in range(count):
        x.fill_(i)
        yield {"x": x, "parts": (x[:, ::2], x[0, 0], x[:0])}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_slow_reader_sees_every_batch_as_it_was(pinned: bool, dtype: Any, own_stream: bool) -> None:
    sums = []
    x = torch.empty((512, 768), dtype=dtype, pin_memory=pinned)
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.default_stream()):
        for batch in lt.prefetch(in_one_tensor(20, x), 2, "cuda"):
            torch.cuda._sleep(2_000_000)  # the GPU reads the batch long after the host has launched the kernel
            strided, corner, empty = batch["parts"]
            assert (batch["x"].dtype, batch["x"].device.type, empty.shape) == (dtype, "cuda", (0, 768))
            sums.append((batch["x"].double().mean(), strided.double().mean(), corner.double()))
        assert [tuple(map(float, found)) for found in sums] == [(i, i, i) for i in range(20)]


def test_a_captured_step_takes_a_loader_s_batches_by_prefetch_and_without() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(1000.0).reshape(500, 2), torch.arange(500))
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, pin_memory=True)
    expected = [float(x.sum() + labels.sum()) for x, labels in loader]
    run = ltt.capture(lambda batch: batch[0].sum() + batch[1].sum())
    for _ in range(4):
        for batches in (loader, lt.prefetch(loader, 2, "cuda")):
            assert [float(run(batch)) for batch in batches] == expected


def test_calls_become_graphs_beside_a_loader_whose_threads_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_other_threads(monkeypatch)
    monkeypatch.setattr("lt_runtime.ops.call._Allowance.is_left", lambda _: True)
    monkeypatch.setattr(cache, "repeats", {})
    sizes = [*range(64, 6400, 64)]  # batches of other sizes, for which the loader's thread allocates memory each time
    loader = torch.utils.data.DataLoader(
        [torch.full((size, 16), float(size)) for size in sizes], batch_size=None, num_workers=1, pin_memory=True
    )
    x, w = torch.ones(64, 32, device="cuda"), torch.ones(32, 32, device="cuda")
    for size, batch in zip(sizes, loader, strict=True):
        # A call that is repeated with the same addresses is captured, while the loader's thread pins the next batches.
        made = [ltt.functional.linear(x, w * (1 + i % 5)) for i in range(25)]
        assert batch.is_pinned()
        assert float(batch.cuda().double().sum()) == 16 * size * size
        assert all(bool((y == 32 * (1 + i % 5)).all()) for i, y in enumerate(made))
    assert any(map(bool, cache.repeats.values()))
