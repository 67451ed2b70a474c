"""Keys of problems are canonical and distinct, and can be read back; a change of the written fields is detected."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given

from lt_runtime.fp8 import FP8, Fp8ChainProblem
from lt_runtime.layout import Layout, packed
from lt_runtime.plans.strategies import unchanged
from lt_runtime.problem import (
    LATER,
    Activation,
    BackwardProblem,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    MatmulProblem,
    MLPProblem,
    Spec,
)
from lt_runtime.store import entries
from lt_runtime.store.document import Fingerprint
from lt_runtime.store.keys import SCHEMA, Problem, parse_key, problem_key
from tests.support.strategies import problems

SPEC = Spec(packed(2, 3))
PROBLEM = MatmulProblem(DType.BFLOAT16, DType.FLOAT32, Compute.FLOAT32, SPEC, SPEC, SPEC)
KEY = problem_key(PROBLEM)
LEAKY = problem_key(ForwardProblem(DType.FLOAT32, Compute.FLOAT32, Activation("leaky_relu"), SPEC, SPEC, SPEC))
MLP = problem_key(MLPProblem(DType.FLOAT32, 8, (16, 16, 4), (True, True), Activation("relu")))
CHOICE = problem_key(
    Fp8ChainProblem(
        DType.BFLOAT16, Compute.FLOAT32, 8, (16, 32), (Activation("gelu"),), (True,), False, FP8(fallback=True)
    )
)

WRITTEN = (
    *(MatmulProblem, ForwardProblem, BackwardProblem, Derivative, Spec, Layout, Activation, Fingerprint),
    *(entries.ProductEntry, entries.LayerEntry, entries.Alternative),
    *(entries.RejectedAlgorithm, entries.RejectedStrategy),
)
"""The dataclasses whose fields are written to plan files."""

DIGESTS = {
    1: "2033f015c9951b6e",
    2: "e379530e99f461c0",
    3: "a092563557324247",
    4: "5cc3f51475b32b27",
    5: "aae09e365ba5fb50",
    6: "aae09e365ba5fb50",
}
"""For each version of the file format, a digest of the fields that these dataclasses had in that version."""


@given(problems)
def test_a_key_is_read_back(problem: Problem) -> None:
    assert parse_key(problem_key(problem)) == problem


@given(problems, problems)
def test_keys_are_equal_as_problems_are(one: Problem, other: Problem) -> None:
    assert (problem_key(one) == problem_key(other)) == (one == other)


@pytest.mark.parametrize("key", [MLP, CHOICE])
def test_a_key_of_several_passes_is_read_back(key: str) -> None:
    assert problem_key(parse_key(key)) == key


def test_equal_numbers_of_other_types_have_the_same_key() -> None:
    assert problem_key(dataclasses.replace(PROBLEM, batch=np.int64(1), no_split_k=np.False_)) == KEY
    slopes = (1, 1.0, np.float64(1)), (0, 0.0, -0.0)
    for equal in slopes:
        activations = [Activation("leaky_relu", slope) for slope in equal]
        made = [ForwardProblem(DType.FLOAT32, Compute.FLOAT32, each, SPEC, SPEC, SPEC) for each in activations]
        keys = set()
        for problem in made:
            problem_key.cache_clear()  # the cache is emptied, as in a new process, because these problems compare equal
            keys.add(problem_key(problem))
        assert len(keys) == 1


def test_a_later_field_is_in_a_key_only_if_it_is_used() -> None:
    """Entries that were written before a problem's field existed are still found."""
    before = BackwardProblem(DType.FLOAT32, Compute.FLOAT32, SPEC, SPEC, SPEC, unchanged(None), SPEC, SPEC)
    old = problem_key(before)
    assert "accumulate_dx" not in old
    assert old.endswith('"dz": null, "accumulate": false, "input_derivative": null}}')
    new = problem_key(dataclasses.replace(before, accumulate_dx=True))
    assert new == f'{old[:-2]}, "accumulate_dx": true}}}}'
    forward = ForwardProblem(DType.FLOAT32, Compute.FLOAT32, Activation(), SPEC, SPEC, SPEC)
    assert problem_key(forward).endswith('"propagate_nan": false, "backward": false}}')
    added = dataclasses.replace(forward, addend=SPEC)
    assert parse_key(problem_key(added)) == added
    assert (parse_key(old).accumulate_dx, parse_key(new).accumulate_dx) == (False, True)  # type: ignore[union-attr]
    for text in (new.replace("true}}", "false}}"), new.replace("true}}", "1}}"), new.replace('"dz": null, ', "")):
        with pytest.raises(ValueError, match="is not the key of a problem"):
            parse_key(text)


