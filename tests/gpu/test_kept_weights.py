"""Inference in FP8 on the GPU: outputs follow whatever is written into weights that are kept between calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.kept_weights import CHANGES, Change, check_that_outputs_follow

pytestmark = pytest.mark.usefixtures("fp8_products")


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_outputs_follow(gpu: Any, tmp_path: Path, change: Change, captured: bool) -> None:
    check_that_outputs_follow(gpu, change, tmp_path, captured=captured)
