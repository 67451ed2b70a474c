"""The types of the interface, as a user's type checker sees them."""

from __future__ import annotations

import re
from pathlib import Path

from mypy import api

_TYPED = Path(__file__).parents[1] / "typed"
_ROOT = _TYPED.parents[1]


def test_a_type_checker_accepts_right_code_and_finds_each_mistake() -> None:
    right, wrong = _TYPED / "accepted.py", _TYPED / "refused.py"
    config = "--config-file", str(_ROOT / "pyproject.toml"), "--cache-dir", str(_ROOT / ".mypy_cache")
    report, errors, _ = api.run([*config, "--no-error-summary", "--hide-error-context", str(right), str(wrong)])
    found = {(Path(name).name, int(line)) for name, line in re.findall(r"^(.+?):(\d+): error", report, re.MULTILINE)}
    lines = enumerate(wrong.read_text().splitlines(), 1)
    assert found == {(wrong.name, i) for i, line in lines if line.endswith("# refused")}, report + errors
