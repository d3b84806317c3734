"""The arrays inside one page. The only place here that knows how a page's bytes are arranged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serving_core.kv_page_layout import KVPageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """One array [num_planes, num_slots, num_heads, item_bytes] of a page, ``offset`` bytes from its start, without padding.

    A plane is the keys or the values of one layer: plane 2 * layer for keys, 2 * layer + 1 for values.
    """

    offset: int
    num_planes: int
    num_slots: int
    num_heads: int
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_planes * self.num_slots * self.num_heads * self.item_bytes

    def view(self, page: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """This array within the bytes of a page, [num_planes, num_slots, num_heads, item_bytes], without a copy."""
        shape = (self.num_planes, self.num_slots, self.num_heads, self.item_bytes)
        return page[self.offset : self.offset + self.num_bytes].reshape(shape)


def parts_of_page(layout: KVPageLayout) -> tuple[PagePart, ...]:
    """The parts of a page, in the order of their offsets; together they are the page."""
    numbers = PagePart(
        offset=0,
        num_planes=2 * layout.num_layers,
        num_slots=layout.page_size,
        num_heads=layout.num_kv_heads,
        item_bytes=layout.number_bytes // layout.num_rows,
    )
    if not layout.dtype.has_scales:
        return (numbers,)
    scales = replace(numbers, offset=layout.number_bytes, item_bytes=layout.scale_bytes // layout.num_rows)
    return numbers, scales
