"""The documentation's pages: examples run, links have targets, and generated parts are up to date."""

import re
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
WITH_EXAMPLES = [
    "README.md",
    "docs/distributed.md",
    "docs/fp8.md",
    "docs/models.md",
    "docs/own-loops.md",
    "docs/training.md",
    "docs/weights.md",
]


def examples(page: str, kind: str) -> list[str]:
    return re.findall(rf"<!-- {kind} -->\n```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_every_page_with_examples_is_run() -> None:
    assert [str(each.relative_to(ROOT)) for each in PAGES if "<!-- example -->" in each.read_text()] == WITH_EXAMPLES


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples_run_one_after_the_other(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some examples write files into the working directory
    exec(compile("".join(examples(page, "example")), page, "exec"), {})


def test_the_bound_call_gives_the_layer_s_result(gpu: FakeGpu) -> None:
    layer, *_ = examples("docs/own-loops.md", "example")
    (bound,) = examples("docs/own-loops.md", "gpu example")
    names: dict[str, Any] = {}
    exec(compile(layer, "own-loops.md", "exec"), names)
    on_host = names["y"]
    exec(compile(bound, "own-loops.md", "exec"), names)
    np.testing.assert_allclose(names["y"].get(), on_host, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "benchmarks/README.md", ROOT / "tests/README.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_list_of_public_names_is_up_to_date() -> None:
    assert (ROOT / "docs/README.md").read_text() == run_path(str(ROOT / "docs/make.py"))["page"](), (
        "run `python docs/make.py`"
    )


def test_the_readme_is_short() -> None:
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(prose.split()) <= 900
