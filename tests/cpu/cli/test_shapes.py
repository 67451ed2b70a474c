"""Files of shapes: the layers read from them, and the positions that errors name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lt_runtime.cli.warmup import PRESETS, Layers, preset, read_shapes
from lt_runtime.errors import ArgumentError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shapes"


def refused(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_shapes(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    return message.removeprefix(str(file))


def test_lines(file: Path) -> None:
    file.write_text(f"# M N K\n8192 3072 768  # up\n\n\t8 {2**63 - 1}\t3072\n")
    assert read_shapes(file) == {"": [Layers(8192, (768, 3072)), Layers(8, (3072, 2**63 - 1))]}


def test_json(file: Path) -> None:
    file.write_text(
        '\n {"layers": {"a": [[1, 2, 3]], "b": []},\n "comment": null,\n'
        '"mlps": {"a": {"rows": 8, "dims": [3, 4]}, "c": {"dims": [1, 2, 3], "rows": 5, "activation": "silu"}}}\n'
    )
    shapes = read_shapes(file)
    assert shapes == {"a": [Layers(1, (3, 2)), Layers(8, (3, 4))], "b": [], "c": [Layers(5, (1, 2, 3), "silu")]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " names no layer; accepted are lines M N K, or JSON"),
        ("8 8 8\n8 8\n", ", line 2 has 2 fields; accepted are three: M N K"),
        ("8 8 8 8", ", line 1 has 4 fields"),
        ("# x\n8 eight 8", ", line 2: N is 'eight'; accepted are integers of at least 1"),
        ("8 8 0", ", line 1: K is '0'; accepted"),
        ("-8 8 8", ", line 1: M is '-8'; accepted"),
        ("8 8.0 8", ", line 1: N is '8.0'"),
        ("8 ² 8", ", line 1: N is '²'"),
        *((f"8 {'9' * digits} 8\n", ", line 1: N is '999") for digits in (20, 5000)),
        ('{"layers":\n {"a": [[1, 2, 3]}}', ", line 2: no JSON (Expecting ',' delimiter)"),
        ("[[1, 2, 3]]", ", line 1: the file is [[1, 2, 3]]; accepted are objects"),
        ("{}", ", line 1: the file names neither layers nor mlps"),
        ('{"layers": {},\n"layer": {}}', ", line 2: layer is no known field; accepted are layers, mlps and comment"),
        ('{"layers":\n\n[]}', ", line 3: layers is []; accepted are objects"),
        ('{"layers": {"a":\n 3}}', ", line 2: layers.a is 3; accepted are lists"),
        ('{"layers": {"a": [\n[1, 2, 3],\n[1, 2]]}}', ", line 3: layers.a[1] has 2 sizes; accepted are three: M, N, K"),
        ('{"layers": {"a": [[1, 2,\n "3"]]}}', ", line 2: layers.a[0][2] is '3'; accepted are integers of at least 1"),
        ('{"layers": {"a": [[1, 2, -3]]}}', ", line 1: layers.a[0][2] is -3; accepted"),
        ('{"layers": {"a": [[1, 2, 3.0]]}}', ", line 1: layers.a[0][2] is 3.0; accepted"),
        ('{"layers": {"a": [[1, 2, true]]}}', ", line 1: layers.a[0][2] is true; accepted"),
        ('{"mlps": {"a":\n{"rows": 3}}}', ", line 2: mlps.a.dims is missing"),
        ('{"mlps": {"a": {"dims": [3, 4]}}}', ", line 1: mlps.a.rows is missing"),
        ('{"mlps": {"a": {"rows": 3, "dims": [3]}}}', ", line 1: mlps.a.dims has less than two sizes"),
        ('{"mlps": {"a": {"rows": null, "dims": [3, 4]}}}', ", line 1: mlps.a.rows is null; accepted"),
        ('{"mlps": {"a": {"rows": 3, "dims": [3, 4],\n"bias": 1}}}', ", line 2: mlps.a.bias is no known field"),
        (
            '{"mlps": {"a": {"rows": 3, "dims": [3, 4],\n"activation": "glu"}}}',
            ", line 2: mlps.a.activation is 'glu'; accepted are none, relu",
        ),
        ('{"mlps": {"a": {"rows": 3, "dims": [3, 4], "activation": ["relu"]}}}', ", line 1: mlps.a.activation is ["),
        *((f'{{"layers": {{"a": [[8, 8, {"9" * digits}]]}}}}', "") for digits in (20, 4000, 5000)),
        *((f'{{"layers": {{"a": {"[" * depth}{"]" * depth}}}}}', "") for depth in (5, 90, 195, 1000, 50_000)),
    ],
)
def test_bad_files(file: Path, text: str, message: str) -> None:
    error = refused(file, text)
    assert error.startswith(message)
    assert len(error) < 500


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: None, "No such file or directory"),
        (lambda file: file.write_bytes(b"\xff\xfe8 8 8"), "'utf-8' codec"),
        (os.mkfifo, ""),
        (lambda file: file.symlink_to("/dev/zero"), ""),
        (Path.mkdir, ""),
        (lambda file: (file.touch(), os.truncate(file, 1 << 40)), ""),
    ],
    ids=["missing", "other encoding", "fifo", "device", "directory", "huge"],
)
def test_what_is_no_file_of_shapes_is_refused_at_once(file: Path, make: Callable[[Path], object], reason: str) -> None:
    make(file)
    with pytest.raises(ArgumentError, match=rf"shapes cannot be read \({reason}") as caught:
        read_shapes(file)
    assert len(str(caught.value)) < 1000


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.text(st.sampled_from('{}[]",:0189 truenlaysmp.-\n\\')))
def test_no_text_does_anything_but_read_or_refuse(file: Path, text: str) -> None:
    file.write_text(text)
    try:
        shapes = read_shapes(file)
    except ArgumentError as error:
        assert str(file) in str(error)  # noqa: PT017
    else:
        assert shapes


def test_every_preset_is_sound() -> None:
    known = read_shapes(PRESETS)
    assert {"gpt2-124m", "mnist", "decode"} <= set(known)
    for name, layers in known.items():
        assert preset(name) == layers != []
    assert preset("gpt2-124m")[0] == Layers(8192, (768, 3072))
    *alone, mlp = preset("dlrm-top")
    assert all(len(each.dims) == 2 for each in alone)
    assert mlp.dims == (479, 1024, 1024, 512, 256, 1)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"--preset is 'gpt-5'; accepted are bert-large, decode, .*, tiny"):
        preset("gpt-5")
