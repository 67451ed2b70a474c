"""Operands read where they lie: address, shape, strides, type, device, and the library they came from."""

from lt_runtime.arrays.arena import arena_size, arena_views, host_zeros
from lt_runtime.arrays.checks import check_device, check_no_overlap, check_same, check_shape
from lt_runtime.arrays.libraries import (
    Library,
    Signature,
    contiguous,
    current_streams,
    signature_of,
    without_addresses,
)
from lt_runtime.arrays.operand import (
    CUPY,
    HOST,
    Operand,
    device_of,
    device_of_address,
    library_of,
    on_host,
    read,
    read_step,
)

__all__ = [
    "CUPY",
    "HOST",
    "Library",
    "Operand",
    "Signature",
    "arena_size",
    "arena_views",
    "check_device",
    "check_no_overlap",
    "check_same",
    "check_shape",
    "contiguous",
    "current_streams",
    "device_of",
    "device_of_address",
    "host_zeros",
    "library_of",
    "on_host",
    "read",
    "read_step",
    "signature_of",
    "without_addresses",
]
