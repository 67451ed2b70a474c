"""Products whose shapes, types, batches or epilogue do not fit are refused before the library is called."""

from __future__ import annotations

from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import ComputeType, DataType, Epilogue, Operation, Order
from lt_runtime.cublaslt.validation import RULES, element_bytes
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from tests.support.cublaslt_product import GELU, RELU, VECTOR, Product

M = cublaslt.MatmulDescAttribute
BATCH: dict[str, Any] = {name: {"batch_count": 3, "batch_stride": 64 * 32} for name in "abcd"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": ((64, 33), (32, 16), (64, 16), (64, 16))}, r"op\(A\) is 64×33 and op\(B\) is 32×16"),
        ({"shapes": ((64, 32), (32, 16), (64, 17), (64, 16))}, r"C is 64×17; op\(A\)·op\(B\) is 64×16"),
        ({"shapes": ((64, 32), (32, 16), (64, 16), (16, 64))}, r"D is 16×64; op\(A\)·op\(B\) is 64×16"),
        ({"attributes": {M.TRANSA: Operation.T}}, r"op\(A\) is 32×64 and op\(B\) is 32×16"),
    ],
)
def test_shapes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Product(**changes).validate()


@pytest.mark.parametrize("transposed", [Operation.T, Operation.C])
def test_transposed_shapes_fit(transposed: Operation) -> None:
    shapes = ((32, 64), (16, 32), (64, 16), (64, 16))
    Product(shapes=shapes, attributes={M.TRANSA: transposed, M.TRANSB: transposed}).validate()
    Product(order={"a": Order.ROW, "d": Order.ROW}).validate()


def test_a_product_that_passed_is_checked_again_after_a_change() -> None:
    product = Product()
    desc, layouts, other = product.desc(), product.layouts(), Product(shapes=((64, 33), *product.shapes[1:])).layouts()
    for _ in range(2):
        cublaslt.validate(desc, *layouts)
        with pytest.raises(ShapeError):
            cublaslt.validate(desc, other[0], *layouts[1:])
    cublaslt.validate(desc, *layouts)
    desc.set(M.TRANSA, Operation.T)
    with pytest.raises(ShapeError):
        cublaslt.validate(desc, *layouts)


FULL = (ComputeType.COMPUTE_32F, DataType.R_32F)


@pytest.mark.parametrize(
    ("computes", "types", "message"),
    [
        (FULL, "R_16F R_16BF R_16F R_16F", "A R_16F, B R_16BF, C R_16F, D R_16F"),
        (FULL, "R_16F R_16F R_16BF R_16BF", "R_32F: R_16F -> R_16F; "),
        (FULL, "R_16F R_16F R_16F R_32F", "is not supported"),
        (FULL, "R_64F R_64F R_64F R_64F", "COMPUTE_32F takes"),
        ((FULL[0], DataType.R_16F), "R_16F R_16F R_16F R_16F", "scale type R_16F is not supported"),
        ((ComputeType.COMPUTE_32F_FAST_TF32, FULL[1]), "R_16F R_16F R_16F R_16F", "R_32F: R_32F -> R_32F"),
        ((ComputeType.COMPUTE_64F, DataType.R_64F), "R_32F R_32F R_32F R_32F", "COMPUTE_64F takes"),
        ((ComputeType.COMPUTE_16F, DataType.R_16F), "R_16BF R_16BF R_16BF R_16BF", "COMPUTE_16F takes"),
        (FULL, "R_8F_E5M2 R_8F_E5M2 R_16BF R_16BF", "both R_8F_E5M2"),
        ((ComputeType.COMPUTE_16F, DataType.R_16F), "R_8F_E4M3 R_8F_E4M3 R_16F R_16F", "take COMPUTE_32F with R_32F"),
    ],
)
def test_unsupported_types(computes: tuple[ComputeType, DataType], types: str, message: str) -> None:
    kinds: Any = tuple(DataType[name] for name in types.split())
    with pytest.raises(DTypeError, match=message):
        Product(*computes, kinds).validate()


@pytest.mark.parametrize(("compute", "rule"), [(compute, rule) for compute, rules in RULES.items() for rule in rules])
def test_supported_types(compute: ComputeType, rule: tuple[DataType, DataType, DataType]) -> None:
    scale, ab, cd = rule
    Product(compute, scale, (ab, ab, cd, cd)).validate()


@pytest.mark.parametrize("types", ["R_8F_E4M3 R_8F_E5M2", "R_4F_E2M1 R_4F_E2M1"])
def test_narrow_types_are_left_to_the_library(types: str) -> None:
    a, b = (DataType[name] for name in types.split())
    Product(types=(a, b, DataType.R_16BF, DataType.R_16BF)).validate()


