"""The fixture `gpu`: the current, real GPU, for checks that also run on the pretended GPU."""

from __future__ import annotations

import pytest

from tests.support.real_gpu import RealGpu


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> RealGpu:
    return RealGpu(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(autouse=True)
def captures_never_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_runtime.ops.call._CAPTURE_SHARE", 1.0)


@pytest.fixture
def fp8_products() -> None:
    from lt_runtime.gpu.devices import device_info

    if not device_info(0).has_fp8:
        pytest.skip("the GPU does not multiply FP8 matrices")
