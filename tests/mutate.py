"""Changes one expression or statement at a time, at random, and runs the tests that cover its line.

`python -m tests.mutate --sample 300 --seed 1 --resume FILE` changes the package, lists the changes that no test notices
(survivors), and prints the share of the others. Results are appended to FILE; a run that finds the file goes on where
it ended. `--root` names another checkout, which may be of another commit; its `.venv` runs its tests. A run of all
tests, which takes minutes, first records which tests cover which line, unless `--lines` names such a record.

With `--kernels` it changes `cuda_src`, and runs the tests on the host of the kernels that include the changed file.
`--part 2/16` tries every sixteenth change of the sample, from the third one; several parts may run at once. With
`--changed BASE`, for continuous integration, one file that differs from that commit is changed, and only the tests that
import it are recorded and run.

The command exits with 1 if four or more changes survive and none is noticed; fewer may be changes that do not alter the
meaning. The command needs the package `coverage`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.digests import code_digest
from tests.mutants.trial import Copy, Verdict

RECORDER: Final = Path(__file__).with_name("line_contexts.py")
_TESTS: Final = ("tests/cpu", "tests/host_kernels")
_UNRELATED: Final = ("cpu/test_mutants.py", "cpu/test_packaging.py", "cpu/kernels", "host_kernels/test_sanitizers.py")
"""Tests that are left out: they do not import the package into their own process, or compile kernels for minutes."""
_LIMIT_S: Final = 60
_KERNEL_LIMIT_S: Final = 600
_CHOSEN_S: Final = 25.0
"""Limit of the recorded seconds of a mutant's tests.

Tests of the mutated file are chosen first, then those in the folder of tests/cpu with the name of the file's package.
"""
_TELLING: Final = 4
"""The command fails if all changes survive, and are at least this many; usually about a quarter survives."""

_SWAPS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitXor,
}
_KERNEL_SWAPS: Final = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
    "*": "+", "/": "*", "%": "/", "&": "^", "|": "^", "<<": ">>", ">>": "<<",
}  # fmt: skip
_KERNEL_CHANGES: Final = re.compile(r"(?<= )(?:[<>=!]=|&&|\|\||<<|>>|[-+*/%<>&|])(?= )|(?<![\w.\"])\d+(?![\w.\"])")
"""Matches operators, which stand between spaces, and integers."""
_KERNELS_LEFT_OUT: Final = ("#", "//", "static_assert", "template", "using ", "asm")
_TESTS_OF_KERNELS: Final = {
    **dict.fromkeys(("cross_entropy", "elementwise_loss", "summed_loss", "loss_fp8", "loss_mean"), "loss"),
    **dict.fromkeys(("mlp_fwd", "mlp_bwd", "mlp_gradients"), "mlp"),
    **dict.fromkeys(("narrow_k", "narrow_m", "narrow_n", "tile_matmul"), "own_products"),
}
"""For kernel files whose test file has another name, the test file's name."""
_Skipped = ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom
"""Nodes that are left out: Python 3.11 gives wrong positions in f-strings, and the texts of errors are prose."""


