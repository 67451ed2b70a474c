"""Checks two layers whose backward is one call chain, on a pretended GPU, against the float64 reference."""

from __future__ import annotations

import numpy as np

from lt_runtime import reference
from tests.host_kernels.arrays import assert_close
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Array, Layer, check_any
from tests.support.placed import host_of
from tests.support.strategies import LinearCase


class LayerChain:
    """Two layers, the second on the first's output; the second's backward also applies the first's derivative."""

    def __init__(self, gpu: FakeGpu, below: LinearCase, above: LinearCase, *, need_db_below: bool = True) -> None:
        self.gpu, self.case, self.need_db_below = gpu, below, need_db_below
        self.below, self.above = Layer(gpu, below, gpu.stream), Layer(gpu, above, gpu.stream)

    def check(self) -> None:
        below, above, lt = self.below, self.above, self.gpu.lt
        y, ctx1 = below.forward()
        _, ctx2 = lt.linear_fwd(
            y, above.w.array, above.bias, **above.settings(), out=above.y.array, stream=above.stream
        )
        chained = {"through": ctx1, "need_db_below": self.need_db_below, "stream": above.stream}
        dz, dw2, db2, db1 = lt.linear_bwd(above.dy.array, ctx2, **chained)
        rest = {"before_activation": True, "need_db": False, "stream": below.stream}
        dx, dw1, _ = lt.linear_bwd(dz, ctx1, **rest)
        self.gpu.synchronize(self.gpu.stream.ptr)
        first, second = below.data, above.data
        activation = above.case.activation
        _, z2 = reference.linear_fwd(first.y, second.w, second.bias, activation, second.factors)
        upper = reference.linear_bwd(second.dy, first.y, second.w, z2, activation, second.factors)
        made = {"dz": dz, "dw2": dw2, "dx": dx, "dw1": dw1, "db2": db2, "db1": db1}
        assert (db1 is None) == (not self.need_db_below)

        def check(z: Array) -> None:
            lower = reference.linear_bwd(upper.dx, first.x, first.w, z, below.case.activation, first.factors)
            exact = {"dz": lower.dz, "dw2": upper.dw, "dx": lower.dx, "dw1": lower.dw, "db2": upper.db, "db1": lower.db}
            for name, values in exact.items():
                limit = (2e-3 if below.case.compute == "tf32" else 1e-5) * (np.abs(values).max() + 1.0)
                if made[name] is not None:
                    assert_close(name, host_of(self.gpu, made[name]).astype(np.float64), values, limit)

        check_any(check, first.readings)
