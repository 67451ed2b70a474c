"""`AdamW` does what `torch.optim.AdamW` does: on the CPU, and with the kernels of a GPU built for the CPU."""

from __future__ import annotations

import collections
import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lt_runtime.errors import ArgumentError, CaptureError, DeviceError, DTypeError, LayoutError
from lt_runtime.torch import AdamW, updates

SHAPES = [(3, 5), (300,), (0,), (2049,), (), (2, 3, 4, 4)]
Make = Callable[[list[Any]], Any]
"""Type of a function that makes an optimizer of parameters."""


def parameters(dtype: Any = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    made[-1].data = (
        made[-1].data.contiguous(memory_format=torch.channels_last) if made[-1].dim() == 4 else made[-1].data
    )
    return made


def set_gradients(given: list[Any], seed: int, used: Callable[[int], bool] = lambda _: True) -> None:
    """New gradients of the same values for parameters of any type; one lies at an odd address."""
    generator = torch.Generator().manual_seed(seed)
    for i, each in enumerate(given):
        values = torch.randn(each.shape, generator=generator) * 0.3
        each.grad = None
        if used(i):
            memory = torch.empty(each.numel() + 1, dtype=each.dtype)[i % 2 : each.numel() + i % 2]
            each.grad = memory.as_strided(each.shape, each.stride(), i % 2).copy_(values)


def train(made: Any, given: list[Any], steps: range, clip: float | None = None, **more: Any) -> None:
    for step in steps:
        set_gradients(given, step, **more)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(given, clip)
        made.step()


def assert_close(found: list[Any], wanted: list[Any], rtol: float = 2e-6, atol: float = 2e-7) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.detach().float(), theirs.detach().float(), rtol=rtol, atol=atol)


