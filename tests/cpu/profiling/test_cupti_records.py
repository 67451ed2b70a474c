"""CUPTI's records: the offsets of their fields, and the activities read from them."""

from __future__ import annotations

import re
import subprocess
from itertools import accumulate
from pathlib import Path

import pytest
from cuda import pathfinder

from lt_runtime.profiling.cupti import records as kinds
from lt_runtime.profiling.cupti.records import Activity, Link, read_records
from tests.support.cupti_layout import FIELDS, STRUCTS, record


def newest(header: str, struct: str) -> str:
    """Finds the newest version of a struct: the name with the highest number in the header."""
    numbers = re.findall(rf"\}} {struct}(\d*);", header)
    return struct + max(numbers, key=lambda number: int(number or 0))


def test_the_installed_header_has_the_fields_where_they_are_read(tmp_path: Path) -> None:
    # NVIDIA's wheels all install their headers into this directory.
    directory = Path(pathfinder.find_nvidia_header_directory("cudart") or "")
    header = (directory / "cupti_activity.h").read_text()
    names = {kind: newest(header, struct) for kind, struct in STRUCTS.items()}
    lines = [f'printf("{kind} size %zu\\n", sizeof({name}));' for kind, name in names.items()]
    for kind, fields in FIELDS.items():
        lines += [f'printf("{kind} {field} %zu\\n", offsetof({names[kind]}, {field}));' for field in fields]
    lines.append('printf("0 version %d\\n", CUPTI_API_VERSION);')
    source = tmp_path / "offsets.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include <cupti.h>\nint main() {\n" + "\n".join(lines) + "\n}\n"
    )
    subprocess.run(["g++", f"-I{directory}", str(source), "-o", str(tmp_path / "offsets")], check=True)
    done = subprocess.run([str(tmp_path / "offsets")], capture_output=True, text=True, check=True)
    found = {(int(kind), name): int(value) for kind, name, value in map(str.split, done.stdout.splitlines())}
    version = found.pop((0, "version"))
    expected = {(kind, "size"): size for kind, size in kinds.RECORD_SIZES[version // 100].items()}
    expected |= {(kind, name): offset for kind, fields in FIELDS.items() for name, (offset, _) in fields.items()}
    assert found == expected


def read(*records: bytes) -> list[Activity | Link]:
    data, offsets = memoryview(b"".join(records)), accumulate(map(len, records[:-1]), initial=0)
    names = {0x7000: "gemm"}
    return [*read_records(data, offsets, names.__getitem__, lambda kind, number: f"{kind}/{number}")]


WORK = {"start": 10, "end": 25, "deviceId": 1, "streamId": 13, "correlationId": 77, "graphNodeId": 5 << 32 | 3}
CALL = {"start": 1, "end": 2, "threadId": 4242, "correlationId": 9}
WAIT = {"start": 1, "end": 8, "correlationId": 9}
MEMORY = {"memoryKind": 3, "correlationId": 9, "bytes": 1 << 40, "timestamp": 6, "deviceId": 1}


@pytest.mark.parametrize("version", kinds.RECORD_SIZES)
def test_records_of_every_version(version: int) -> None:
    found = read(
        record(kinds.KERNEL, version, **WORK, graphId=5, name=0x7000),
        record(kinds.MEMCPY, version, **WORK, graphId=5, bytes=4096, copyKind=1),
        record(kinds.MEMSET, version, **WORK, graphId=5, bytes=512),
        record(kinds.DRIVER, version, **CALL, cbid=307),
        record(kinds.RUNTIME, version, **CALL, cbid=211),
        record(kinds.SYNCHRONIZATION, version, **WAIT, type=3, streamId=7),
        record(kinds.SYNCHRONIZATION, version, **WAIT, type=4, streamId=0xFFFFFFFF),
        record(kinds.MEMORY, version, **MEMORY, memoryOperationType=1, streamId=0xFFFFFFFF),
        record(kinds.MEMORY, version, **MEMORY, memoryOperationType=2, streamId=7),
        *(
            record(kinds.EXTERNAL_CORRELATION, version, externalKind=whose, externalId=8)
            for whose in (3, kinds.OUR_IDS)
        ),
    )
    place, allocated = (10, 25, 1, 13, 77, 5, 5 << 32 | 3), {"device": 1, "correlation": 9, "size": 1 << 40}
    assert found == [
        Activity("kernel", "gemm", *place),
        Activity("memcpy", "HtoD", *place, size=4096),
        Activity("memset", "memset", *place, size=512),
        Activity("call", "4/307", 1, 2, correlation=9, thread=4242),
        Activity("call", "5/211", 1, 2, correlation=9, thread=4242),
        Activity("synchronization", "stream synchronize", 1, 8, stream=7, correlation=9),
        Activity("synchronization", "context synchronize", 1, 8, correlation=9),
        Activity("allocation", "allocate device", 6, 6, stream=-1, **allocated),
        Activity("allocation", "free device", 6, 6, stream=7, **allocated),
        Link(8, 0),
    ]


def test_unknown_directions_and_waits_have_general_names_and_other_kinds_are_left_out() -> None:
    copy, wait = record(kinds.MEMCPY, 1305, **WORK, copyKind=11), record(kinds.SYNCHRONIZATION, 1305, type=5)
    found = read(copy, b"\x33\0\0\0" + bytes(60), wait)
    assert [each.name for each in found if isinstance(each, Activity)] == ["copy", "wait"]


def test_every_version_has_records_of_whole_words() -> None:
    assert all(size % 8 == 0 for sizes in kinds.RECORD_SIZES.values() for size in sizes.values())
