"""What a launch checks and hands over. The library's own calls, which need a GPU, are stood in for."""

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


ARGUMENTS = (
    *("handle", "desc", "alpha", "a", "a_layout", "b", "b_layout", "beta", "c", "c_layout", "d", "d_layout"),
    *("algo", "workspace", "size", "stream"),
)


class Launches(list[dict[str, Any]]):
    """What the library was handed, a launch an entry."""

    def record(self, *arguments: Any) -> int:
        self.append(dict(zip(ARGUMENTS, arguments, strict=True)))
        return 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    seen = Launches()
    stand_ins = {"cublasLtMatmul": seen.record, "cublasLtMatmulAlgoGetHeuristic": offers(3)}
    Recorder.install(monkeypatch, stand_ins)
    return seen


def test_what_is_handed_over(launches: Launches) -> None:
    product = Product(alpha=1.5, beta=-2)
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
def test_scalars_are_of_the_scale_type(launches: Launches, compute: Any, scale: Any, code: str) -> None:
    ab, cd = next(rule[1:] for rule in RULES[compute] if rule[0] == scale)
    alpha = 2 + 3j if len(code) == 2 else 3
    Product(compute=compute, scale=scale, types=(ab, ab, cd, cd), alpha=alpha).launch()
    expected = (2.0, 3.0) if len(code) == 2 else (3,)
    assert struct.unpack(code, launches[0]["alpha"]) == expected


@pytest.mark.parametrize("value", ["1", None, 1j, 1e300, [1.0]])
def test_scalars_that_are_none(launches: Launches, value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"alpha is .*; accepted: a number of type R_32F"):
        Product(alpha=value).launch()
    with pytest.raises(ArgumentError, match=r"beta is .*; accepted: a number of type R_32F"):
        Product(beta=value).launch()
    assert launches == []


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


@pytest.mark.parametrize(("value", "error"), [(0, ArgumentError), (1.0, ArgumentError), (0x602, AlignmentError)])
def test_scalars_on_the_device_that_are_no_addresses(launches: Launches, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="beta is"):
        Product(attributes={M.POINTER_MODE: PointerMode.DEVICE}, alpha=0x600, beta=value).launch()
    assert launches == []


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(
    ("address", "error"),
    [
        (0, ArgumentError),
        (-4, ArgumentError),
        (2**64, ArgumentError),
        (None, ArgumentError),
        (1.0, ArgumentError),
        (0x10002, AlignmentError),
    ],
)
def test_addresses(launches: Launches, index: int, address: Any, error: type[Exception]) -> None:
    addresses: list[Any] = list(Product().addresses)
    addresses[index] = address
    with pytest.raises(error, match=f"^{'abcd'[index]} is .*; accepted: "):
        Product(addresses=tuple(addresses)).launch()
    assert launches == []


def test_addresses_of_small_elements(launches: Launches) -> None:
    """Each is held to the size of its own elements, where those of the others are larger."""
    types = (DataType.R_16F, DataType.R_16F, DataType.R_32F, DataType.R_32F)
    Product(types=types, addresses=(0x10002, 0x20002, 0x30004, 0x40004)).launch()
    assert len(launches) == 1
    with pytest.raises(AlignmentError, match="d is 0x40002; accepted: a multiple of 4"):
        Product(types=types, addresses=(0x10002, 0x20002, 0x30004, 0x40002)).launch()
    with pytest.raises(AlignmentError, match="b is 0x20001; accepted: a multiple of 2"):
        Product(types=types, addresses=(0x10002, 0x20001, 0x30004, 0x40004)).launch()


@pytest.mark.parametrize(
    ("workspace", "size", "message"),
    [
        (0x50080, 4096, "workspace is 0x50080; accepted: a multiple of 256"),
        (0, 4096, "workspace is 0; accepted: a device address"),
        (-256, 4096, "workspace is -256"),
        (0x50000, 1023, "workspace_size is 1023; accepted: 1024 or more"),
        (0x50000, -1, "workspace_size is -1"),
    ],
)
def test_workspaces(launches: Launches, workspace: int, size: int, message: str) -> None:
    with pytest.raises((ArgumentError, AlignmentError), match=message):
        Product(workspace=workspace, workspace_size=size).launch()
    assert launches == []


@pytest.mark.parametrize("algorithm", [None, cublaslt.Algorithm(bytes(64))])
def test_without_a_workspace(launches: Launches, algorithm: cublaslt.Algorithm | None) -> None:
    Product(algorithm=algorithm, workspace=0, workspace_size=0).launch()
    assert launches[0]["size"] == 0
    assert (launches[0]["algo"] is None) == (algorithm is None)


