"""Attributes of cuBLASLt's descriptors are set, read back and refused by the real library. Needs no GPU."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import library
from lt_runtime.cublaslt.attributes import Attribute
from lt_runtime.errors import AlignmentError, ArgumentError, CublasLtError, MissingLibraryError
from tests.support.cublaslt_kinds import EVERY_ATTRIBUTE, algorithm, made, matmul_desc, matrix_layout, transform_desc
from tests.support.cublaslt_recorder import Recorder

MATMUL = cublaslt.MatmulDescAttribute
LAYOUT = cublaslt.MatrixLayoutAttribute
CONFIG = cublaslt.AlgoConfigAttribute
PREFERENCE = cublaslt.PreferenceAttribute


@pytest.fixture
def desc() -> Iterator[cublaslt.MatmulDesc]:
    with matmul_desc() as made:
        yield made


def is_accepted(attribute: Attribute, value: Any) -> bool:
    try:
        return attribute.accepted.allows(value) and bool(attribute.packer.pack(value))
    except struct.error:
        return False


def some_values(attribute: Attribute) -> list[float]:
    """Values that an attribute accepts: all members of its enum, or some small numbers and the largest number."""
    if attribute.code == "f":
        return [0.0, 1.0, 2.5, 0]
    kind = cublaslt.MatmulTile if attribute is CONFIG.TILE_ID else attribute.accepted.kind
    members = list(kind.__members__.values()) if kind else []
    largest = 2 ** (8 * attribute.size - attribute.code.islower()) - 1
    candidates = [*members, *range(-1, 3), 256, 4096, 2**30, 2**31 - 1, 2**40, largest, largest - 15, -largest]
    return [value for value in candidates if is_accepted(attribute, value)]


def assert_one_width(prefix: str, owner: Any, attribute: Attribute) -> None:
    """Asserts that the library accepts an attribute only with the size in bytes that the bindings declare."""
    cell, written = ctypes.create_string_buffer(16), ctypes.c_size_t()
    setter, getter = (library.function(f"{prefix}{name}Attribute") for name in ("Set", "Get"))
    for width in (1, 2, 4, 8, 16):
        expected = cublaslt.Status.SUCCESS if width == attribute.size else cublaslt.Status.INVALID_VALUE
        assert getter(owner, attribute, cell, width, ctypes.byref(written)) == expected
        if attribute is not CONFIG.ID:  # this attribute is read-only
            assert setter(owner, attribute, cell, width) == expected


@pytest.mark.parametrize(("make", "attribute"), EVERY_ATTRIBUTE)
def test_the_library_refuses_an_attribute_in_another_width(make: Callable[[], Any], attribute: Any) -> None:
    """The bindings declare the sizes of attributes, and never query the library for them.

    The test queries the library, which must report the same sizes.
    """
    with made(make, attribute) as descriptor:
        assert_one_width(f"cublasLt{type(descriptor).__name__}", descriptor.handle, attribute)


@pytest.mark.parametrize("attribute", CONFIG)
def test_the_library_refuses_a_configuration_in_another_width(attribute: cublaslt.AlgoConfigAttribute) -> None:
    assert_one_width("cublasLtMatmulAlgoConfig", ctypes.create_string_buffer(64), attribute)


@pytest.mark.parametrize(("make", "attribute"), EVERY_ATTRIBUTE)
def test_every_attribute_can_be_set_and_read_back(make: Callable[[], Any], attribute: Any) -> None:
    with made(make, attribute) as descriptor:
        descriptor.get(attribute)
        assert some_values(attribute)
        for value in some_values(attribute):
            descriptor.set(attribute, value)
            assert descriptor.get(attribute) == descriptor.recall(attribute) == value


@pytest.mark.parametrize("attribute", [attribute for attribute in CONFIG if attribute is not CONFIG.ID])
def test_every_part_of_an_algorithm_can_be_set_and_read_back(attribute: cublaslt.AlgoConfigAttribute) -> None:
    values = [value for value in some_values(attribute) if 0 <= value < 2**15]
    assert len(values) >= 2
    assert [algorithm().set(attribute, int(value)).get(attribute) for value in values] == values


@pytest.mark.parametrize(("make", "attribute"), EVERY_ATTRIBUTE)
@pytest.mark.parametrize("nonsense", [2**200, -(2**200), None, "1", 1j])
def test_nonsense_is_refused_by_name(make: Callable[[], Any], attribute: Any, nonsense: Any) -> None:
    with made(make, attribute) as descriptor:
        before = descriptor.get(attribute)
        with pytest.raises(ArgumentError, match=rf"^{type(attribute).__name__}\.{attribute.name} is .*; accepted: "):
            descriptor.set(attribute, nonsense)
        assert descriptor.get(attribute) == before


@pytest.mark.parametrize(
    ("make", "attribute", "value", "accepted"),
    [
        (matmul_desc, MATMUL.EPILOGUE, 3, r"one of Epilogue: DEFAULT \(1\), RELU \(2\)"),
        (matmul_desc, MATMUL.TRANSA, -1, r"N \(0\), T \(1\)"),
        (matmul_desc, MATMUL.TRANSC, 1, r"N \(0\) \(int32_t\)"),
        (matmul_desc, MATMUL.FAST_ACCUM, 2, "0 to 1"),
        (matmul_desc, MATMUL.SM_COUNT_TARGET, 2**31, r"0 or more \(int32_t\)"),
        (matmul_desc, MATMUL.EPILOGUE_AUX_LD, -8, "0 or more"),
        (matmul_desc, MATMUL.BIAS_DATA_TYPE, -2, "-1"),
        (matmul_desc, MATMUL.BIAS_POINTER, -16, "an address that is a multiple of 16"),
        (matmul_desc, MATMUL.BIAS_POINTER, 2**64, "an address that is a multiple of 16"),
        (matrix_layout, LAYOUT.ROWS, -1, "0 or more"),
        (matrix_layout, LAYOUT.BATCH_COUNT, 0, "1 or more"),
        (cublaslt.MatmulPreference, PREFERENCE.REDUCTION_SCHEME_MASK, 8, "a combination of ReductionScheme"),
        (cublaslt.MatmulPreference, PREFERENCE.MIN_ALIGNMENT_A_BYTES, 3, "a power of two"),
        (cublaslt.MatmulPreference, PREFERENCE.MIN_ALIGNMENT_A_BYTES, 0, "a power of two"),
        (cublaslt.MatmulPreference, PREFERENCE.MAX_WAVES_COUNT, -0.5, "a finite number, 0 or more"),
        (cublaslt.MatmulPreference, PREFERENCE.MAX_WAVES_COUNT, float("nan"), "a finite number"),
        (cublaslt.MatmulPreference, PREFERENCE.MAX_WAVES_COUNT, 1e300, "a finite number"),
        (transform_desc, cublaslt.MatrixTransformDescAttribute.TRANSB, 7, r"T \(1\)"),
        (algorithm, CONFIG.ID, 66, "nothing, it is fixed by algo_init"),
        (algorithm, CONFIG.REDUCTION_SCHEME, 3, r"COMPUTE_TYPE \(2\)"),
        (algorithm, CONFIG.CLUSTER_SHAPE_ID, 1, "one of ClusterShape: AUTO"),
    ],
)
def test_values_that_the_library_itself_accepts(make: Any, attribute: Any, value: Any, accepted: str) -> None:
    with pytest.raises(ArgumentError, match=rf"\.{attribute.name} is .*; accepted: .*{accepted}"):
        made(make).set(attribute, value)


@pytest.mark.parametrize("attribute", [MATMUL.BIAS_POINTER, MATMUL.EPILOGUE_AUX_POINTER])
@pytest.mark.parametrize("address", [1, 8, 0x7F0000000004, 2**64 - 4])
def test_misaligned_vectors(desc: cublaslt.MatmulDesc, attribute: cublaslt.MatmulDescAttribute, address: int) -> None:
    with pytest.raises(AlignmentError, match=rf"{attribute.name} is {address:#x}; accepted: .* a multiple of 16"):
        desc.set(attribute, address)


def test_an_attribute_of_another_descriptor_is_refused(desc: cublaslt.MatmulDesc) -> None:
    with pytest.raises(ArgumentError, match="MatmulDesc has no attribute 99"):
        desc.set(99, 0)  # type: ignore[arg-type]


def test_values_are_read_as_members_of_their_enum(desc: cublaslt.MatmulDesc) -> None:
    desc.set(MATMUL.EPILOGUE, cublaslt.Epilogue.GELU_AUX)
    assert desc.get(MATMUL.EPILOGUE) is cublaslt.Epilogue.GELU_AUX
    assert desc.get(MATMUL.BIAS_DATA_TYPE) == -1  # the value "unset", which is not a member of the enum


def test_errors_name_the_call_and_the_status(desc: cublaslt.MatmulDesc) -> None:
    with pytest.raises(CublasLtError, match=r"^cublasLtMatmulDescSetAttribute .* CUBLAS_STATUS_INVALID_VALUE \(7\)"):
        library.call("cublasLtMatmulDescSetAttribute", desc.handle, 9999, bytes(4), 4)


def test_an_attribute_newer_than_the_library(desc: cublaslt.MatmulDesc, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("cublasLtMatmulDescSetAttribute", "cublasLtMatmulDescGetAttribute")
    recorder = Recorder.install(monkeypatch, dict.fromkeys(names, lambda *_: int(cublaslt.Status.INVALID_VALUE)))
    recorder.version = 130002
    message = r"BATCH_INVARIANCE_FLAGS is not in cuBLASLt 13\.0\.2; it came with cuBLASLt 13\.8\.0: pip install"
    with pytest.raises(MissingLibraryError, match=message):
        desc.set(MATMUL.BATCH_INVARIANCE_FLAGS, cublaslt.BatchInvariance.AUTO)
    with pytest.raises(MissingLibraryError, match=message):
        desc.get(MATMUL.BATCH_INVARIANCE_FLAGS)
    with pytest.raises(CublasLtError, match="INVALID_VALUE"):
        desc.get(MATMUL.TRANSA)
