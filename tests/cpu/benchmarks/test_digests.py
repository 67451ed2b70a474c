"""Digests of the code that suites run: what changes them, and what does not."""

from __future__ import annotations

import pytest

from benchmarks import digests
from benchmarks.__main__ import SUITES

FILES = {
    "benchmarks/steps.py": b'from benchmarks.peers import peer\nfrom benchmarks import timing\npeer("jax", "step")\n',
    "benchmarks/cold.py": b'COMMAND = ["python", "-m", "benchmarks.processes"]\n',
    "benchmarks/torch.py": b"def f():\n    import lt_runtime.torch\n",
    **dict.fromkeys(("benchmarks/timing.py", "benchmarks/processes.py", "benchmarks/report.py"), b"x = 1\n"),
    "benchmarks/peers/jax.py": b"from examples.dqn import loss\nfrom benchmarks.report import Row\n",
    "examples/dqn.py": b"y = 1\n",
    "lt_runtime/nn.py": b'def f(x):\n    """Two."""\n    return x  # why\n',
    "lt_runtime/torch/nn.py": b"z = 1\n",
    "cuda_src/add.cu": b'// adds\nint f() { return "//"[0]; /* done */ }\n',
}


@pytest.mark.parametrize(
    ("file", "content", "suites"),
    [
        ("lt_runtime/nn.py", b'"""New."""\n\n\n# Because.\ndef f(x):\n    return x\n', ""),
        ("cuda_src/add.cu", b'int f() { return "//"[0];   }\n', ""),
        ("benchmarks/report.py", b"x = 2\n", ""),
        ("lt_runtime/nn.py", b"def f(x):\n    return 2 * x\n", "cold steps torch"),
        ("cuda_src/add.cu", b'int f() { return "/!"[0]; }\n', "cold steps torch"),
        ("benchmarks/suite.py", b"x = 2\n", "cold steps torch"),
        ("lt_runtime/torch/nn.py", b"z = 2\n", "torch"),
        ("benchmarks/timing.py", b"x = 2\n", "steps"),
        ("examples/dqn.py", b"y = 2\n", "steps"),
        ("benchmarks/processes.py", b"x = 2\n", "cold"),
        ("benchmarks/unknown.py", b"x = 2\n", ""),
    ],
)
def test_a_digest_changes_with_the_code_that_its_suite_runs(file: str, content: bytes, suites: str) -> None:
    after = {**FILES, file: content}
    found = [name for name in ("cold", "steps", "torch") if digests.digest(name, FILES) != digests.digest(name, after)]
    assert found == suites.split()


def test_a_string_without_a_name_keeps_the_line_that_it_shares_with_code() -> None:
    short = {"lt_runtime/a.py": b'def f(): "one"\n'}
    assert digests.digest("steps", short) != digests.digest("steps", {"lt_runtime/a.py": b'def g(): "one"\n'})


def test_the_files_of_every_suite_are_read() -> None:
    files = digests.working_files()
    assert {"lt_runtime/presets.json", "cuda_src/add.cu", "examples/dqn.py"} <= {*files}
    assert {f"benchmarks/{name}.py" for name in SUITES} <= {*files}
    assert len({digests.digest(name, files) for name in SUITES}) >= len(SUITES) - 1, "steps and models run the same"
