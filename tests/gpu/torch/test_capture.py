"""`capture` on a GPU: N calls are N steps, with the package's layers and optimizer and with PyTorch's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: N812

import lt_runtime.torch as ltt
from lt_runtime.errors import ArgumentError
from lt_runtime.problem import BackwardProblem, ForwardProblem

pytestmark = [  # a warning of PyTorch's own, if the first work of autograd's thread is a product
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]

Make = Callable[[Any], Any]
OPTIMIZERS: dict[str, tuple[Make, bool]] = {
    "ours": (lambda params: ltt.AdamW(params, 1e-2, max_norm=0.5, ema_decay=0.9), True),
    "ours, a tensor's rate": (lambda params: ltt.AdamW(params, torch.tensor(1e-2, device="cuda")), True),
    "AdamW": (lambda params: torch.optim.AdamW(params, torch.tensor(1e-2, device="cuda"), capturable=True), True),
    "fused": (lambda params: torch.optim.AdamW(params, 1e-2, capturable=True, fused=True), False),
    "SGD": (lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9), False),
}
"""Makers of optimizers; the flag says whether the learning rate follows a schedule within a captured step."""


def training(make: Make, *, schedule: bool, dtype: Any = torch.float32, dropout: float = 0.0) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and a step of a batch (x, {"labels": ...})."""
    torch.manual_seed(0)
    layers = ltt.Linear(64, 96, activation="gelu", dropout=dropout), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 10)
    model = torch.nn.Sequential(*layers).cuda().to(dtype)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count)) if schedule else None

    def step(x: Any, target: dict[str, Any]) -> Any:
        optimizer.zero_grad()
        loss = ltt.cross_entropy(model(x), target["labels"])
        loss.backward()
        if not isinstance(optimizer, ltt.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return loss

    return model, optimizer, step


def batch_of(seed: int, rows: int = 256, dtype: Any = torch.float32) -> tuple[Any, dict[str, Any]]:
    """A batch as a loader yields it: on the CPU, the labels in page-locked memory."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (rows,), generator=generator).pin_memory()
    return torch.randn(rows, 64, generator=generator).to(dtype), {"labels": labels}


def train(captures: bool, make: Make, count: int = 12, **options: Any) -> tuple[Any, list[float]]:
    model, _, step = training(make, **options)
    run = ltt.capture(step, *batch_of(0), tune=False) if captures else step
    losses = []
    for seed in range(count):
        x, target = batch_of(seed, 200 if seed % 3 == 2 else 256, options.get("dtype", torch.float32))
        given = (x, target) if captures else (x.cuda(), {"labels": target["labels"].cuda()})
        losses.append(run(*given).detach())
    if captures:
        assert repr(run).endswith("2 graphs)")
    return model, [each.item() for each in losses]


@pytest.mark.parametrize(("make", "schedule"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_many_calls_are_as_many_steps(make: Make, schedule: bool, dtype: Any) -> None:
    options = {"schedule": schedule, "dtype": dtype}
    (wanted, expected), (found, losses) = train(False, make, **options), train(True, make, **options)
    rtol = 1e-4 if dtype is torch.float32 else 2**-5
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=rtol)
    for mine, other in zip(found.state_dict().values(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=rtol, atol=2e-4 if rtol < 1e-3 else 2**-5)


def test_a_captured_step_is_tuned_once_and_draws_new_masks() -> None:
    _, _, step = training(lambda params: torch.optim.SGD(params, 0.0), schedule=False, dropout=0.5)
    run, batch = ltt.capture(step, tune=True), batch_of(0, 320)
    losses = [run(*batch).item() for _ in range(8)]
    assert repr(run).endswith("1 graphs)")
    assert len(set(losses)) == 8


def test_a_model_is_tuned_once_for_a_shape() -> None:
    model = ltt.MLP([64, 208, 48], "gelu", device="cuda", dtype=torch.bfloat16)
    x = torch.ones(336, 64, device="cuda", dtype=torch.bfloat16)
    first, again = ltt.tune(model, x, progress=False), ltt.tune(model, x, progress=False)
    problems = [
        each for tuned in first for each in tuned.problems if isinstance(each, ForwardProblem | BackwardProblem)
    ]
    shapes = {(each.x.layout.rows, each.w.layout.rows) for each in problems}
    assert shapes >= {(336, 208), (336, 48)}
    assert any(each.measured for each in first)
    assert not any(each.measured for each in again)
    assert all(each.grad is None for each in model.parameters())


def test_a_grad_scaler_moves_within_the_graph() -> None:
    found = []
    for captures in (False, True):
        torch.manual_seed(0)
        model, scaler = ltt.MLP([64, 96, 10], "relu", device="cuda"), torch.amp.GradScaler("cuda", 2.0**10, 2.0, 0.5, 3)
        optimizer = ltt.AdamW(model.parameters(), 1e-2)

        def step(x: Any, labels: Any, model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler) -> Any:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x).float(), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        run = ltt.capture(step, tune=False) if captures else step
        for seed in range(10):
            x, target = batch_of(seed)
            x[0, 0] = float("inf") if seed == 6 else 0.0
            run(x.cuda(), target["labels"].cuda())
        found.append((scaler.get_scale(), [each.detach() for each in model.parameters()]))
    (scale, wanted), (captured_scale, values) = found
    assert captured_scale == scale != 2.0**10
    torch.testing.assert_close(values, wanted, rtol=1e-3, atol=1e-4)


def test_a_loaded_state_and_moved_parameters_end_the_graphs() -> None:
    models = []
    for captures in (False, True):
        model, optimizer, step = training(OPTIMIZERS["ours"][0], schedule=False)
        run = ltt.capture(step, tune=False) if captures else step
        for seed in range(12):
            if seed == 4:
                optimizer.load_state_dict(optimizer.state_dict())
            if seed == 8:
                model[0].weight.data = model[0].weight.data.clone()
            x, target = batch_of(seed)
            run(x.cuda(), {"labels": target["labels"].cuda()})
        models.append([each.detach() for each in model.parameters()])
    torch.testing.assert_close(*models, rtol=1e-4, atol=2e-4)


def test_a_captured_step_may_call_another_one() -> None:
    models = []
    for captures in (False, True):
        model, _, step = training(OPTIMIZERS["ours"][0], schedule=True)
        inner = ltt.capture(step, tune=False) if captures else step
        run = ltt.capture(lambda *batch, inner=inner: inner(*batch) * 1, tune=False) if captures else step
        for seed in range(8):
            x, target = batch_of(seed)
            run(x.cuda(), {"labels": target["labels"].cuda()})
        models.append([each.detach() for each in model.parameters()])
    torch.testing.assert_close(*models, rtol=1e-4, atol=2e-4)


def test_values_written_between_calls_stay() -> None:
    model, _, step = training(
        lambda params: ltt.AdamW(params, 1e-6, masters=True), schedule=False, dtype=torch.bfloat16
    )
    run = ltt.capture(step, tune=False)
    for seed in range(6):
        if seed == 5:
            with torch.no_grad():
                model[2].weight.fill_(3.0)
        run(*batch_of(seed, dtype=torch.bfloat16))
    torch.testing.assert_close(model[2].weight.float(), torch.full((10, 96), 3.0, device="cuda"), rtol=0.01, atol=0)


def test_work_is_ordered_with_the_caller_s_stream() -> None:
    total = torch.zeros(1 << 20, device="cuda")
    run = ltt.capture(lambda x: total.add_(x).sum())
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(6):
            torch.cuda._sleep(5_000_000)
            x = torch.ones_like(total)
            assert run(x).item() == (i + 1) * total.numel()


class Halved(torch.nn.Module):
    """A linear layer whose output is halved. With `stops`, a graph break after the layer makes torch.compile compile
    `forward` by itself."""

    def __init__(self, *, stops: bool) -> None:
        super().__init__()
        self.layer, self.stops = torch.nn.Linear(64, 64, device="cuda"), stops

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        if self.stops:
            torch._dynamo.graph_break()
        return y * 0.5


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile, raised as errors, would end the compilation
def test_a_compiled_step_is_captured_after_another_model_was_compiled() -> None:
    """The second model's `forward` must be compiled by itself.

    Dynamo reuses the code that it has compiled for the first model's `cost` for the second model too.
    """

    def step_of(model: Any) -> Any:
        def cost(x: Any) -> Any:
            return model(x).square().mean()

        compiled = torch.compile(cost, dynamic=False)

        def step(x: Any) -> Any:
            model.zero_grad(set_to_none=False)
            loss = compiled(x)
            loss.backward()
            return loss

        return step

    torch._dynamo.reset()
    x = torch.randn(64, 64, device="cuda")
    models = [Halved(stops=False), Halved(stops=True)]
    runs = [ltt.capture(step_of(model)) for model in models]
    for run in (runs[0], runs[1], runs[0]):
        for _ in range(2):
            run(x)
    for model, run in zip(models, runs, strict=True):
        losses = [run(x).item() for _ in range(4)]
        assert losses == pytest.approx([(model.layer(x) * 0.5).square().mean().item()] * 4, rel=1e-3)
        assert run.graphs == 1


def test_an_optimizer_that_cannot_be_captured_is_refused_at_once() -> None:
    _, _, step = training(lambda params: torch.optim.AdamW(params, 1e-2), schedule=False)
    with pytest.raises(ArgumentError, match="AdamW has capturable=False"):
        ltt.capture(step)(*batch_of(0))


def test_a_changed_number_is_refused() -> None:
    _, optimizer, step = training(OPTIMIZERS["SGD"][0], schedule=False)
    run = ltt.capture(step, tune=False)
    for seed in range(4):
        run(*batch_of(seed))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ArgumentError, match=r"lr of param_groups\[0\] of SGD has changed from 0.01"):
        run(*batch_of(4))


FAILING = """
import torch
import lt_runtime.torch as ltt
from lt_runtime.errors import CaptureError

def step(x):
    x = torch.nn.functional.dropout(x)
    return x * (2 if x.sum().item() > 0 else 3)

run, x = ltt.capture(step), torch.ones(8, device="cuda")
for _ in range(2):
    run(x)
try:
    run(x)
except CaptureError as error:
    assert "step cannot be captured (" in str(error) and "x.sum().item()" in str(error), error
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert float((x + 1).sum()) == 16.0
    torch.rand(3, device="cuda")
    drop = ltt.capture(torch.nn.functional.dropout)
    assert len({tuple(drop(x).tolist()) for _ in range(9)}) > 1
    print("told")
"""


def test_a_step_that_waits_for_the_gpu_is_told_with_its_line(tmp_path: Any) -> None:
    """This test runs in a process of its own, because PyTorch's allocator may stay in the failed capture's state."""
    (tmp_path / "failing.py").write_text(FAILING)
    environment = {**os.environ, "PYTHONPATH": str(Path(ltt.__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "failing.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.stdout.strip() == "told", ran.stderr
