"""Digest of everything that decides how a kernel family compiles, so that a family that passed is not compiled again.

The digest covers the family's source and its headers in `cuda_src`, the toolkit's headers, each variant's options on
each architecture, the argument blocks, the exact build of the compiler, and the code that judges the compiler's output.
Comments and blank space are left out.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lt_runtime.gpu import compiler
from lt_runtime.paths import kernel_sources
from tests.support import kernel_usage
from tests.support.kernel_usage import Structs, Variant, compile_to_ptx

_TOKEN: Final = re.compile(r"""//(?:\\\n|[^\n])*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.DOTALL)
"""Matches a comment; or a string or character literal, which is then the only group."""
_INCLUDE: Final = re.compile(r'^#\s*include\s*"([^"]+)"', re.MULTILINE)
_BUILD: Final = re.compile(r"^// (Compiler Build ID: .*|Cuda compilation tools.*)", re.MULTILINE)


def family_digest(variants: Sequence[Variant], architectures: Sequence[str], structs: Structs) -> str:
    """Hexadecimal digest of one source; `variants` must be all variants of it."""
    (source,) = {variant.source for variant in variants}
    parts = (
        compiler_build(),
        judging_code(),
        [(file.name, without_comments(file.read_text())) for file in included(source)],
        [(Path(compiler.runtime_headers()) / name).read_bytes() for name in compiler._TOOLKIT_HEADERS],
        [compiler._options(source, each.macros, architecture) for each in variants for architecture in architectures],
        [(kernel, ctypes.sizeof(struct)) for kernel, struct in sorted(structs.items())],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def included(source: str) -> list[Path]:
    """A file of `cuda_src` and all files that it includes directly or indirectly, sorted by name."""
    found: set[str] = set()
    pending = [source]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += _INCLUDE.findall((kernel_sources() / name).read_text())
    return [kernel_sources() / name for name in sorted(found)]


@functools.cache
def without_comments(code: str) -> str:
    """Returns C++ code without comments, blank lines and indentation; other lines and literals stay as they are."""
    bare = _TOKEN.sub(lambda match: match[1] or " ", code)
    return "\n".join(" ".join(line.split()) for line in bare.splitlines() if line.strip())


@functools.cache
def compiler_build() -> tuple[str, ...]:
    """Finds the exact build of NVRTC in the PTX that it writes."""
    _, ptx = compile_to_ptx(Variant("gradient_norm.cu"), "sm_90")
    found = tuple(_BUILD.findall(ptx))
    assert len(found) == 2, ptx[:400]
    return found


@functools.cache
def judging_code() -> str:
    """Returns the code that judges the compiler's output."""
    return without_prose(Path(kernel_usage.__file__).read_text(), imports=False)


def without_prose(code: str, *, imports: bool = True) -> str:
    """The syntax tree of Python code without comments and docstrings; without imports too if `imports` is False."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [  # type: ignore[attr-defined]
                each
                for each in body
                if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
                and (imports or not isinstance(each, ast.Import | ast.ImportFrom))
            ]
    return ast.dump(tree)
