"""Digests of the code that suites run: what changes them, and what does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import digests
from benchmarks.__main__ import SUITES

ROOT = Path(__file__).parents[3]
FILES = {
    "benchmarks/steps.py": b"""from benchmarks.peers import peer
from benchmarks import timing
import lt_runtime as lt
peer("jax", "step")
lt.MLP()
""",
    "benchmarks/cold.py": b'COMMAND = ["python", "-m", "benchmarks.processes"]\n',
    "benchmarks/processes.py": b"from lt_runtime.errors import Error\n",
    "benchmarks/torch.py": b"def f():\n    import lt_runtime.torch\ndef findings(rows):\n    return 1\n",
    **dict.fromkeys(("benchmarks/timing.py", "benchmarks/report.py", "benchmarks/runner.py"), b"x = 1\n"),
    "benchmarks/peers/jax.py": b"from examples.dqn import loss\nfrom benchmarks.report import Row\n",
    "benchmarks/host.py": b'def f(name="add"):\n    return getattr(lt, name)\n',
    "examples/dqn.py": b"y = 1\n",
    "lt_runtime/__init__.py": b"""if TYPE_CHECKING:
    from lt_runtime.saving import load
_EXPORTS = {"nn.mlp": "MLP mlp", "ops.add": "add", "saving": "load"}
""",
    "lt_runtime/errors.py": b"class Error: ...\n",
    "lt_runtime/saving.py": b"z = 1\n",
    "lt_runtime/nn/__init__.py": b"",
    "lt_runtime/nn/mlp.py": b'def f(x):\n    """Two."""\n    from lt_runtime.ops import add\n    return x  # why\n',
    "lt_runtime/ops/add.py": b'ADD = Entry("add", "add.cu")\n',
    "lt_runtime/ops/table.json": b"{}\n",
    "lt_runtime/torch/__init__.py": b"z = 1\n",
    "cuda_src/add.cu": b'#include "sum.cuh"\n// adds\nint f() { return "//"[0]; /* done */ }\n',
    "cuda_src/sum.cuh": b"int g();\n",
    "cuda_src/scale.cu": b"int h();\n",
}


@pytest.mark.parametrize(
    ("file", "content", "suites"),
    [
        (
            "lt_runtime/nn/mlp.py",
            b'"""New."""\n\n# Because.\ndef f(x):\n    from lt_runtime.ops import add\n    return x\n',
            "",
        ),
        ("cuda_src/add.cu", b'#include "sum.cuh"\nint f() { return "//"[0];   }\n', ""),
        ("benchmarks/report.py", b"x = 2\n", ""),
        ("benchmarks/runner.py", b"x = 2\n", ""),
        ("benchmarks/torch.py", b"def f():\n    import lt_runtime.torch\ndef findings(rows):\n    return 2\n", ""),
        ("benchmarks/torch.py", b"def f():\n    import lt_runtime.torch as t\n", "torch"),
        ("lt_runtime/saving.py", b"z = 2\n", ""),
        ("cuda_src/scale.cu", b"int h2();\n", ""),
        ("lt_runtime/nn/__init__.py", b"x = 2\n", "steps"),
        ("lt_runtime/nn/mlp.py", b"def f(x):\n    return 2 * x\n", "steps"),
        ("lt_runtime/ops/table.json", b"[]\n", "steps host"),
        ("cuda_src/add.cu", b'#include "sum.cuh"\nint f() { return "/!"[0]; }\n', "steps host"),
        ("cuda_src/sum.cuh", b"int g2();\n", "steps host"),
        ("lt_runtime/errors.py", b"class Error(Exception): ...\n", "cold"),
        ("benchmarks/suite.py", b"x = 2\n", "cold steps host torch"),
        ("lt_runtime/torch/__init__.py", b"z = 2\n", "torch"),
        ("benchmarks/timing.py", b"x = 2\n", "steps"),
        ("examples/dqn.py", b"y = 2\n", "steps"),
        ("benchmarks/processes.py", b"from lt_runtime.errors import Error as E\n", "cold"),
        ("benchmarks/unknown.py", b"x = 2\n", ""),
    ],
)
def test_a_digest_changes_with_the_code_that_its_suite_runs(file: str, content: bytes, suites: str) -> None:
    after, names = {**FILES, file: content}, ("cold", "steps", "host", "torch")
    assert [name for name in names if digests.digest(name, FILES) != digests.digest(name, after)] == suites.split()


def test_a_string_without_a_name_keeps_the_line_that_it_shares_with_code() -> None:
    short, other = ({"benchmarks/steps.py": b'def %s(): "one"\n' % name} for name in (b"f", b"g"))
    assert digests.digest("steps", short) != digests.digest("steps", other)


def test_what_a_suite_runs_is_covered_and_other_parts_of_the_package_are_not() -> None:
    files = digests.working_files()
    found = {name: digests.covered(name, files) for name in SUITES}
    assert all(f"benchmarks/{name}.py" in each for name, each in found.items())
    assert {"lt_runtime/presets.json", "cuda_src/optimizer.cu", "examples/dqn.py"} <= found["models"]
    assert {"lt_runtime/ops/norm.py", "cuda_src/norm.cu", "lt_runtime/plans/priors_sm90.json"} <= found["kernels"]
    assert "lt_runtime/torch/replace.py" in found["torch"] - found["steps"]
    assert "lt_runtime/saving/checkpoints.py" in found["cold"], "it imports all public names"
    for folder in ("cli", "saving", "profiling"):
        assert not [name for name in found["steps"] if name.startswith(f"lt_runtime/{folder}/")]


def test_modules_that_a_step_imports_at_run_time_are_covered() -> None:
    code = """import sys, numpy as np, lt_runtime as lt
model = lt.MLP([8, 16, 4], device="cpu", dtype="bfloat16", precision=lt.FP8())
step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse", batch_size=16, ema=lt.EMA(model, 0.9))
step(*(np.ones((16, size), model.dtype.numpy) for size in (8, 4)))
print(*(each.__file__ for name, each in sys.modules.items() if name.startswith("lt_runtime")))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {Path(file).relative_to(ROOT).as_posix() for file in done.stdout.split()}
    assert len(loaded) > 60
    assert loaded <= digests.covered("steps", digests.working_files())
