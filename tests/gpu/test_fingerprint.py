"""The fingerprint of the machine with a real GPU, which names the plan file."""

from __future__ import annotations

import re

from lt_runtime import cublaslt
from lt_runtime.gpu.devices import device_count, device_info
from lt_runtime.store.document import fingerprint, kernels_digest


def test_a_gpu_has_a_fingerprint() -> None:
    for device in range(device_count()):
        known, info = fingerprint(device), device_info(device)
        assert (known.gpu, known.capability, known.multiprocessors) == (
            info.name,
            info.capability,
            info.multiprocessors,
        )
        assert known.cublaslt == cublaslt.get_version()
        assert re.fullmatch(r"\d{3,}(\.\d+)+|CUDA \d+\.\d+", known.driver)
        assert known.kernels == kernels_digest()
        assert known == fingerprint(device)
        assert re.fullmatch(r"[a-z0-9-]+-sm\d+-\d+-cublaslt\d+-[0-9a-f]{8}\.json", known.file_name)