def in_groups(of: Any, **options: Any) -> Make:
    """Makes two parameter groups, of which the first has options of its own."""
    return lambda given: of([{"params": given[:2], **options}, {"params": given[2:]}], lr=1e-2)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "betas": (0.8, 0.9)},
    "maximize": {"maximize": True, "weight_decay": 0.2},
    "a tensor's rate": {"lr": torch.tensor(3e-2)},
    "no decay": {"weight_decay": 0.0, "eps": 1e-3, "lr": 1e-1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_steps_are_those_of_pytorch(path: str, options: dict[str, Any], clip: float | None) -> None:
    ours, theirs = parameters(), parameters()
    made = in_groups(lambda groups, **more: AdamW(groups, max_norm=clip, **more), **options)(ours)
    twin = in_groups(torch.optim.AdamW, **options)(theirs)
    # Parameter 3 gets its first gradient in the fourth step, and parameter 1 gets one in every other step only.
    for step in range(6):
        used = lambda i, step=step: (i != 3 or step > 2) and (i != 1 or step % 2 == 0)  # noqa: E731
        train(made, ours, range(step, step + 1), used=used)
        train(twin, theirs, range(step, step + 1), used=used, clip=clip)
    assert_close(ours, theirs)
    steps = [each["step"] for each in twin.state_dict()["state"].values()]
    assert [each["step"] for each in made.state_dict()["state"].values()] == steps
    assert (made.grad_norm is None) == (clip is None)
    if clip is not None:
        set_gradients(ours, 9)
        made.step()
        assert float(made.grad_norm) == pytest.approx(
            float(torch.nn.utils.get_total_norm([p.grad for p in ours])), rel=1e-5
        )


@pytest.mark.parametrize("shared", [None, 0.7])
def test_a_group_is_clipped_by_its_own_norm(path: str, shared: float | None) -> None:
    ours, theirs = parameters(), parameters()
    groups = [{"params": ours[:2], "max_norm": 0.5}, {"params": ours[2:4]}, {"params": ours[4:], "max_norm": None}]
    made = AdamW(groups, 1e-2, max_norm=shared)
    twin = torch.optim.AdamW([{"params": each} for each in (theirs[:2], theirs[2:4], theirs[4:])], 1e-2)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        norm = torch.nn.utils.get_total_norm([each.grad for each in theirs[2:4]])
        for limit, some in ((0.5 if step < 2 else 0.2, theirs[:2]), (shared, theirs[2:4])):
            _ = limit and torch.nn.utils.clip_grad_norm_(some, limit)
        made.step()
        twin.step()
        assert made.grad_norm is None if shared is None else float(made.grad_norm) == pytest.approx(float(norm))
        # The first loaded state has no "max_norm", later ones have.
        made.load_state_dict(twin.state_dict() if step == 0 else made.state_dict())
        made.param_groups[0]["max_norm"] = 0.5 if step < 1 else 0.2
    assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_copies_round_once(path: str, dtype: Any) -> None:
    ours, exact = parameters(dtype), [each.detach().float().requires_grad_() for each in parameters(dtype)]
    made, twin = AdamW(ours, 1e-3, masters=True), torch.optim.AdamW(exact, 1e-3)
    for step in range(6):
        set_gradients(ours, step)
        for each, wide in zip(ours, exact, strict=True):
            wide.grad = each.grad.float()
        made.step()
        twin.step()
    assert_close([made.state[each]["master"] for each in ours], exact)
    assert_close(ours, [each.to(dtype) for each in exact], rtol=2**-7)
    # Values that are written between steps go into the master copy; its other elements keep all their bits.
    with torch.no_grad():
        ours[1][7] = exact[1][7] = 100.0
    set_gradients(ours, 7, used=lambda i: i == 1)
    for each, wide in zip(ours, exact, strict=True):
        wide.grad = None if each.grad is None else each.grad.float()
    made.step()
    twin.step()
    assert_close([made.state[ours[1]]["master"]], [exact[1]])
    with torch.no_grad():
        ours[1][8] = 50.0
    made.apply_settings()  # `ltt.capture` calls this before each launch of a captured step
    assert float(made.state[ours[1]]["master"][8]) == 50.0


def test_bf16_is_rounded_stochastically(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for kind in (updates.step_class(torch.ones(1)), updates.HostStep):
        monkeypatch.setattr(updates, "step_class", lambda _, kind=kind: kind)
        ours = [torch.ones(4096, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
        made = AdamW([{"params": each} for each in ours], 1e-4, weight_decay=0.0, seed=5)
        for _ in range(20):
            for each in ours:
                each.grad = torch.ones_like(each)
            made.step()
        results.append(torch.stack(ours).detach().float())
        assert made.state[ours[0]]["exp_avg"].dtype is torch.bfloat16
    found, reference = results
    # Rounded to nearest, 1 - 1e-4 would stay 1. The mean of the draws has a deviation of about 5e-5.
    assert float(found.mean()) == pytest.approx(1 - 20e-4, abs=3e-4)
    assert (found == reference).float().mean() > 0.99
    assert (found[0] == found[1]).float().mean() < 0.9


def test_state_dicts_load_both_ways(path: str) -> None:
    for amsgrad in (False, True):
        ours, theirs = parameters(), parameters()
        made, twin = AdamW(ours, 1e-2, amsgrad=amsgrad), torch.optim.AdamW(theirs, 1e-2, amsgrad=amsgrad)
        train(made, ours, range(3))
        train(twin, theirs, range(3))
        swapped, back = torch.optim.AdamW(ours, 1e-2), AdamW(theirs, 1e-2)
        swapped.load_state_dict(pickle.loads(pickle.dumps(made.state_dict())))
        back.load_state_dict(twin.state_dict())
        train(swapped, ours, range(3, 6))
        train(back, theirs, range(3, 6))
        assert_close(ours, theirs)


def test_loading_keeps_master_copies_and_types(path: str) -> None:
    for options in ({"masters": True, "ema_decay": 0.5}, {"moments": torch.float32}, {"moments": torch.bfloat16}):
        ours = parameters(torch.bfloat16)
        made = AdamW(ours, 1e-3, **options)
        train(made, ours, range(3))
        copied = [each.detach().clone().requires_grad_() for each in ours]
        fresh = AdamW(copied, 1e-3, **options)
        fresh.load_state_dict(made.state_dict())
        wanted, found = made.state_dict()["state"], fresh.state_dict()["state"]
        for i in wanted:
            for name, each in wanted[i].items():
                torch.testing.assert_close(found[i][name], each, rtol=0, atol=0)


def test_copies_and_pickles_continue(path: str) -> None:
    ours = parameters()
    made = AdamW(ours, 1e-2, max_norm=1.0)
    train(made, ours, range(2))
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        train(copied, copied.param_groups[0]["params"], range(2, 4))
        continued = copied.param_groups[0]["params"]
    train(made, ours, range(2, 4))
    assert_close(ours, continued, 0, 0)


def test_state_that_was_moved_away_and_back_is_found(path: str) -> None:
    ours, theirs = parameters(), parameters()
    for kind, given in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        made = kind(given, 1e-2)
        train(made, given, range(2))
        for state in made.state.values():
            state.update({name: each.clone() for name, each in state.items()})
        train(made, given, range(2, 4))
        assert {float(each["step"]) for each in made.state_dict()["state"].values()} == {4.0}
    assert_close(ours, theirs)


def first_state(made: Any) -> dict[str, Any]:
    return next(iter(made.state.values()))


def replace_states(made: Any) -> None:
    for each in [*made.state][1:3]:
        made.state[each] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.ones_like(each),
            "exp_avg_sq": each.detach() ** 2,
        }


def load_with_hooks(made: Any) -> None:
    def before(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "state": {i: {**each, "exp_avg": each["exp_avg"] * 2} for i, each in given["state"].items()}}

    made.register_load_state_dict_pre_hook(before)
    made.register_load_state_dict_post_hook(lambda made: first_state(made).update(step=torch.tensor(9.0)))
    made.load_state_dict(copy.deepcopy(made.state_dict()))


def write_data(made: Any) -> None:
    for group in made.param_groups:
        for each in group["params"]:
            each.data = each.data * 2


def later(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that replaces all states by equal ones, takes a step, and then makes a change."""

    def run(made: Any) -> None:
        made.state.update({each: dict(state) for each, state in made.state.items()})
        train(made, [each for group in made.param_groups for each in group["params"]], range(9, 10))
        change(made)

    return run


CHANGES: dict[str, Callable[[Any], Any]] = {
    "states": replace_states,
    "no states": lambda made: made.state.clear(),
    "all states": lambda made: setattr(made, "state", collections.defaultdict(dict)),
    "a moment": later(lambda made: first_state(made).update(exp_avg=first_state(made)["exp_avg"] + 1)),
    "a step": lambda made: first_state(made).update(step=torch.tensor(1.0)),
    "values of a step": lambda made: first_state(made)["step"].sub_(2),
    "a note": lambda made: first_state(made).update(note="text"),
    "data": write_data,
    "groups": lambda made: setattr(made, "param_groups", [{**each, "lr": 0.3} for each in made.param_groups]),
    "a group's parameters": lambda made: made.param_groups[1]["params"].insert(0, made.param_groups[0]["params"].pop()),
    "betas": lambda made: made.param_groups[0].update(betas=[0.5, 0.6]),
    "hooks": load_with_hooks,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_step_follows_what_the_caller_has_changed(path: str, change: Callable[[Any], Any]) -> None:
    ours, theirs = parameters(), parameters()
    steps = []
    for kind, given in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        made = in_groups(kind, lr=0.1)(given)
        train(made, given, range(3))
        change(made)
        train(made, given, range(3, 6))
        steps.append([float(made.state[each]["step"]) for each in given])
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert steps[0] == steps[1]


def test_states_that_the_caller_has_replaced_are_freed(path: str) -> None:
    ours = parameters()
    made = AdamW(ours)
    train(made, ours, range(2))
    former = weakref.ref(first_state(made)["exp_avg"])
    made.state.clear()
    train(made, ours, range(2, 3))
    assert former() is None


def test_steps_may_be_taken_in_inference_mode(path: str) -> None:
    ours, theirs = parameters(), parameters()
    with torch.inference_mode():
        train(AdamW(ours), ours, range(3))
        train(torch.optim.AdamW(theirs), theirs, range(3))
    assert_close(ours, theirs)


def test_hooks_change_the_state_that_is_saved() -> None:
    ours = parameters()
    made = AdamW(ours)
    train(made, ours, range(1))
    made.register_state_dict_post_hook(lambda _, packed: {"of a hook": packed["state"][0]["step"]})
    assert made.state_dict() == {"of a hook": torch.tensor(1.0)}


def test_nothing_is_updated_if_a_later_group_has_bad_betas(path: str) -> None:
    ours = parameters()
    made = in_groups(AdamW)(ours)
    train(made, ours, range(1))
    made.param_groups[1]["betas"] = (0.9, 2.0)
    before = copy.deepcopy(ours)
    with pytest.raises(ArgumentError, match=r"betas is \(0.9, 2.0\)"):
        train(made, ours, range(1))
    assert_close(ours, before, 0, 0)


def test_a_group_may_be_added_and_schedules_act(path: str) -> None:
    ours, theirs = parameters(), parameters()
    made, twin = AdamW(ours[:3], 1e-2), torch.optim.AdamW(theirs[:3], 1e-2)
    for each, given in ((made, ours), (twin, theirs)):
        train(each, given, range(2))
        each.add_param_group({"params": given[3:], "lr": 3e-2})
        schedule = torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step))
        for step in range(2, 6):
            train(each, given, range(step, step + 1))
            schedule.step()
    assert_close(ours, theirs)


def test_a_schedule_may_move_the_betas(path: str) -> None:
    ours, theirs = parameters(), parameters()
    for kind, given in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        made = kind(given, 1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(made, 1e-1, total_steps=8)
        for step in range(6):
            train(made, given, range(step, step + 1))
            schedule.step()
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_loss_scale_is_pytorchs(path: str, clip: float | None) -> None:
    results = []
    for kind, more in ((AdamW, {"max_norm": clip}), (torch.optim.AdamW, {})):
        given = parameters()
        made = kind([{"params": given[:2], "maximize": True}, {"params": given[2:]}], 1e-2, fused=True, **more)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(6):
            set_gradients(given, step)
            for each in given:
                each.grad *= scaler.scale(torch.tensor(1.0))
            if step == 3:
                given[1].grad[7] = float("inf")
            if step == 4 or (clip and not more):
                scaler.unscale_(made)
            if clip and not more:
                torch.nn.utils.clip_grad_norm_(given, clip)
            scaler.step(made)
            scaler.update()
        steps = {float(each["step"]) for each in made.state_dict()["state"].values()}
        results.append((given, scaler.get_scale(), steps))
    (ours, *found), (theirs, *wanted) = results
    assert found == wanted
    assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_follow_the_parameters(path: str, dtype: Any) -> None:
    ours = parameters(dtype)
    made, wanted = AdamW(ours, 1e-1, ema_decay=0.75), [each.detach().clone().float() for each in ours]
    for step in range(4):
        train(made, ours, range(step, step + 1))
        wanted = [0.75 * mean + 0.25 * each.detach().float() for mean, each in zip(wanted, ours, strict=True)]
    assert_close([made.state[each]["ema"] for each in ours], wanted)


def test_sharded_parameters_are_updated_by_their_shards(path: str, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        results = []
        for kind, more in ((AdamW, {"ema_decay": 0.5}), (torch.optim.AdamW, {})):
            model = fully_shard(torch.nn.Linear(5, 3, bias=False), mesh=mesh)
            torch.nn.init.ones_(model.weight.to_local())
            made = kind(model.parameters(), 1e-2, **more)
            for step in range(3):
                made.zero_grad()
                model(torch.full((2, 5), 1.0 + step)).square().mean().backward()
                made.step()
            results.append([model.weight.to_local().detach()])
        assert_close(*results)
        sharded = AdamW(model.parameters(), max_norm=1.0)
        with pytest.raises(ArgumentError, match="sharded"):
            sharded.step()
    finally:
        torch.distributed.destroy_process_group()


def test_a_capture_needs_a_step_before_and_no_changed_settings(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = parameters()
    made = AdamW(ours, 1e-2)
    monkeypatch.setattr(updates, "is_capturing", lambda _: True)
    set_gradients(ours, 0)
    with pytest.raises(CaptureError, match="first gradient"):
        made.step()
    monkeypatch.setattr(updates, "is_capturing", lambda _: False)
    train(made, ours, range(1))
    made.param_groups[0]["lr"] = 1e-1
    monkeypatch.setattr(updates, "is_capturing", lambda _: True)
    if path == "GPU":
        before = copy.deepcopy(ours)
        with pytest.raises(CaptureError, match="apply_settings"):
            train(made, ours, range(1))
        assert_close(ours, before, 0, 0)
        monkeypatch.setattr(updates, "is_capturing", lambda _: False)
        made.apply_settings()
        monkeypatch.setattr(updates, "is_capturing", lambda _: True)
    train(made, ours, range(1))


@pytest.mark.parametrize("path", ["GPU"], indirect=True)
def test_no_step_after_a_capture_writes_over_the_addresses_that_the_graph_reads(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, kept = parameters(), []
    made = AdamW(ours, 1e-2)
    train(made, ours, range(1))
    monkeypatch.setattr(updates, "is_capturing", lambda _: True)
    made.step()
    (_, tables, _), before = made._captured[-1], [each.clone() for each in made._captured[-1][1]]
    monkeypatch.setattr(updates, "is_capturing", lambda _: False)
    for step in range(1, 2 + updates._PLACES):
        kept += [each.grad for each in ours]  # so that the next gradients lie elsewhere
        train(made, ours, range(step, step + 1))
    assert all(map(torch.equal, tables, before))


def test_autograd_notices_that_a_step_wrote(path: str) -> None:
    ours = [torch.ones(4).requires_grad_()]
    made, y = AdamW(ours), (ours[0] ** 2).sum()
    train(made, ours, range(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def of_one(dtype: Any = torch.float32, device: str = "cpu", **options: Any) -> Any:
    weight = torch.ones(4, 6, dtype=dtype, device=device).requires_grad_()
    weight.grad = torch.ones_like(weight)
    return AdamW([("net.weight", weight)], **options)


def with_gradient(grad: Any) -> Any:
    made = of_one()
    weight = made.param_groups[0]["params"][0]
    weight.data = weight.data.t() if grad == "moved" else weight.data
    if grad == "gaps":
        weight.data = torch.ones(4, 12)[:, ::2]
    weight.grad = grad if isinstance(grad, torch.Tensor) else torch.empty_strided(weight.shape, weight.stride())
    return made


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "max_norm": (lambda: of_one(max_norm=0.0), ArgumentError, "max_norm is 0.0"),
    "a group's max_norm": (
        lambda: AdamW([{"params": parameters(), "max_norm": -1}]),
        ArgumentError,
        "max_norm is -1; it must be positive",
    ),
    "moments": (lambda: of_one(moments=torch.float16), ArgumentError, "moments is torch.float16"),
    "decay of the averages": (lambda: of_one(ema_decay=1.0), ArgumentError, "ema_decay is 1.0"),
    "differentiable": (lambda: of_one(differentiable=True), ArgumentError, "differentiable"),
    "rate": (lambda: of_one(lr=-1.0), ValueError, "Invalid learning rate"),
    "float64": (lambda: of_one(torch.float64).step(), DTypeError, "net.weight is torch.float64"),
    "complex": (lambda: of_one(torch.complex64).step(), DTypeError, "net.weight is torch.complex64"),
    "sparse": (lambda: with_gradient(torch.ones(4, 6).to_sparse()).step(), LayoutError, r"net.weight.grad is torch.sp"),
    "gradient's strides": (lambda: with_gradient(torch.ones(6, 4).t()).step(), LayoutError, "grad of net.weight has"),
    "gaps": (lambda: with_gradient("gaps").step(), LayoutError, "net.weight has strides"),
    "meta": (lambda: of_one(device="meta").step(), DeviceError, "net.weight is on meta"),
}


@pytest.mark.parametrize(("run", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(run: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"exp_avg": torch.ones(6)}, r"exp_avg of net\.weight has shape \(6,\)"), (None, "no step")],
    ids=["shape", "another optimizer's"],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_loaded(change: Any, message: str) -> None:
    made = of_one()
    made.step()
    given, before = made.state_dict(), copy.deepcopy(made.state_dict())
    given["param_groups"][0]["lr"] = 5.0
    given["state"][0] = {"momentum_buffer": None} if change is None else {**given["state"][0], **change}
    with pytest.raises(ValueError, match=message):
        made.load_state_dict(given)
    assert str(made.state_dict()) == str(before)


def test_a_moment_of_another_type_is_refused() -> None:
    made = of_one()
    made.step()
    first_state(made)["exp_avg_sq"] = torch.ones(4, 6, dtype=torch.bfloat16)
    with pytest.raises(DTypeError, match=r"exp_avg_sq of net\.weight is torch\.bfloat16; .* all float32 or all"):
        made.step()


def test_a_parameter_that_was_resized_is_refused() -> None:
    made = of_one()
    made.step()
    weight = made.param_groups[0]["params"][0]
    weight.data, weight.grad = torch.ones(2, 6), torch.ones(2, 6)
    with pytest.raises(LayoutError, match=r"exp_avg of net\.weight"):
        made.step()
