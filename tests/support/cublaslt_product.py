"""A matrix product with all arguments of `matmul`, which tests vary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lt_runtime import cublaslt
from lt_runtime.cublaslt import ComputeType, DataType, Epilogue, Order

ALGORITHM = cublaslt.Algorithm(bytes(range(64)), workspace_size=1024)
HANDLE = 0x1000
RELU = [Epilogue.RELU_AUX, Epilogue.RELU_AUX_BIAS, Epilogue.DRELU, Epilogue.DRELU_BGRAD]
GELU = [Epilogue.GELU_AUX, Epilogue.GELU_AUX_BIAS, Epilogue.DGELU, Epilogue.DGELU_BGRAD]
VECTOR = [epilogue for epilogue in Epilogue if "BIAS" in epilogue.name or "BGRAD" in epilogue.name]


@dataclass
class Product:
    """A product of a 64×32 by a 32×16 matrix, column-major, unless a test changes it."""

    compute: ComputeType = ComputeType.COMPUTE_32F
    scale: DataType = DataType.R_32F
    types: tuple[DataType, DataType, DataType, DataType] = (DataType.R_32F,) * 4
    shapes: tuple[tuple[int, int], ...] = ((64, 32), (32, 16), (64, 16), (64, 16))
    attributes: dict[cublaslt.MatmulDescAttribute, int] = field(default_factory=dict)
    batch: dict[str, dict[str, int]] = field(default_factory=dict)
    leading: dict[str, int] = field(default_factory=dict)
    order: dict[str, Order] = field(default_factory=dict)
    alpha: Any = 1.0
    beta: Any = 0.0
    addresses: tuple[Any, ...] = (0x10000, 0x20000, 0x30000, 0x40000)
    algorithm: cublaslt.Algorithm | None = ALGORITHM
    workspace: int = 0x50000
    workspace_size: int = 4096
    stream: int = 7

    def desc(self) -> cublaslt.MatmulDesc:
        desc = cublaslt.MatmulDesc(self.compute, self.scale)
        for attribute, value in self.attributes.items():
            desc.set(attribute, value)
        return desc

    def layouts(self) -> list[cublaslt.MatrixLayout]:
        layouts = []
        for name, kind, (rows, cols) in zip("abcd", self.types, self.shapes, strict=True):
            order = self.order.get(name, Order.COL)
            leading = self.leading.get(name, rows if order is Order.COL else cols)
            layouts.append(cublaslt.MatrixLayout(kind, rows, cols, leading, order=order, **self.batch.get(name, {})))
        return layouts

    def launch(self) -> None:
        (a, b, c, d), layouts = self.addresses, self.layouts()
        scalars = (self.alpha, self.beta)
        launch(self.desc(), scalars, [a, b, c, d], layouts, self.algorithm, self.workspace, self.workspace_size)

    def validate(self) -> None:
        cublaslt.validate(self.desc(), *self.layouts())


def launch(
    desc: cublaslt.MatmulDesc,
    scalars: tuple[Any, Any],
    at: list[Any],
    layouts: list[cublaslt.MatrixLayout],
    algorithm: cublaslt.Algorithm | None = ALGORITHM,
    workspace: int = 0x50000,
    workspace_size: int = 4096,
) -> None:
    first = (HANDLE, desc, scalars[0], at[0], layouts[0], at[1], layouts[1])
    second = (scalars[1], at[2], layouts[2], at[3], layouts[3])
    cublaslt.matmul(*first, *second, algorithm, workspace, workspace_size, 7)
