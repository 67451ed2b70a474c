"""Launches check their arguments and pass them to the library, whose functions are replaced by stand-ins."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import ComputeType, DataType, Epilogue, PointerMode, Status
from lt_runtime.cublaslt.validation import RULES
from lt_runtime.errors import AlignmentError, ArgumentError, CublasLtError, DTypeError, ShapeError
from tests.support.cublaslt_product import ALGORITHM, GELU, HANDLE, RELU, VECTOR, Product, launch
from tests.support.cublaslt_recorder import Recorder, offers

M, L = cublaslt.MatmulDescAttribute, cublaslt.MatrixLayoutAttribute
FP32, FP16 = DataType.R_32F, DataType.R_16F

ARGUMENTS = (
    *("handle", "desc", "alpha", "a", "a_layout", "b", "b_layout", "beta", "c", "c_layout", "d", "d_layout"),
    *("algo", "workspace", "size", "stream"),
)


class Launches(list[dict[str, Any]]):
    """The arguments of each launch, by name."""

    def record(self, *arguments: Any) -> int:
        self.append(dict(zip(ARGUMENTS, arguments, strict=True)))
        return 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    seen = Launches()
    stand_ins = {"cublasLtMatmul": seen.record, "cublasLtMatmulAlgoGetHeuristic": offers(3)}
    Recorder.install(monkeypatch, stand_ins)
    return seen


def test_arguments_of_the_library(launches: Launches) -> None:
    product = Product()
    desc, layouts = product.desc(), product.layouts()
    launch(desc, (1.5, -2), list(product.addresses), layouts)
    (call,) = launches
    assert (call["handle"], call["desc"], call["stream"]) == (HANDLE, desc.handle, 7)
    assert [call[name] for name in "abcd"] == list(product.addresses)
    assert [call[f"{name}_layout"] for name in "abcd"] == [layout.handle for layout in layouts]
    assert struct.unpack("f", call["alpha"]) + struct.unpack("f", call["beta"]) == (1.5, -2.0)
    assert (call["algo"], call["workspace"], call["size"]) == (ALGORITHM.blob, 0x50000, 4096)


@pytest.mark.parametrize(
    ("compute", "scale", "code"),
    [
        (ComputeType.COMPUTE_16F, DataType.R_16F, "e"),
        (ComputeType.COMPUTE_32F, DataType.R_32F, "f"),
        (ComputeType.COMPUTE_64F, DataType.R_64F, "d"),
        (ComputeType.COMPUTE_32I, DataType.R_32I, "i"),
        (ComputeType.COMPUTE_32F, DataType.C_32F, "ff"),
        (ComputeType.COMPUTE_64F, DataType.C_64F, "dd"),
    ],
)
def test_scalars_have_the_scale_type(launches: Launches, compute: Any, scale: Any, code: str) -> None:
    ab, cd = next(rule[1:] for rule in RULES[compute] if rule[0] == scale)
    alpha = 2 + 3j if len(code) == 2 else 3
    Product(compute=compute, scale=scale, types=(ab, ab, cd, cd), alpha=alpha).launch()
    assert struct.unpack(code, launches[0]["alpha"]) == ((2.0, 3.0) if len(code) == 2 else (3,))


@pytest.mark.parametrize(
    ("mode", "alpha", "beta", "passed"),
    [
        (PointerMode.DEVICE, 0x600, 0x700, (0x600, 0x700)),
        (PointerMode.DEVICE_VECTOR, 0x600, 0x700, (0x600, 0x700)),
        (PointerMode.ALPHA_DEVICE_VECTOR_BETA_ZERO, 0x600, 5, (0x600, None)),
        (PointerMode.ALPHA_DEVICE_VECTOR_BETA_HOST, 0x600, 0.5, (0x600, struct.pack("f", 0.5))),
    ],
)
def test_scalars_on_the_device(launches: Launches, mode: PointerMode, alpha: int, beta: Any, passed: Any) -> None:
    Product(attributes={M.POINTER_MODE: mode}, alpha=alpha, beta=beta).launch()
    assert (launches[0]["alpha"], launches[0]["beta"]) == passed


DEVICE: dict[str, Any] = {"attributes": {M.POINTER_MODE: PointerMode.DEVICE}, "alpha": 0x600}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({name: value}, ArgumentError, rf"{name} is .*; accepted: a number of type R_32F")
        for name in ("alpha", "beta")
        for value in ("1", None, 1j, 1e300, [1.0])
    ),
    (DEVICE | {"beta": 0}, ArgumentError, "beta is 0"),
    (DEVICE | {"beta": 1.0}, ArgumentError, "beta is 1.0"),
    (DEVICE | {"beta": 0x602}, AlignmentError, "beta is 0x602"),
    *(
        ({"addresses": tuple(at if each == name else 0x10000 for each in "abcd")}, error, f"^{name} is .*; accepted: ")
        for name in "abcd"
        for error, addresses in ((ArgumentError, (0, -4, 2**64, None, 1.0)), (AlignmentError, (0x10002,)))
        for at in addresses
    ),
    ({"workspace": 0x50080}, AlignmentError, "workspace is 0x50080; accepted: a multiple of 256"),
    ({"workspace": 0}, ArgumentError, "workspace is 0; accepted: a device address"),
    ({"workspace": -256}, ArgumentError, "workspace is -256"),
    ({"workspace_size": 1023}, ArgumentError, "workspace_size is 1023; accepted: 1024 or more"),
    ({"workspace_size": -1}, ArgumentError, "workspace_size is -1"),
    # An address must be aligned to the size of its own operand's elements, not to a larger one of another operand.
    ({"types": (FP16, FP16, FP32, FP32), "addresses": (2, 2, 4, 2)}, AlignmentError, "d is 0x2; .* a multiple of 4"),
    ({"types": (FP16, FP16, FP32, FP32), "addresses": (2, 1, 4, 4)}, AlignmentError, "b is 0x1; .* a multiple of 2"),
    ({"addresses": (4, 8, 12, 12), "leading": {"c": 65}}, ArgumentError, "c is d, and their layouts differ"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"types": (FP16, FP16, FP32, FP32), "addresses": (2, 2, 4, 4)},
    {"addresses": (4, 8, 12, 12)},
    {"leading": {"c": 65}},
    {"algorithm": None, "workspace": 0, "workspace_size": 0},
    {"algorithm": cublaslt.Algorithm(bytes(64)), "workspace": 0, "workspace_size": 0},
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refused_arguments(launches: Launches, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Product(**changes).launch()
    assert launches == []


@pytest.mark.parametrize("changes", ACCEPTED)
def test_accepted_arguments(launches: Launches, changes: dict[str, Any]) -> None:
    product = Product(**changes)
    product.launch()
    assert launches[0]["size"] == product.workspace_size
    assert (launches[0]["algo"] is None) == (product.algorithm is None)


def test_an_error_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder.install(monkeypatch, {"cublasLtMatmul": lambda *_: int(Status.EXECUTION_FAILED)})
    with pytest.raises(CublasLtError, match=r"cublasLtMatmul returned CUBLAS_STATUS_EXECUTION_FAILED \(13\): "):
        Product().launch()


def test_a_changed_descriptor_is_checked_again(launches: Launches) -> None:
    product = Product(attributes={M.EPILOGUE: Epilogue.BIAS, M.BIAS_POINTER: 256})
    desc, layouts = product.desc(), product.layouts()

    def again() -> None:
        launch(desc, (1.0, 0.0), list(product.addresses), layouts)

    again()
    desc.set(M.BIAS_POINTER, 512)
    again()
    desc.set(M.BIAS_POINTER, 0)
    with pytest.raises(ArgumentError, match=r"BIAS_POINTER is 0; epilogue BIAS needs an address"):
        again()
    desc.set(M.BIAS_POINTER, 512)
    layouts[0].set(L.LD, 63)
    with pytest.raises(ArgumentError, match=r"layout of A: leading_dimension is 63; it must be at least rows \(64\)"):
        again()
    layouts[0].set(L.LD, 70)
    again()
    desc.set(M.SCALE_TYPE, DataType.R_64F)
    with pytest.raises(DTypeError, match="COMPUTE_32F takes"):
        again()
    assert len(launches) == 3


@pytest.mark.parametrize("which", range(5))
def test_a_descriptor_that_is_closed_between_two_launches(launches: Launches, which: int) -> None:
    product = Product()
    desc, layouts = product.desc(), product.layouts()
    launch(desc, (1.0, 0.0), list(product.addresses), layouts)
    closed: Any = [desc, *layouts][which]
    closed.close()
    with pytest.raises(ArgumentError, match=f"this {type(closed).__name__} is closed"):
        launch(desc, (1.0, 0.0), list(product.addresses), layouts)


@pytest.mark.parametrize("epilogue", Epilogue)
def test_an_epilogue_needs_its_pointers_at_the_launch(launches: Launches, epilogue: Epilogue) -> None:
    """Without the pointer a launch would access address 0. The heuristic may be queried before pointers are set."""
    attributes = {M.EPILOGUE: epilogue, M.EPILOGUE_AUX_LD: 128}
    product = Product(attributes=attributes)
    with cublaslt.MatmulPreference() as preference:
        assert len(cublaslt.get_heuristics(HANDLE, product.desc(), *product.layouts(), preference, 8)) == 3
    needed = [M.BIAS_POINTER] * (epilogue in VECTOR) + [M.EPILOGUE_AUX_POINTER] * (epilogue in RELU + GELU)
    for attribute in needed:
        with pytest.raises(ArgumentError, match=f"{attribute.name} is 0; epilogue {epilogue.name} needs an address"):
            Product(attributes=attributes).launch()
        attributes[attribute] = 256
    Product(attributes=attributes).launch()


def test_arrays_of_pointers_are_aligned_to_8_bytes(launches: Launches) -> None:
    product = Product(batch={name: {"batch_count": 3} for name in "abcd"}, types=(FP16,) * 4)
    desc, layouts = product.desc(), product.layouts()
    for layout in layouts:
        layout.set(L.BATCH_MODE, cublaslt.BatchMode.POINTER_ARRAY)
    launch(desc, (1.0, 0.0), list(product.addresses), layouts)
    with pytest.raises(AlignmentError, match="a is 0x10004; accepted: a multiple of 8"):
        launch(desc, (1.0, 0.0), [0x10004, 0x20000, 0x30000, 0x40000], layouts)


def test_arguments_of_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    Recorder.install(monkeypatch, {"cublasLtMatrixTransform": lambda *call: calls.append(call) or 0})
    desc = cublaslt.MatrixTransformDesc(FP32)
    a, b, c = (cublaslt.MatrixLayout(FP32, 4, 5, 4) for _ in range(3))
    cublaslt.matrix_transform(HANDLE, desc, 2.0, 0x100, a, 3.0, 0x200, b, 0x300, c, 7)
    cublaslt.matrix_transform(HANDLE, desc, 2.0, 0x100, a, 0.0, 0, None, 0x300, c, 7)
    scalars = [struct.pack("f", value) for value in (2.0, 3.0, 0.0)]
    with_b = (scalars[0], 0x100, a.handle, scalars[1], 0x200, b.handle, 0x300, c.handle, 7)
    without = (scalars[0], 0x100, a.handle, scalars[2], None, None, 0x300, c.handle, 7)
    assert calls == [(HANDLE, desc.handle, *with_b), (HANDLE, desc.handle, *without)]


def test_refused_arguments_of_a_transform() -> None:
    desc = cublaslt.MatrixTransformDesc(FP32)
    a, b, c = (cublaslt.MatrixLayout(FP32, rows, cols, rows) for rows, cols in ((4, 5), (5, 4), (4, 5)))

    def transform(alpha: Any = 1.0, second: Any = (0, None), target: int = 0x300) -> None:
        cublaslt.matrix_transform(HANDLE, desc, alpha, 0x100, a, 1.0, *second, target, c, 7)

    with pytest.raises(ShapeError, match=r"op\(B\) is 5×4; C is 4×5"):
        transform(second=(0x200, b))
    with pytest.raises(AlignmentError, match="c is 0x301"):
        transform(target=0x301)
    with pytest.raises(ArgumentError, match="alpha is '1'"):
        transform("1")
    a.set(L.LD, 3)
    with pytest.raises(ArgumentError, match="layout of A: leading_dimension is 3"):
        transform()
