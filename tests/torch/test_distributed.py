"""Two processes with half of a batch each make the gradients of one process that accumulates both halves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import distributed
from torch.distributed.fsdp import fully_shard

import lt_runtime.torch as ltt


def train(rank: int, file: str, sharded: bool) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    single = torch.nn.Sequential(ltt.FeedForward(8, 16, "silu", True), ltt.LayerNorm(8), ltt.MLP([8, 12, 4], "gelu"))
    model, halves = copy.deepcopy(single), torch.randn(6, 8).split(3)
    if sharded:
        for part in (*model, model):
            fully_shard(part)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    model(halves[rank]).square().mean().backward()
    for half in halves:
        (single(half).square().mean() / 2).backward()
    for ours, expected in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor() if sharded else ours.grad, expected.grad)
    distributed.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True], ids=["DistributedDataParallel", "FSDP2"])
def test_two_processes_make_the_gradients_of_one(sharded: bool, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train, (str(tmp_path / "rendezvous"), sharded), 2)