def test_every_type_has_a_size() -> None:
    sizes = {kind: element_bytes(kind) for kind in DataType}
    assert set(sizes.values()) == {1, 2, 4, 8, 16}
    assert (sizes[DataType.R_4F_E2M1], sizes[DataType.R_16BF], sizes[DataType.C_64F]) == (1, 2, 16)


@pytest.mark.parametrize(("epilogue", "unit"), [*((each, 128) for each in RELU), *((each, 8) for each in GELU)])
def test_leading_dimensions_of_the_auxiliary_matrix(epilogue: Epilogue, unit: int) -> None:
    rows = (64, 200)[unit == 128]
    shapes = ((rows, 32), (32, 16), (rows, 16), (rows, 16))
    message = f"EPILOGUE_AUX_LD is {{}}; .* a multiple of {unit}, at least {rows}"
    for leading in (0, rows // unit * unit - unit, 256 + unit // 2, 256 + 1):
        with pytest.raises(ArgumentError, match=message.format(leading)):
            Product(shapes=shapes, attributes={M.EPILOGUE: epilogue, M.EPILOGUE_AUX_LD: leading}).validate()
    Product(shapes=shapes, attributes={M.EPILOGUE: epilogue, M.EPILOGUE_AUX_LD: 256}).validate()


@pytest.mark.parametrize("epilogue", [*RELU, *GELU])
def test_batches_of_auxiliary_matrices(epilogue: Epilogue) -> None:
    attributes = {M.EPILOGUE: epilogue, M.EPILOGUE_AUX_LD: 128, M.BIAS_BATCH_STRIDE: 64}
    least = 0 if "D" in epilogue.name[:1] else 128 * 16
    Product(batch=BATCH, attributes={**attributes, M.EPILOGUE_AUX_BATCH_STRIDE: least}).validate()
    for stride in (least + 4, *((least - 128,) if least else ())):
        with pytest.raises(ArgumentError, match=f"EPILOGUE_AUX_BATCH_STRIDE is {stride}; "):
            Product(batch=BATCH, attributes={**attributes, M.EPILOGUE_AUX_BATCH_STRIDE: stride}).validate()


@pytest.mark.parametrize(
    ("epilogue", "length"),
    [(Epilogue.DRELU_BGRAD, 64), (Epilogue.DGELU_BGRAD, 64), (Epilogue.BGRADA, 64), (Epilogue.BGRADB, 16)],
)
def test_batches_of_bias_gradients(epilogue: Epilogue, length: int) -> None:
    attributes = {M.EPILOGUE: epilogue, M.EPILOGUE_AUX_LD: 128}
    Product(batch=BATCH, attributes={**attributes, M.BIAS_BATCH_STRIDE: length}).validate()
    with pytest.raises(ArgumentError, match=f"BIAS_BATCH_STRIDE is 0; .* at least {length}"):
        Product(batch=BATCH, attributes=attributes).validate()


@pytest.mark.parametrize("epilogue", VECTOR)
def test_a_bias_has_the_type_of_d(epilogue: Epilogue) -> None:
    def validate(operand: DataType, result: DataType, bias: DataType) -> None:
        attributes = {M.EPILOGUE: epilogue, M.EPILOGUE_AUX_LD: 128, M.BIAS_DATA_TYPE: bias}
        Product(types=(operand, operand, result, result), attributes=attributes).validate()

    validate(DataType.R_16BF, DataType.R_32F, DataType.R_32F)
    with pytest.raises(DTypeError, match="BIAS_DATA_TYPE is R_16BF; accepted: D's type, R_32F"):
        validate(DataType.R_16BF, DataType.R_32F, DataType.R_16BF)
    validate(DataType.R_8F_E4M3, DataType.R_16BF, DataType.R_16F)  # the package's checks of types do not cover FP8


@pytest.mark.parametrize(
    ("leading", "stride", "order", "is_sound"),
    [
        (64, 64 * 16, Order.COL, True),
        (64, 64 * 16 - 1, Order.COL, False),
        (64, 0, Order.COL, False),
        (70, 70 * 15 + 64, Order.COL, True),
        (70, 70 * 15 + 63, Order.COL, False),
        # The three matrices of the batch lie side by side in one buffer of shape (16, 3, 64).
        (64 * 3, 64, Order.COL, True),
        (64 * 3, 65, Order.COL, False),
        (16, 16 * 64, Order.ROW, True),
        (48, 16, Order.ROW, True),
        (16, 16 * 63, Order.ROW, False),
    ],
)
def test_the_matrices_of_a_batch_do_not_overlap(leading: int, stride: int, order: Order, is_sound: bool) -> None:
    batch = {name: {"batch_count": 3} for name in "abc"} | {"d": {"batch_count": 3, "batch_stride": stride}}
    product = Product(batch=batch, leading={"d": leading}, order={"d": order})
    if is_sound:
        product.validate()
    else:
        with pytest.raises(LayoutError, match="D's 3 matrices overlap"):
            product.validate()
