"""The example of docs/pytorch.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs/pytorch.md").read_text()
    (example,) = re.findall(r"<!-- torch example -->\n```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "pytorch.md", "exec"), names)
    assert all(each.grad is not None for each in names["block"].parameters())