def test_what_a_key_looks_like() -> None:
    layout = {"rows": 2, "cols": 3, "order": "row", "leading_dimension": 3}
    spec = {"layout": layout, "alignment": 256, "batch_stride": 0}
    fields = {"dtype": "bfloat16", "d_dtype": "float32", "compute": "float32", "a": spec, "b": spec, "d": spec}
    fields |= {"epilogue": "none", "c": None, "batch": 1, "bias_alignment": 256, "aux": None}
    assert json.dumps({"MatmulProblem": {**fields, "device_scalars": False, "no_split_k": False}}) == KEY


@pytest.mark.parametrize(
    "text",
    [
        *("(" * 5000, "-" * 9000, "f(" * 3000, "9" * 5000, f"{10**400}", "\ud800", "1" * 20_000_000),
        LEAKY.replace('"negative_slope": 0.01', f'"negative_slope": {10**400}'),
        "",
        "{",
        "[" * 10_000,
        "\0",
        "null",
        "[]",
        "{}",
        '{"Layout": {"rows": 2, "cols": 3, "order": "row", "leading_dimension": 3}}',
        KEY + " ",
        KEY[:-1],
        KEY.replace(", ", ","),
        *(KEY.replace('"batch": 1', f'"batch": {value}') for value in ("01", "1.0", "true", "null", '"1"', "[1]")),
        KEY.replace('"batch": 1, ', ""),
        KEY.replace('"batch": 1', '"batch": 1, "more": 1'),
        KEY.replace('"batch": 1', '"batch": 1, "batch": 1'),
        *(KEY.replace('"rows": 2', f'"rows": {size}') for size in (-128, 2**62, 10**30)),
        *(KEY.replace('"leading_dimension": 3', f'"leading_dimension": {size}') for size in (-1, 0, 2, 2**48)),
        KEY.replace('"batch": 1', f'"batch": {2**20}').replace('"batch_stride": 0', f'"batch_stride": {2**40}'),
        MLP.replace('"rows": 8', f'"rows": {2**47}'),
        CHOICE.replace('"rows": 8', f'"rows": {2**47}'),
        CHOICE.replace('"delayed"', '"columnwise"'),
        CHOICE.replace('"history": 16', '"history": 0'),
        KEY.replace('"bfloat16"', '"bfloat17"'),
        KEY.replace('"bfloat16"', "1"),
        KEY.replace('"no_split_k": false', '"no_split_k": 0'),
        KEY.replace("MatmulProblem", "MatmulPlan"),
        KEY.replace('"a": {"layout": ', '"a": {'),
    ],
    ids=lambda text: ascii(text[:10]),
)
def test_text_that_is_no_key(text: str) -> None:
    with pytest.raises(ValueError, match="is not the key of a problem"):
        parse_key(text)


def test_an_activation_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="activation is 'leaky_rely'"):
        parse_key(LEAKY.replace("leaky_relu", "leaky_rely"))


def test_whoever_changes_what_is_written_raises_the_version() -> None:
    fields = [(kind, each) for kind in WRITTEN for each in dataclasses.fields(kind) if each.metadata != LATER]
    lines = [f"{kind.__name__}.{each.name}: {each.type}" for kind, each in fields]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    assert DIGESTS[SCHEMA] == digest, "fields have changed: raise keys.SCHEMA and record the new digest"
