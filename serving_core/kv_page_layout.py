"""The shape of one KV page in memory and on the wire."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, fields, replace

from serving_core.errors import BrokenContract


class KVDType(enum.Enum):
    """Element type of the KV cache."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is KVDType.FLOAT32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPageLayout:
    """One page is a contiguous block [num_layers, 2 (key, value), page_size, num_kv_heads, head_dim] of ``dtype``.

    Bytes derive from the fields, little-endian, no padding. Keys are stored after rotary embedding.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: KVDType

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.page_size) < 1:
            raise BrokenContract(f"a page layout without bytes: {self}")

    @property
    def page_bytes(self) -> int:
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.num_bytes

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens, the last one possibly in part."""
        return -(-num_tokens // self.page_size)

    def with_num_kv_heads(self, num_kv_heads: int) -> KVPageLayout:
        """The same for a part of the heads."""
        return replace(self, num_kv_heads=num_kv_heads)

    def obstacle_to(self, destination: KVPageLayout) -> str:
        """Why pages of this layout cannot fill pages of ``destination``, in words; empty where a transfer plan covers the pair.
        Only the page size may differ."""
        return ", ".join(
            f"{field.name} is {_word(ours)} at the sender and {_word(theirs)} at the receiver"
            for field in fields(self)
            if field.name != "page_size" and (ours := getattr(self, field.name)) != (theirs := getattr(destination, field.name))
        )

    @property
    def layout_print(self) -> str:
        """Equal prints mean that pages can be copied byte for byte."""
        text = f"v1/{self.num_layers}/{self.num_kv_heads}/{self.head_dim}/{self.page_size}/{self.dtype.value}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _word(value: int | KVDType) -> str:
    return value.value if isinstance(value, KVDType) else str(value)
