"""Arguments of the right kind that a call must refuse, and NumPy's scalars, which it must accept as numbers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import lt_runtime as lt
from lt_runtime.arrays.checks import check_disjoint
from lt_runtime.arrays.operand import read
from lt_runtime.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    KindError,
    LayoutError,
    OperandError,
    OverlapError,
    ShapeError,
)
from lt_runtime.ops import call as call_module
from tests.support.fake_gpu import FakeGpu
from tests.support.fake_torch import CpuTensor

WORLDS = pytest.mark.parametrize("on_gpu", [False, True])


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


WRITTEN: dict[str, tuple[str, list[str]]] = {
    "gelu_aux": ("aux", ["a", "b", "c", "out"]),
    "gelu_aux_bias": ("aux", ["a", "b", "bias", "out"]),
    "dgelu_bgrad": ("bias_gradient", ["a", "b", "aux", "out"]),
    "bgradb": ("bias_gradient", ["a", "b", "c", "out"]),
    "none": ("out", ["a", "b"]),
}
"""For each epilogue: an operand that is written, and the operands with which it may not share memory."""


@WORLDS
@pytest.mark.parametrize(
    ("epilogue", "written", "other"),
    [(epilogue, written, other) for epilogue, (written, others) in WRITTEN.items() for other in others],
)
def test_what_a_product_writes(
    request: pytest.FixtureRequest, on_gpu: bool, epilogue: str, written: str, other: str
) -> None:
    given = {name: ones(8, 8) for name in ("a", "b", "c", "out", "aux") if name != "aux" or "gelu" in epilogue}
    given |= {name: ones(8) for name, part in (("bias", "bias"), ("bias_gradient", "bgrad")) if part in epilogue}
    gpu = request.getfixturevalue("gpu") if on_gpu else None
    if gpu:
        given = {name: gpu.cp.asarray(array) for name, array in given.items()}
    package = gpu.lt if gpu else lt
    for _ in range(3):
        # On a GPU a repeated call skips checks: the refused call below, which differs only in an address, must not.
        package.matmul(**given, epilogue=epilogue)
    if other == "bias":
        given["bias"] = given[written][0]
    else:
        given[written] = given[other] if given[written].shape == (8, 8) else given[other][3]
    before = [np.asarray(array.get() if gpu else array).tobytes() for array in given.values()]
    if (written, other) == ("out", "c"):
        return
    with pytest.raises(package.errors.OverlapError, match=f"({written}|out) shares memory with ({other}|{written})"):
        package.matmul(**given, epilogue=epilogue)
    if gpu:
        gpu.streams.synchronize_all()
    assert before == [np.asarray(array.get() if gpu else array).tobytes() for array in given.values()]


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b, g: [lt.Parameter(a, g), lt.Parameter(a, b)],
        lambda a, b, g: [lt.Parameter(a, g), lt.Parameter(b, a)],
        lambda a, b, g: [lt.Parameter(a, g), lt.Parameter(b[::1], g), lt.Parameter(b[3:], g[3:])],
        lambda a, b, g: [lt.Parameter(ones(8, dtype=np.float16), g, a), lt.Parameter(b, a)],
    ],
    ids=["the same data", "the gradient of another", "a part of another's data", "a master copy"],
)
def test_an_array_of_two_parameters(make: Any) -> None:
    with pytest.raises(OverlapError, match=r"\(parameter \d\) shares memory with .* \(parameter \d\); it must not"):
        lt.AdamW(make(ones(8), ones(8), ones(8)))


def test_gradients_may_be_shared_and_parameters_lie_side_by_side() -> None:
    both, gradient = ones(8), ones(4)
    lt.AdamW([lt.Parameter(both[:4], gradient), lt.Parameter(both[4:], gradient)]).step()


def test_layers_with_one_parameter() -> None:
    model = lt.MLP([4, 4, 4], device="cpu")
    model.layers[1].weight = model.layers[0].weight
    with pytest.raises(OverlapError, match=r"layer0.weight.data \(parameter 2\) shares .* layer0.weight.data \(param"):
        lt.AdamW(model.parameters())


def test_a_refused_parameter_leaves_no_master_copies() -> None:
    first = lt.Parameter(ones(4, dtype=np.float16), ones(4, dtype=np.float16))
    with pytest.raises(OverlapError):
        lt.AdamW([first, lt.Parameter(first.data, ones(4, dtype=np.float16))])
    assert first.master is None


def test_interleaved_columns_are_disjoint() -> None:
    memory = ones(4, 6)
    check_disjoint([read(f"c{i}", memory[:, i], 0) for i in range(6)], [])


def test_disjointness_is_that_of_all_pairs() -> None:
    generator, memory = np.random.default_rng(0), ones(64)
    seen = set()
    for _ in range(300):
        spans = [(start, start + length) for start, length in generator.integers((0, 1), (60, 5), (4, 2)).tolist()]
        operands = [read(f"v{i}", memory[slice(*span)], 0) for i, span in enumerate(spans)]
        shared = any(max(a[0], b[0]) < min(a[1], b[1]) for i, a in enumerate(spans[:2]) for b in spans[i + 1 :])
        seen.add(shared)
        if shared:
            with pytest.raises(OverlapError, match=r"v[01] shares memory with v[0-3]"):
                check_disjoint(operands[:2], operands[2:])
        else:
            check_disjoint(operands[:2], operands[2:])
    assert seen == {True, False}


def test_a_factor_that_no_float_holds() -> None:
    with pytest.raises(ArgumentError, match=r"alpha is 10+\.\.\.0+ and beta is 0\.0; floats must hold them"):
        lt.matmul(ones(2, 2), ones(2, 2), alpha=10**400)


@pytest.mark.parametrize("operation", [lt.linear, lt.matmul])
@pytest.mark.parametrize("place", [0, 1])
def test_another_byte_order_is_named(operation: Any, place: int) -> None:
    arrays = [ones(4, 4), ones(4, 4)]
    arrays[place] = arrays[place].astype(">f4")
    with pytest.raises(DTypeError, match=rf"[{'xa' if not place else 'wb'}] has byte order '>', as '>f4' says"):
        operation(*arrays)


def test_another_byte_order_on_a_gpu(gpu: FakeGpu) -> None:
    x = gpu.cp.ndarray((4, 4), ">f4")
    with pytest.raises(gpu.lt.errors.DTypeError, match="x has byte order '>'"):
        gpu.lt.linear(x, gpu.cp.asarray(ones(4, 4)))


def test_tensors_on_the_cpu_need_no_driver_to_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nn = SimpleNamespace(Parameter=type("Parameter", (CpuTensor,), {}))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=CpuTensor, nn=nn))
    monkeypatch.setattr(call_module, "is_current", lambda device: pytest.fail("the driver was asked"))
    with pytest.raises(DeviceError, match=r"x is .*, a tensor on cpu, .* not accepted; pass x\.numpy\(\), or move it"):
        lt.linear(CpuTensor(), CpuTensor())
    with pytest.raises(DeviceError, match=r"w is .*, a tensor on cpu, .* not accepted; pass w\.numpy\(\), or move it"):
        lt.linear(ones(4, 4), CpuTensor())


def test_a_stream_of_another_gpu(gpu: FakeGpu) -> None:
    x, w, out = (gpu.cp.asarray(ones(4, 4)) for _ in range(3))
    model = gpu.lt.MLP([4, 4], device="cuda")
    optimizer = gpu.lt.AdamW(model.parameters())
    step = gpu.lt.TrainStep(model, optimizer)
    labels = gpu.cp.asarray(np.zeros(4, np.int32))
    step(x, labels)
    gpu.streams.synchronize_all()
    for _ in range(4):  # the first calls prepare the call and capture it into a graph
        gpu.lt.linear(x, w, out=out, stream=gpu.stream)
    gpu.streams.synchronize_all()
    foreign = gpu.cp.cuda.Stream()
    gpu.driver.elsewhere[foreign.ptr] = 1
    calls = [
        lambda stream: gpu.lt.linear(x, w, out=out, stream=stream),
        lambda stream: gpu.lt.linear_fwd(x, w, stream=stream),
        lambda stream: gpu.lt.dropout(x, 0.5, gpu.lt.Philox(), stream=stream),
        lambda stream: gpu.lt.bind(gpu.lt.linear, x, w, out=out, stream=stream),
        lambda stream: optimizer.step(stream=stream),
        lambda stream: step(x, labels, stream=stream),
        lambda stream: gpu.lt.prefetch([], device=0, stream=stream),
    ]
    for call in calls:
        for stream in (foreign, foreign.ptr):
            with pytest.raises(gpu.lt.errors.DeviceError, match=r"stream is .*, which is of GPU 1; .* on GPU 0"):
                call(stream)
    del gpu.driver.elsewhere[foreign.ptr]
    # A refused stream is not remembered: another stream may get the same handle.
    gpu.lt.linear(x, w, out=out, stream=foreign)
    gpu.streams.synchronize_all()


def test_a_stream_is_asked_for_its_gpu_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, stream, asked = gpu.cp.asarray(ones(4, 4)), gpu.cp.asarray(ones(4, 4)), gpu.cp.cuda.Stream(), []
    real = driver.cuStreamGetDevice
    monkeypatch.setattr(driver, "cuStreamGetDevice", lambda handle: asked.append(handle) or real(handle))
    for _ in range(5):
        gpu.lt.linear(x, w, stream=stream)
    gpu.streams.synchronize_all()
    assert asked == [stream.ptr]


@WORLDS
def test_numpys_scalars_count(request: pytest.FixtureRequest, on_gpu: bool) -> None:
    gpu = request.getfixturevalue("gpu") if on_gpu else None
    package, place = (gpu.lt, gpu.cp.asarray) if gpu else (lt, lambda array: array)
    i, f = np.int64, np.float32
    device = i(0) if on_gpu else "cpu"
    model = package.MLP(np.array([4, 8, 3]), dropout=f(0.5), seed=np.uint32(7), device=device)
    assert [type(size) for size in model.dims] == [int] * 3
    schedule = package.schedules.warmup_cosine(np.int32(1), np.int16(9), f(0.25))
    scaler = package.GradScaler(f(1024), np.float64(2), f(0.5), i(10))
    options = {"lr": f(0.5), "betas": (f(0.5), f(0.75)), "eps": f(0.125), "max_norm": f(1), "seed": np.uint64(3)}
    optimizer = package.AdamW(model.parameters(), **options, weight_decay=i(0), schedule=schedule, scaler=scaler)
    step = package.TrainStep(model, optimizer, batch_size=i(4), accumulate=np.uint8(2), graph=np.bool_(True))
    x, labels = place(ones(4, 4)), place(np.zeros(4, np.int32))
    assert np.isfinite(float(step(x, labels)))
    w, rng = place(ones(8, 4)), package.Philox(np.int32(3), np.uint8(1), np.uint32(2))
    assert rng == package.Philox(3, 1, 2)
    assert type(rng.step) is int
    plain = package.dropout(x, 0.5, package.Philox(3, 1, 2))
    assert (plain == package.dropout(x, np.float64(0.5), rng)).all()
    y, ctx = package.linear_fwd(x, w, activation="leaky_relu", negative_slope=f(0.5), propagate_nan=np.bool_(True))
    package.linear_bwd(y, ctx, need_dx=np.bool_(False))
    assert (package.matmul(x, w.T, alpha=f(2), beta=i(0)) == 8).all()
    package.cross_entropy(x, labels, label_smoothing=f(0.25), ignore_index=i(-100), grad_scale=f(2), share=f(0.5))
    assert len([*package.prefetch([np.ones(1)], np.int8(1), "cpu")]) == 1
    if gpu:
        gpu.lt.linear(x, w, stream=i(gpu.stream.ptr))
        gpu.streams.synchronize_all()


def test_errors_of_huge_values_are_short() -> None:
    for value in ("x" * 10**6, 10**5000, [0] * 10**6, np.zeros(10**6)):
        with pytest.raises(KindError) as caught:
            lt.AdamW(lt.MLP([2, 2], device="cpu").parameters(), schedule=value)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 250


MASKED = {
    "x": lambda odd: lt.linear(odd(2, 2), ones(2, 2)),
    "w": lambda odd: lt.linear_fwd(ones(2, 2), odd(2, 2)),
    "out": lambda odd: lt.matmul(ones(2, 2), ones(2, 2), out=odd(2, 2)),
    "dy": lambda odd: lt.linear_bwd(odd(2, 2), lt.linear_fwd(ones(2, 2), ones(2, 2))[1]),
    "target": lambda odd: lt.mse_loss(ones(2, 2), odd(2, 2)),
    "p.data": lambda odd: lt.AdamW([lt.Parameter(odd(2, 2), ones(2, 2), name="p")]),
}


@pytest.mark.parametrize("name", MASKED)
def test_arrays_with_arithmetic_of_their_own(name: str) -> None:
    with pytest.raises(OperandError, match=rf"^{name} is a masked array of shape \(2, 2\); .* {name}.filled\(value\)"):
        MASKED[name](lambda *shape: np.ma.masked_equal(ones(*shape), 0))
    with pytest.raises(OperandError, match=rf"^{name} is a numpy.matrix of shape \(2, 2\); .* numpy.asarray\({name}\)"):
        MASKED[name](lambda *shape: ones(*shape).view(np.matrix))


@WORLDS
@pytest.mark.parametrize(
    ("epilogue", "shape", "dtype", "error"),
    [
        ("gelu_aux", (8, 8), np.float16, DTypeError),
        ("gelu_aux", (8, 9), np.float32, ShapeError),
        ("gelu_aux", (1, 8, 8), np.float32, ShapeError),
        ("dgelu", (8,), np.float32, ShapeError),
        ("relu_aux", (8, 16), np.bool_, DTypeError),
        ("relu_aux", (8, 16), np.int8, DTypeError),
        ("relu_aux", (8, 8), np.float32, DTypeError),
        ("relu_aux", (7, 16), np.uint8, ShapeError),
        ("relu_aux", (1, 8, 16), np.uint8, ShapeError),
        ("drelu", (8, 0), np.uint8, ShapeError),
        ("drelu", (8, 17), np.uint8, LayoutError),
    ],
)
def test_auxiliary_matrices_are_refused_alike(
    gpu: FakeGpu, on_gpu: bool, epilogue: str, shape: tuple[int, ...], dtype: Any, error: type[Exception]
) -> None:
    package, place = (gpu.lt, gpu.cp.asarray) if on_gpu else (lt, lambda array: array)
    aux = place(np.ones(shape, dtype))
    with pytest.raises(getattr(package.errors, error.__name__), match=r"^aux (is|has) "):
        package.matmul(place(ones(8, 8)), place(ones(8, 8)), epilogue=epilogue, aux=aux)
    assert (aux if not on_gpu else gpu.host_of(aux)).all()


def _with_gaps(cp: Any, rows: int, columns: int) -> Any:
    """Makes a matrix in which neither axis has unit stride."""
    return cp.asarray(ones(2 * rows, 3 * columns))[::2, ::3]


def _on_gpu(*shape: int, dtype: Any = np.float32) -> Any:
    return lambda cp: cp.asarray(ones(*shape, dtype=dtype))


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("linear_fwd", {"w": _on_gpu(5, 5)}, "ShapeError", "w has shape"),
    ("linear_fwd", {"x": _on_gpu(6, 4, dtype=np.float64)}, "DTypeError", "x has type float64"),
    ("linear_fwd", {"w": lambda cp: ones(5, 4)}, "DeviceError", "w in host memory"),
    ("linear_fwd", {"w": lambda cp: _with_gaps(cp, 5, 4)}, "LayoutError", r"w .*lt\.contiguous\(w\)"),
    ("linear_fwd", {"bias": lambda cp: cp.asarray(ones(10))[::2]}, "LayoutError", "bias has stride"),
    ("linear_fwd", {"out": _on_gpu(6, 5, dtype=np.float16)}, "DTypeError", "out is float16"),
    ("linear_bwd", {"dy": lambda cp: ones(6, 5)}, "DeviceError", "dy"),
    ("linear_bwd", {"out_dx": _on_gpu(4, 6)}, "ShapeError", "out_dx has shape"),
    ("matmul", {"b": lambda cp: ones(4, 5)}, "DeviceError", "b in host memory"),
    ("matmul", {"a": lambda cp: _with_gaps(cp, 6, 4)}, "LayoutError", "a .*neither axis is contiguous"),
    ("matmul", {"alpha": _on_gpu(1)}, "ArgumentError", "alpha and beta must both"),
    ("matmul", {"alpha": _on_gpu(2), "beta": _on_gpu(1)}, "DTypeError", "alpha is float32 of shape"),
    ("matmul", {"epilogue": lambda cp: "gelu_aux", "aux": _on_gpu(6, 5)}, "LayoutError", "aux has leading dimension 5"),
    (
        "matmul",
        {"a": _on_gpu(6, 4, dtype="f8"), "b": _on_gpu(4, 5, dtype="f8"), "out": lambda cp: None}
        | {"c": lambda cp: cp.asarray(ones(5, 6, dtype="f8")).T},
        "LayoutError",
        "c is column-major and out row-major",
    ),
    ("dropout", {"step": lambda cp: np.zeros(1, np.uint32)}, "LtError", "step"),
    ("dropout", {"step": lambda cp: cp.asarray(np.zeros(1, np.int32))}, "DTypeError", "step"),
    ("dropout", {"step": lambda cp: cp.asarray(np.zeros(2, np.uint32))}, "DTypeError", "step"),
    ("AdamW", {"data": lambda cp: ones(4)}, "DeviceError", r"b\.data"),
    ("AdamW", {"data": lambda cp: cp.asarray(ones(8))[::2]}, "LayoutError", r"b\.data"),
]


@pytest.mark.parametrize(("name", "changes", "error", "message"), REFUSED)
def test_device_arrays_that_are_refused(gpu: FakeGpu, name: str, changes: Any, error: str, message: str) -> None:
    """A refused call writes nothing, and leaves the stream usable."""
    place, package = gpu.cp.asarray, gpu.lt
    x, w, bias, written = (place(ones(*shape)) for shape in ((6, 4), (5, 4), (5,), (6, 5)))
    given: dict[str, Any] = {"x": x, "w": w, "bias": bias, "out": written}
    if name == "linear_bwd":
        given = {"dy": place(ones(6, 5)), "ctx": package.linear_fwd(x, w, bias, activation="tanh")[1]}
        given["out_dw"] = written = place(ones(5, 4))
    if name == "matmul":
        given = {"a": x, "b": place(ones(4, 5)), "out": written}
    if name == "dropout":
        given = {"x": x, "p": 0.5, "out": (written := place(ones(6, 4)))}
    if name == "AdamW":
        given = {"data": place(ones(4)), "grad": written}
    given |= {each: make(gpu.cp) for each, make in changes.items()}
    calls = {
        "dropout": lambda step, **more: package.dropout(**more, rng=package.Philox(step=step)),
        "AdamW": lambda **more: package.AdamW([package.Parameter(x, x), package.Parameter(**more, name="b")]),
    }
    with pytest.raises(getattr(package.errors, error), match=message):
        calls.get(name, getattr(package, name))(**given)
    y = package.linear(x, w)
    gpu.streams.synchronize_all()
    assert (gpu.host_of(written) == 1).all()
    assert (gpu.host_of(y) == 4).all()


def test_columns_of_one_buffer_and_a_gradient_over_its_operand(gpu: FakeGpu) -> None:
    buffer, w, dy = (gpu.cp.asarray(ones(*shape)) for shape in ((6, 8), (4, 4), (6, 4)))
    x = buffer[:, :4]
    with pytest.raises(gpu.lt.errors.OverlapError, match="out shares memory with x"):
        gpu.lt.linear(x, w, out=buffer[:, 2:6])
    gpu.lt.linear(x, w, out=buffer[:, 4:])  # the two views' columns interleave without overlap
    with pytest.raises(gpu.lt.errors.OverlapError, match="out_dx shares memory with dy"):
        gpu.lt.linear_bwd(dy, gpu.lt.linear_fwd(x, w)[1], out_dx=dy)
    gpu.streams.synchronize_all()
    assert gpu.host_of(buffer).tolist() == [[1.0] * 4 + [4.0] * 4] * 6
