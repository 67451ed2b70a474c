"""`ltt.replace` on a GPU: results, measurements, captured steps and generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import lt_runtime.torch as ltt


def stack() -> Any:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True) for _ in range(2)]
    head = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 32), nn.Tanh(), nn.RMSNorm(32))
    return nn.Sequential(*layers, head).cuda()


def results(model: Any, x: Any) -> list[Any]:
    x = x.clone().requires_grad_()
    y = model(x)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).reshape(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


def check_as_exact_as_pytorch(ours: list[Any], theirs: list[Any], exact: list[Any]) -> None:
    for our, their, right in zip(ours, theirs, exact, strict=True):
        assert (our.dtype, our.shape) == (their.dtype, their.shape)
        error, allowed = (our.double() - right).norm(), (their.double() - right).norm()
        assert error <= 1.2 * allowed + torch.finfo(our.dtype).eps * right.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replaced_model_is_as_exact_as_pytorch_s(dtype: Any) -> None:
    model = stack().to(dtype)
    x = torch.randn(4, 48, 64, device="cuda", dtype=dtype)
    theirs, exact = results(model, x), results(copy.deepcopy(model).double(), x.double())
    report = ltt.replace(model)
    assert {each.name for each in report if each.replaced} >= {"0", "1", "2", "0.norm1", "2.4"}
    for _ in range(4):  # the third call of equal addresses is captured
        check_as_exact_as_pytorch(results(model, x), theirs, exact)
    ltt.restore(model)
    torch.testing.assert_close(results(model, x), theirs, rtol=0.05, atol=0.05)


def test_measured_modules_are_replaced_where_they_are_faster() -> None:
    model, x = stack().to(torch.bfloat16), torch.randn(4, 48, 64, device="cuda", dtype=torch.bfloat16)
    theirs, random = results(model, x), torch.cuda.get_rng_state()
    report = ltt.replace(model, x)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    measured = {each.name: each for each in report if each.ours is not None}
    assert measured.keys() >= {"0", "1", "2", "0.norm1", "2.4"}
    assert all(each.replaced == (each.ours <= each.theirs) for each in measured.values())
    assert all(min(each.ours, each.theirs) > 0 for each in measured.values())
    assert measured["0"].ours == measured["1"].ours  # equal modules share a measurement
    assert all(each.grad is None for each in model.parameters())
    torch.testing.assert_close(results(model, x), theirs, rtol=0.1, atol=0.1)


def test_a_captured_step_trains_a_replaced_model() -> None:
    model, x = stack(), torch.randn(4, 48, 64, device="cuda")
    ltt.replace(model)
    optimizer = ltt.AdamW(model.parameters(), lr=1e-3)

    def step() -> Any:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first = max(step().item() for _ in range(3))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            loss = step()
        for _ in range(30):
            graph.replay()
        torch.cuda.synchronize()
    assert loss.item() < 0.9 * first


# A warning of torchao, which transformers imports.
@pytest.mark.filterwarnings("ignore:invalid escape sequence:SyntaxWarning")
def test_gpt2_generates_and_trains_in_bf16() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=2, n_positions=64, vocab_size=1001)
    model = transformers.GPT2LMHeadModel(config).cuda().to(torch.bfloat16).eval()
    ids = torch.randint(1000, (2, 24), device="cuda")
    expected = model(ids, labels=ids).loss
    report = ltt.replace(model, {"input_ids": ids})
    assert any(each.ours is not None for each in report)
    ltt.restore(model)
    ltt.replace(model)
    loss = model(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    loss.backward()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters())
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert made.shape == (2, 32)
