"""The shape of one KV page in memory and on the wire."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, fields, replace

from serving_core.errors import BrokenContract


class KVDType(enum.Enum):
    """Element type of the KV cache. The first three are also types of weights and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"
    """Symmetric: a number is its integer, -127 to 127, times the scale of its token, head and side (key or value)."""
    FP8 = "fp8"
    """A number is one of E4M3 (without infinities, up to 448) times such a scale."""

    @property
    def num_bytes(self) -> int:
        match self:
            case KVDType.FLOAT32:
                return 4
            case KVDType.BFLOAT16 | KVDType.FLOAT16:
                return 2
            case KVDType.INT8 | KVDType.FP8:
                return 1

    @property
    def has_scales(self) -> bool:
        """Whether the cache holds scales beside the numbers."""
        return self in (KVDType.INT8, KVDType.FP8)


WEIGHT_DTYPES = (KVDType.FLOAT32, KVDType.BFLOAT16, KVDType.FLOAT16)
"""What weights and activations may be of."""

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPageLayout:
    """One page is a contiguous block [num_layers, 2 (key, value), page_size, num_kv_heads, head_dim] of ``dtype``; where that
    has scales, one float32 for each row of ``head_dim`` numbers, [num_layers, 2, page_size, num_kv_heads], after all of them.

    Bytes derive from the fields, little-endian, no padding. Keys are stored after rotary embedding.

    Invariants: there are bytes, and scales begin at a multiple of their own size.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: KVDType

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.page_size) < 1:
            raise BrokenContract(f"a page layout without bytes: {self}")
        if self.dtype.has_scales and self.number_bytes % _SCALE_BYTES:
            raise BrokenContract(f"a page layout whose scales would lie askew, after {self.number_bytes} bytes: {self}")

    @property
    def page_bytes(self) -> int:
        return self.number_bytes + self.scale_bytes

    @property
    def number_bytes(self) -> int:
        """Those of the page's numbers, with which it begins."""
        return self.num_rows * self.head_dim * self.dtype.num_bytes

    @property
    def scale_bytes(self) -> int:
        """Those of the page's scales, with which it ends; 0 without."""
        return self.num_rows * _SCALE_BYTES if self.dtype.has_scales else 0

    @property
    def num_rows(self) -> int:
        """Of ``head_dim`` numbers: heads in all slots, layers and sides."""
        return self.num_layers * 2 * self.page_size * self.num_kv_heads

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens, the last one possibly in part."""
        return -(-num_tokens // self.page_size)

    @property
    def layout_print(self) -> str:
        """Equal prints mean that pages can be copied byte for byte."""
        text = f"v1/{self.num_layers}/{self.num_kv_heads}/{self.head_dim}/{self.page_size}/{self.dtype.value}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_num_kv_heads(self, num_kv_heads: int) -> KVPageLayout:
        """The same for a part of the heads."""
        return replace(self, num_kv_heads=num_kv_heads)

    def obstacle_to(self, other: KVPageLayout, *, own_place: str, other_place: str) -> str:
        """Why pages of either layout cannot fill pages of the other, for a sentence: "dtype is bfloat16 at the sender and int8
        at the receiver". Empty where a transfer plan covers the pair: only the page size may differ."""
        return ", ".join(
            f"{field.name} is {as_word(ours)} {own_place} and {as_word(theirs)} {other_place}"
            for field in fields(self)
            if field.name != "page_size" and (ours := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        )


def as_word(value: int | KVDType) -> str:
    """For a sentence."""
    return value.value if isinstance(value, KVDType) else str(value)