def test_in_place(launches: Launches) -> None:
    addresses = (0x10000, 0x20000, 0x40000, 0x40000)
    Product(addresses=addresses).launch()
    with pytest.raises(ArgumentError, match="c is d, and their layouts differ"):
        Product(addresses=addresses, leading={"c": 65}).launch()
    Product(leading={"c": 65}).launch()
    assert len(launches) == 2


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
    desc.set(M.SCALE_TYPE, DataType.R_32F)
    layouts[2].close()
    with pytest.raises(ArgumentError, match="this MatrixLayout is closed"):
        again()
    assert len(launches) == 3


@pytest.mark.parametrize("epilogue", Epilogue)
def test_pointers_that_are_not_set(launches: Launches, epilogue: Epilogue) -> None:
    """The heuristic may be asked without them; a launch would write to address 0, or read it."""
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


@pytest.mark.parametrize("which", range(5))
def test_what_is_closed_between_two_launches(launches: Launches, which: int) -> None:
    product = Product()
    desc, layouts = product.desc(), product.layouts()
    launch(desc, (1.0, 0.0), list(product.addresses), layouts)
    closed: Any = [desc, *layouts][which]
    closed.close()
    with pytest.raises(ArgumentError, match=f"this {type(closed).__name__} is closed"):
        launch(desc, (1.0, 0.0), list(product.addresses), layouts)
    assert len(launches) == 1


def test_arrays_of_pointers(launches: Launches) -> None:
    product = Product(batch={name: {"batch_count": 3} for name in "abcd"}, types=(DataType.R_16F,) * 4)
    desc, layouts = product.desc(), product.layouts()
    for layout in layouts:
        layout.set(L.BATCH_MODE, cublaslt.BatchMode.POINTER_ARRAY)
    launch(desc, (1.0, 0.0), list(product.addresses), layouts)
    with pytest.raises(AlignmentError, match="a is 0x10004; accepted: a multiple of 8"):
        launch(desc, (1.0, 0.0), [0x10004, 0x20000, 0x30000, 0x40000], layouts)
    assert len(launches) == 1


class TestTransform:
    """The matrix transform: C = α·op(A) + β·op(B)."""

    def layouts(self, *shapes: tuple[int, int]) -> list[cublaslt.MatrixLayout]:
        return [cublaslt.MatrixLayout(DataType.R_32F, rows, cols, rows) for rows, cols in shapes]

    def test_what_is_handed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[Any, ...]] = []
        Recorder.install(monkeypatch, {"cublasLtMatrixTransform": lambda *call: calls.append(call) or 0})
        desc = cublaslt.MatrixTransformDesc(DataType.R_32F)
        a, b, c = self.layouts((4, 5), (4, 5), (4, 5))
        cublaslt.matrix_transform(HANDLE, desc, 2.0, 0x100, a, 3.0, 0x200, b, 0x300, c, 7)
        cublaslt.matrix_transform(HANDLE, desc, 2.0, 0x100, a, 0.0, 0, None, 0x300, c, 7)
        scalars = [struct.pack("f", value) for value in (2.0, 3.0, 0.0)]
        with_b = (scalars[0], 0x100, a.handle, scalars[1], 0x200, b.handle, 0x300, c.handle, 7)
        without = (scalars[0], 0x100, a.handle, scalars[2], None, None, 0x300, c.handle, 7)
        assert calls == [(HANDLE, desc.handle, *with_b), (HANDLE, desc.handle, *without)]

    def test_refusals(self, launches: Launches) -> None:
        desc = cublaslt.MatrixTransformDesc(DataType.R_32F)
        a, b, c = self.layouts((4, 5), (5, 4), (4, 5))
        with pytest.raises(ShapeError, match=r"op\(B\) is 5×4; C is 4×5"):
            cublaslt.matrix_transform(HANDLE, desc, 1.0, 0x100, a, 1.0, 0x200, b, 0x300, c, 7)
        with pytest.raises(AlignmentError, match="c is 0x301"):
            cublaslt.matrix_transform(HANDLE, desc, 1.0, 0x100, a, 1.0, 0, None, 0x301, c, 7)
        with pytest.raises(ArgumentError, match="alpha is '1'"):
            cublaslt.matrix_transform(HANDLE, desc, "1", 0x100, a, 1.0, 0, None, 0x300, c, 7)  # type: ignore[arg-type]
        a.set(L.LD, 3)
        with pytest.raises(ArgumentError, match="layout of A: leading_dimension is 3"):
            cublaslt.matrix_transform(HANDLE, desc, 1.0, 0x100, a, 1.0, 0, None, 0x300, c, 7)
