"""What is asked of a kernel for attention over pages, and what one says of itself."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from llm_engine.cuda.paged_places import PagedPlaces


class PagedKernel(Protocol):
    """``name`` has the version, since equal names promise equal bits. Pages hold a multiple of ``page_size_multiple`` tokens;
    ``page_size`` is what suits it best."""

    name: str
    page_size_multiple: int
    page_size: int

    def __call__(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        places: PagedPlaces,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Attend causally: the last token of a row to all of its keys or the last ``sliding_window`` of them, each token before
        it to one fewer.

        query [num_tokens, num_heads, head_dim], with the tokens of the rows of ``places`` one after another; key_pages and
        value_pages [num_pages, page_size, num_kv_heads, head_dim], views whose pages lie apart. ``scale`` multiplies the
        products. Returns the shape of ``query``. All work is put on the current stream, and none of it waits for the host, so
        that it can be captured; the order in which a row's keys are summed up depends on that row alone.
        """