@dataclass(frozen=True)
class Mutant:
    """A random change of a file (mutant).

    Attributes:
        lines: lines of the changed statement, without its body.
        text: the whole file's text with the change.
    """

    name: str
    path: str
    lines: range
    text: str
    is_in_function: bool = True


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """Lists every possible change of a file."""
    code = text.encode()
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    in_functions = {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
    for statement, node in _nodes(tree, None):
        for target, new in _changes(node):
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            old = " ".join(code[begin:end].decode().split())
            body = getattr(statement, "body", None)
            last = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno
            yield Mutant(
                f"{path}:{target.lineno}:{target.col_offset}: {old[:70]} -> {new[:70]}",
                path,
                range(statement.lineno, last + 1),
                (code[:begin] + new.encode() + code[end:]).decode(),
                statement.lineno in in_functions,
            )


def kernel_mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """Lists every possible change of a kernel's file: of an operator, or of an integer by 1."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.lstrip().startswith(_KERNELS_LEFT_OUT):
            continue
        for found in _KERNEL_CHANGES.finditer(line.partition("//")[0]):
            new = _KERNEL_SWAPS.get(found[0]) or str(int(found[0]) + 1)
            changed = f"{line[: found.start()]}{new}{line[found.end() :]}"
            name = f"{path}:{number + 1}:{found.start()}: {found[0]} -> {new} in {line.strip()[:70]}"
            yield Mutant(name, path, range(0), "".join((*lines[:number], changed, *lines[number + 1 :])))


def kernel_tests(root: Path, path: str) -> list[str]:
    """Finds the test files of the kernels whose sources include a header, directly or through another header."""
    texts, names = {file.name: file.read_text() for file in (root / "cuda_src").iterdir()}, {Path(path).name}
    while more := {name for name, text in texts.items() if any(f'#include "{each}"' in text for each in names)} - names:
        names |= more
    stems = sorted(Path(name).stem for name in names if name.endswith(".cu"))
    tests = dict.fromkeys(f"tests/host_kernels/test_{_TESTS_OF_KERNELS.get(stem, stem)}.py" for stem in stems)
    return [test for test in tests if (root / test).exists()]


def _nodes(node: ast.AST, statement: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each node that may be changed, with its statement."""
    statement = node if isinstance(node, ast.stmt) else statement
    if statement is not None:
        yield statement, node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                types_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                if isinstance(child, ast.AST) and not isinstance(child, _Skipped) and not types_only:
                    yield from _nodes(child, statement)


def _changes(node: Any) -> Iterator[tuple[Any, str]]:
    """Yields nodes to replace, each with its replacement."""
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                if type(operator) in _SWAPS:
                    other = copy.deepcopy(node)
                    other.ops[index] = _SWAPS[type(operator)]()
                    yield node, f"({ast.unparse(other)})"
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in _SWAPS:
            other = copy.copy(node)
            other.op = _SWAPS[type(operator)]()
            yield node, f"({ast.unparse(other)})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"bool({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from ((node, f"({changed!r})") for changed in (value + 1, value - 1))
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "pass"
        case ast.Assign(targets=targets) if all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets):
            yield node, "pass"


def record(checkout: Copy, tests: Sequence[str], out: Path) -> str:
    """Writes to the file `out` which tests cover each line, and returns the end of pytest's output."""
    left_out = [f"--ignore=tests/{path}" for path in _UNRELATED]
    arguments = ["-P", str(RECORDER), str(out.resolve()), "-q", "-n0", "-p", "no:cacheprovider", *left_out, *tests]
    return checkout.python(arguments)[1][-1000:]


def tried(checkout: Copy, mutant: Mutant, tests: Sequence[str]) -> dict[str, Any]:
    """Runs a mutant's tests; returns the verdict and the name of the test that failed."""
    verdict, output = Verdict.SURVIVED, "no test runs it"
    if tests:
        limit_s = _LIMIT_S if mutant.path.endswith(".py") else _KERNEL_LIMIT_S
        verdict, output = checkout.try_out(mutant.path, mutant.text, tests, limit_s)
        # The changed value appears in the names of parametrised tests, which are then not found.
        if verdict is Verdict.BROKEN and "ERROR: not found" in output:
            functions = list(dict.fromkeys(name.partition("[")[0] for name in tests))
            verdict, output = checkout.try_out(mutant.path, mutant.text, functions, _LIMIT_S)
        if "BuildError" in output:
            verdict = Verdict.BROKEN
        seen = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        output = seen[0][:200] if seen else output[-200:]
    return {"name": mutant.name, "verdict": verdict.value, "tests": len(tests), "output": output}


def covering_tests(mutant: Mutant, recorded: dict[str, Any]) -> list[str]:
    """Returns the tests that cover the mutant's lines.

    If only the module's import runs these lines, the tests that cover any line of its file are returned, and those in
    its room, the folder of tests/cpu with the name of the file's package. Tests with the name of the mutant's file come
    first, then those in its room, then the others in a random order: the fastest tests alone see fewer changes.
    """
    names, lines = list(recorded["seconds"]), recorded["lines"].get(mutant.path, {})
    run = [lines[str(line)] for line in mutant.lines if str(line) in lines]
    found = {names[number] for tests in run for number in tests}
    stem, room = Path(mutant.path).stem, f"tests/cpu/{Path(mutant.path).parent.name}/"
    if run and not mutant.is_in_function:
        found |= {names[number] for tests in lines.values() for number in tests}
        found |= {name for name in names if room in name or stem in Path(name.partition("::")[0]).stem}
    chosen, left_s = [], _CHOSEN_S
    shuffled = random.Random(mutant.name).sample(sorted(found), len(found))
    for name in sorted(shuffled, key=lambda name: (stem not in name, room not in name)):
        left_s -= recorded["seconds"][name]
        if chosen and left_s < 0:
            break
        chosen.append(name)
    return chosen


def _changed(root: Path, base: str) -> dict[str, list[str]]:
    """Finds the modules of the package with changed code that a test file imports, each with the test files."""

    def code_at(commit: str, path: str) -> str:
        shown = subprocess.run(["git", "show", f"{commit}:{path}"], check=False, capture_output=True)
        return code_digest(".py", shown.stdout)  # of nothing, if the file is new

    command = ["git", "diff", "--name-only", "--diff-filter=AM", base, "HEAD", "--", "lt_runtime/*.py"]
    changed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    changed = [path for path in changed if code_at(base, path) != code_at("HEAD", path)]
    found: dict[str, list[str]] = {}
    for test in sorted((root / "tests" / "cpu").rglob("test_*.py")):
        text = test.read_text()
        for path in changed:
            room, _, module = path.removesuffix(".py").replace("/", ".").rpartition(".")
            if re.search(rf"^from {re.escape(room)}(\.{module} import| import .*\b{module}\b)", text, re.MULTILINE):
                found.setdefault(path, []).append(str(test.relative_to(root)))
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs the command `python -m tests.mutate`."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--resume", type=Path, help="file of results")
    parser.add_argument("--lines", type=Path, help="file with the record of which tests run which line")
    parser.add_argument("--changed", metavar="BASE")
    parser.add_argument("--kernels", action="store_true", help="change cuda_src")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="of the sample; the first part is 0/N")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the command ends after so many")
    options = parser.parse_args(arguments)
    os.environ["LT_TEST_EXAMPLES"] = "10"
    root = options.root.resolve()
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        checkout = Copy(Path(directory, "tree"), root, deadline=time.monotonic() + options.seconds)
        rng = random.Random(options.seed)
        paths, tests = sorted(str(file.relative_to(root)) for file in root.glob("lt_runtime/**/*.py")), list(_TESTS)
        if options.changed:
            changed = _changed(root, options.changed)
            paths = rng.sample(sorted(changed), min(1, len(changed)))
            tests = [test for path in paths for test in changed[path]]
        find = kernel_mutants_of if options.kernels else mutants_of
        if options.kernels:
            paths = sorted(str(file.relative_to(root)) for file in root.glob("cuda_src/*.cu*"))
        mutants = [mutant for path in paths for mutant in find(path, (root / path).read_text())]
        lines = options.lines or Path(directory, "lines.json")
        if mutants and not lines.exists() and not options.kernels:
            print(record(checkout, tests, lines))
        recorded = json.loads(lines.read_text()) if lines.exists() else {"seconds": {}, "lines": {}}
        if options.changed:  # changes of lines without a recorded test are left out: other tests may cover these lines
            mutants = [each for each in mutants if covering_tests(each, recorded)]
        done = _results(options.resume)
        part, parts = map(int, options.part.split("/"))
        for mutant in rng.sample(mutants, min(options.sample, len(mutants)))[part::parts]:
            if mutant.name in done:
                continue
            tests = kernel_tests(root, mutant.path) if options.kernels else covering_tests(mutant, recorded)
            result = tried(checkout, mutant, tests)
            if result["verdict"] == Verdict.LEFT_OUT.value:
                break
            done[mutant.name] = result
            print(f"{result['verdict']}: {mutant.name}", flush=True)
            if options.resume:
                with options.resume.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    survived = [result for result in done.values() if result["verdict"] == Verdict.SURVIVED.value]
    for result in survived:
        print(f"survivor: {result['name']} ({result['tests']} tests)")
    print(f"{len(done) - len(survived)} of {len(done)} seen")
    return int(bool(done) and len(survived) == len(done) >= _TELLING)


def _results(file: Path | None) -> dict[str, Any]:
    if file is None or not file.exists():
        return {}
    return {result["name"]: result for result in map(json.loads, file.read_text().splitlines())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
