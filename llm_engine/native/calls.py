"""What the kernels that can be replayed are called with: each takes one of these, in C++ ``Call`` or ``Problem`` of the same
fields. The first is how many tokens there are, or rows where each is a token; a replay sets it anew.

Addresses are of tensors that someone else keeps.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p


class LinearCall(Structure):
    """See ``linear.cpp``."""

    _fields_ = (
        ("num_rows", c_int64),
        ("x", c_void_p),
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("is_y_float", c_int64),
        ("depth", c_int64),
        ("num_channels", c_int64),
    )


class RmsNormCall(Structure):
    """See ``rms_norm.cpp``."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("x", c_void_p),
        ("delta", c_void_p),
        ("weight", c_void_p),
        ("y", c_void_p),
        ("num_heads", c_int64),
        ("width", c_int64),
        ("stride", c_int64),
        ("eps", c_float),
    )


class ActivateMultiplyCall(Structure):
    """See ``gated_activation.cpp``."""

    _fields_ = (("num_rows", c_int64), ("gate_up", c_void_p), ("y", c_void_p), ("width", c_int64))


class RotateAndStoreCall(Structure):
    """See ``rotation.cpp``."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("key", c_void_p),
        ("key_stride", c_int64),
        ("value", c_void_p),
        ("value_stride", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotated", c_void_p),
        ("pages", c_void_p),
        ("slots", c_void_p),
        ("value_offset", c_int64),
        ("scales", c_void_p),
        ("scale_slots", c_void_p),
        ("scale_value_offset", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class AttendCall(Structure):
    """See ``decode_attention.cpp``."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("query", c_void_p),
        ("pages", c_void_p),
        ("scales", c_void_p),
        ("page_ids", c_void_p),
        ("tables", c_void_p),
        ("num_keys", c_void_p),
        ("output", c_void_p),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_size", c_int64),
        ("page_stride", c_int64),
        ("value_offset", c_int64),
        ("scale_page_stride", c_int64),
        ("scale_value_offset", c_int64),
        ("window", c_int64),
        ("scale", c_float),
    )


class ReplayedCall(Structure):
    """See ``replay.cpp``: a kernel's address, and that of its call."""

    _fields_ = (("kernel", c_void_p), ("call", c_void_p))
