"""Offsets of the fields of CUPTI's records in the newest header, and records made with them."""

from __future__ import annotations

import struct
from typing import Final

from lt_runtime.profiling.cupti import records as kinds

_CALL: Final = {
    "cbid": (4, "I"),
    "start": (8, "Q"),
    "end": (16, "Q"),
    "threadId": (28, "I"),
    "correlationId": (32, "I"),
}
_COPY: Final = {
    "bytes": (8, "Q"), "start": (16, "Q"), "end": (24, "Q"), "deviceId": (32, "I"), "streamId": (40, "I"),
    "correlationId": (44, "I"), "graphNodeId": (64, "Q"), "graphId": (72, "I"),
}  # fmt: skip
FIELDS: Final[dict[int, dict[str, tuple[int, str]]]] = {
    kinds.KERNEL: {
        "start": (16, "Q"), "end": (24, "Q"), "deviceId": (40, "I"), "streamId": (48, "I"), "correlationId": (92, "I"),
        "name": (104, "Q"), "graphNodeId": (144, "Q"), "graphId": (156, "I"),
    },
    kinds.MEMCPY: {"copyKind": (4, "B"), **_COPY},
    kinds.MEMSET: _COPY,
    kinds.DRIVER: _CALL,
    kinds.RUNTIME: _CALL,
    kinds.SYNCHRONIZATION: {
        "type": (4, "I"), "start": (8, "Q"), "end": (16, "Q"), "correlationId": (24, "I"), "streamId": (32, "I"),
    },
    kinds.EXTERNAL_CORRELATION: {"externalKind": (4, "I"), "externalId": (8, "Q"), "correlationId": (16, "I")},
    kinds.MEMORY: {
        "memoryOperationType": (4, "I"), "memoryKind": (8, "I"), "correlationId": (12, "I"), "bytes": (24, "Q"),
        "timestamp": (32, "Q"), "deviceId": (52, "I"), "streamId": (60, "I"),
    },
}  # fmt: skip
"""Offset and type (a code of `struct`) of each field, by kind of record and field."""

STRUCTS: Final = {
    kinds.KERNEL: "CUpti_ActivityKernel",
    kinds.MEMCPY: "CUpti_ActivityMemcpy",
    kinds.MEMSET: "CUpti_ActivityMemset",
    kinds.DRIVER: "CUpti_ActivityAPI",
    kinds.RUNTIME: "CUpti_ActivityAPI",
    kinds.SYNCHRONIZATION: "CUpti_ActivitySynchronization",
    kinds.EXTERNAL_CORRELATION: "CUpti_ActivityExternalCorrelation",
    kinds.MEMORY: "CUpti_ActivityMemory",
}
"""The header's type names without the numbers of their versions."""


def record(kind: int, version: int, **fields: int) -> bytes:
    """Makes a record as CUPTI of a version writes it (1305 is 13.5); fields that are not given are filled with ones."""
    made = bytearray(b"\xff" * kinds.RECORD_SIZES[version][kind])
    struct.pack_into("<I", made, 0, kind)
    for name, (offset, code) in FIELDS[kind].items():
        struct.pack_into(f"<{code}", made, offset, fields.pop(name, 0))
    assert not fields, f"records of kind {kind} have no {list(fields)}"
    return bytes(made)
