"""Some variants of every kernel family, compiled with another NVRTC than the installed one.

`python -m tests.oldest_compiler FOLDER [--variants N]` takes the libraries from a folder that was filled by
`pip install --target FOLDER nvidia-cuda-nvrtc==13.0.*`, the oldest version that pyproject.toml allows. Newer ones
accept more of C++: NVRTC 13.0 and 13.1 refuse, for example, a generic lambda in a kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.compile_matrix import SOURCES, variants_of
from tests.support.kernel_usage import compile_to_ptx

_ARCHITECTURE: Final = "sm_90"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, and prints the families that fail; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.oldest_compiler", description=__doc__)
    parser.add_argument("folder", type=Path, help="the installed wheel")
    parser.add_argument("--variants", type=int, default=4, metavar="N", help="about how many of each family")
    options = parser.parse_args(arguments)
    # cuda.bindings uses the libnvrtc that is already loaded. Its builtins are loaded first, so that it finds them.
    for pattern in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
        (library,) = options.folder.rglob(pattern)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    from cuda.bindings import nvrtc

    print("compiling with NVRTC", ".".join(map(str, nvrtc.nvrtcVersion()[1:])), flush=True)
    failed = False
    for source in sorted(SOURCES):
        variants = variants_of(source)
        for variant in variants[:: -(-len(variants) // options.variants)]:
            try:
                compile_to_ptx(variant, _ARCHITECTURE)
            except Exception as error:  # a failure does not end the command: the other variants are compiled too
                print(f"{source} {variant}: {error}", flush=True)
                failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
