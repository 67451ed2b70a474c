"""The examples of docs/pytorch.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

PAGE = (Path(__file__).parents[2] / "docs/pytorch.md").read_text()
EXAMPLES = re.findall(r"<!-- torch example -->\n```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.filterwarnings("ignore:there is no GPU")
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_page_runs(example: str) -> None:
    names: dict[str, object] = {}
    exec(compile(example, "pytorch.md", "exec"), names)
    assert all(each.grad is not None for each in names["block"].parameters())
