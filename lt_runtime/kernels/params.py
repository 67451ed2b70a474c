"""Argument blocks of our kernels: the structs of `cuda_src` as ctypes sees them.

A kernel takes one struct by value, so that a launch passes one pointer. The driver's own view of a kernel's
parameter is compared with the struct when the kernel is loaded.
"""

from __future__ import annotations

import ctypes
from typing import Final

from lt_runtime.layout import Layout
from lt_runtime.problem import DType

SCALAR: Final = {
    DType.FLOAT32: "float",
    DType.FLOAT16: "__half",
    DType.BFLOAT16: "__nv_bfloat16",
}
"""The CUDA C++ name of each type."""


class Matrix(ctypes.Structure):
    """`lt::Matrix`; strides are in elements."""

    _fields_ = (("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("col_stride", ctypes.c_int64))

    @classmethod
    def at(cls, address: int, layout: Layout) -> Matrix:
        """The matrix of `layout` at `address`."""
        return cls(address, *layout.strides)


ROUNDS: Final = 10
"""Of Philox4x32."""


class Dropout(ctypes.Structure):
    """`lt::Dropout`."""

    _fields_ = (
        ("keys", (ctypes.c_uint32 * 2) * ROUNDS),
        ("step_pointer", ctypes.c_void_p),
        ("step", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
        ("limit", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )


class ColumnSum(ctypes.Structure):
    """`lt::ColumnSum<SCALAR>`."""

    _fields_ = (
        ("sum", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("tickets", ctypes.c_void_p),
        ("accumulate", ctypes.c_int),
    )


class EpilogueFwdParams(ctypes.Structure):
    """`lt::EpilogueFwdParams`."""

    _fields_ = (
        ("in_", Matrix),
        ("preactivation", Matrix),
        ("out", Matrix),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_uint32),
        ("cols", ctypes.c_int64),
        ("dropout", Dropout),
        ("slope", ctypes.c_float),
    )


class EpilogueBwdParams(ctypes.Structure):
    """`lt::EpilogueBwdParams`."""

    _fields_ = (
        ("dy", Matrix),
        ("saved", Matrix),
        ("dz", Matrix),
        ("db", ColumnSum),
        ("rows", ctypes.c_uint32),
        ("cols", ctypes.c_int64),
        ("dropout", Dropout),
        ("slope", ctypes.c_float),
    )


class Mask(ctypes.Structure):
    """`lt::Mask`; strides are in bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("line_stride", ctypes.c_int64),
        ("batch_stride", ctypes.c_int64),
        ("along_rows", ctypes.c_int),
    )


class Addend(ctypes.Structure):
    """`lt::Addend`."""

    _fields_ = (
        ("c", Matrix),
        ("batch_stride", ctypes.c_int64),
        ("beta_pointer", ctypes.c_void_p),
        ("beta", ctypes.c_float),
    )


class MatmulForwardParams(ctypes.Structure):
    """`lt::MatmulForwardParams`."""

    _fields_ = (
        ("d", Matrix),
        ("d_batch_stride", ctypes.c_int64),
        ("addend", Addend),
        ("bias", Matrix),
        ("aux", Matrix),
        ("aux_batch_stride", ctypes.c_int64),
        ("mask", Mask),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
    )


class MatmulBackwardParams(ctypes.Structure):
    """`lt::MatmulBackwardParams`."""

    _fields_ = (
        ("d", Matrix),
        ("d_batch_stride", ctypes.c_int64),
        ("addend", Addend),
        ("aux", Matrix),
        ("aux_batch_stride", ctypes.c_int64),
        ("mask", Mask),
        ("bias_gradient", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
    )


class OperandSumParams(ctypes.Structure):
    """`lt::OperandSumParams`."""

    _fields_ = (
        ("operand", Matrix),
        ("batch_stride", ctypes.c_int64),
        ("sum", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
    )


class NarrowParams(ctypes.Structure):
    """`lt::NarrowParams`."""

    _fields_ = (
        ("a", Matrix),
        ("b", Matrix),
        ("c", Matrix),
        ("d", Matrix),
        ("vector", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("tickets", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("aux", Matrix),
    )


class Resized(ctypes.Structure):
    """`lt::Resized`."""

    _fields_ = (
        ("from_", Matrix),
        ("to", Matrix),
        ("from_rows", ctypes.c_int64),
        ("from_cols", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
    )


RESIZED: Final = 3
"""Matrices of one launch of `resize`, at most."""


class ResizeParams(ctypes.Structure):
    """`lt::ResizeParams`."""

    _fields_ = (("items", Resized * RESIZED),)


class DropoutParams(ctypes.Structure):
    """`lt::DropoutParams`."""

    _fields_ = (
        ("in_", Matrix),
        ("out", Matrix),
        ("rows", ctypes.c_uint32),
        ("cols", ctypes.c_int64),
        ("dropout", Dropout),
    )


class MseParams(ctypes.Structure):
    """`lt::MseParams`."""

    _fields_ = (
        ("prediction", Matrix),
        ("target", Matrix),
        ("gradient", Matrix),
        ("grad_scale", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("loss", ctypes.c_void_p),
        ("ticket", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("gradient_scale", ctypes.c_float),
        ("size", ctypes.c_float),
    )


class CrossEntropyParams(ctypes.Structure):
    """`lt::CrossEntropyParams`."""

    _fields_ = (
        ("logits", Matrix),
        ("gradient", Matrix),
        ("labels", ctypes.c_void_p),
        ("counted", ctypes.c_void_p),
        ("grad_scale", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("loss", ctypes.c_void_p),
        ("ticket", ctypes.c_void_p),
        ("claimed", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("ignore_index", ctypes.c_int64),
        ("gradient_scale", ctypes.c_float),
        ("smoothing", ctypes.c_float),
        ("wide_labels", ctypes.c_int),
        ("ignores", ctypes.c_int),
        ("lanes", ctypes.c_uint32),
        ("held", ctypes.c_uint32),
        ("streams", ctypes.c_int),
    )


class CountLabelsParams(ctypes.Structure):
    """`lt::CountLabelsParams`."""

    _fields_ = (
        ("labels", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("counted", ctypes.c_void_p),
        ("ticket", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("ignore_index", ctypes.c_int64),
        ("wide_labels", ctypes.c_int),
    )


class TallyState(ctypes.Structure):
    """`lt::TallyState`, what a tally keeps on the device."""

    _fields_ = (
        ("loss", ctypes.c_float),
        ("rest", ctypes.c_float),
        ("steps", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("correct", ctypes.c_uint64),
    )


class TallyParams(ctypes.Structure):
    """`lt::TallyParams`."""

    _fields_ = (
        ("logits", Matrix),
        ("labels", ctypes.c_void_p),
        ("loss", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("ignore_index", ctypes.c_int64),
        ("weight", ctypes.c_float),
        ("first", ctypes.c_int),
        ("wide_labels", ctypes.c_int),
        ("ignores", ctypes.c_int),
    )


class OptimizerState(ctypes.Structure):
    """`lt::OptimizerState`, what an optimizer keeps on the device."""

    _fields_ = (
        ("steps", ctypes.c_uint32),
        ("skipped", ctypes.c_uint32),
        ("nonfinite", ctypes.c_uint32),
        ("norm", ctypes.c_float),
        ("update_ticket", ctypes.c_uint32),
        ("norm_ticket", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32),
        ("reserved1", ctypes.c_uint32),
    )


class AdamWChunk(ctypes.Structure):
    """`lt::AdamWChunk`, a row of the optimizer's table on the device: what one block updates."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("m", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("v_max", ctypes.c_void_p),
        ("octet", ctypes.c_uint64),
        ("tensor", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("lr_scale", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("value_type", ctypes.c_uint8),
        ("copy_type", ctypes.c_uint8),
        ("gradient_type", ctypes.c_uint8),
        ("aligned", ctypes.c_uint8),
        ("reserved", ctypes.c_uint32),
    )


class AdamWParams(ctypes.Structure):
    """`lt::AdamWParams`."""

    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("growth_tracker", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("lr", ctypes.c_float),
        ("log_beta1", ctypes.c_float),
        ("log_beta2", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta1", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("decay", ctypes.c_int),
        ("warmup_steps", ctypes.c_uint32),
        ("total_steps", ctypes.c_uint32),
        ("final_factor", ctypes.c_float),
        ("max_norm", ctypes.c_float),
        ("skip_nonfinite", ctypes.c_int),
        ("growth_factor", ctypes.c_float),
        ("backoff_factor", ctypes.c_float),
        ("growth_interval", ctypes.c_int),
    )


class GradientChunk(ctypes.Structure):
    """`lt::GradientChunk`, a row of the table of gradients on the device: what one block reads."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("type", ctypes.c_uint8),
        ("aligned", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 2),
    )


class GradientNormParams(ctypes.Structure):
    """`lt::GradientNormParams`."""

    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    )
