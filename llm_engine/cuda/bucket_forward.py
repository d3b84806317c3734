"""Decode steps on CUDA: padded to a bucket of rows, and launched as one graph where there is one for that bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llm_engine.attention import AttentionRow, clear_entered_pages
from llm_engine.cuda.buckets import MAX_GRAPH_ROWS, bucket_of, buckets_up_to
from llm_engine.cuda.graph import Recorder
from llm_engine.cuda.paged_attention import PagedAttention
from llm_engine.cuda.paged_places import PagedPlaces
from llm_engine.decoder import Decoder
from llm_engine.device import to_device
from llm_engine.forward import DeviceForward, LateTokens, attention_rows
from llm_engine.kv_cache import KVCache
from llm_engine.step_plan import PlanRow, StepPlan


class BucketForward:
    """See ``DeviceForward``. A step whose rows are single tokens is padded with rows that write and read the cache's spare
    page; ``ragged`` computes all others, which have a replayed log among their rows: these steps are padded to no bucket.
    ``num_table_pages`` is the most pages of a sequence.
    """

    def __init__(
        self, decoder: Decoder, attention: PagedAttention, cache: KVCache, *, num_table_pages: int, ragged: DeviceForward
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._cache = cache
        self._num_table_pages = num_table_pages
        self._ragged = ragged
        self._padding = AttentionRow(num_tokens=1, start_position=0, page_ids=(cache.spare_page,))
        self._buckets: dict[int, _Bucket] = {}
        self._graphs: dict[int, Callable[[], None]] = {}
        self._logits: Tensor | None = None  # [num_rows of the largest bucket so far, num_tokens], float32

    @torch.inference_mode()
    def record(self, recorder: Recorder, max_rows: int) -> None:
        """Record a graph for each bucket that steps of up to ``max_rows`` rows fall into, ``MAX_GRAPH_ROWS`` at most. To be
        called before the first step, since graphs write where the logits lie then."""
        assert not self._buckets
        for size in sorted(buckets_up_to(min(max_rows, MAX_GRAPH_ROWS)), reverse=True):  # the largest decides on memory
            bucket = self._bucket(size)
            self._graphs[size] = recorder.record(bucket.compute)

    def logits(self, plan: StepPlan, late: LateTokens | None = None) -> Tensor | None:
        rows = plan.rows
        if any(len(row.token_ids) != 1 for row in rows):
            return self._ragged.logits(plan, late)
        sampled = [index for index, row in enumerate(rows) if row.sample is not None]
        own = attention_rows(rows)
        clear_entered_pages(self._cache, own)
        size = bucket_of(len(rows))
        bucket = self._bucket(size)
        padded = own + [self._padding] * (size - len(rows))
        bucket.fill(rows, PagedPlaces.of(padded, self._cache.layout, num_table_pages=self._num_table_pages), late)
        self._graphs.get(size, bucket.compute)()
        if not sampled:
            return None
        if len(sampled) == len(rows):
            return bucket.logits[: len(rows)]
        return bucket.logits[to_device(torch.tensor(sampled), self._decoder.device)]

    def _bucket(self, size: int) -> _Bucket:
        if size not in self._buckets:
            places = PagedPlaces.of([self._padding] * size, self._cache.layout, num_table_pages=self._num_table_pages)
            self._buckets[size] = _Bucket(self._decoder, self._attention, places.to(self._decoder.device), self._rows(size))
        return self._buckets[size]

    def _rows(self, size: int) -> Tensor:
        """Where a bucket's logits go: all buckets share the memory of the largest."""
        if self._logits is None or len(self._logits) < size:
            self._logits = torch.empty(size, self._decoder.num_tokens, device=self._decoder.device)
        return self._logits[:size]


class _Bucket:
    """A step of so many rows, each a token, with inputs and logits that stay where they are."""

    def __init__(self, decoder: Decoder, attention: PagedAttention, places: PagedPlaces, logits: Tensor) -> None:
        self._decoder = decoder
        self._places = places
        self._step = attention.step_at(places)
        self._token_ids = torch.zeros_like(places.pages)  # [num_rows]
        self._positions = torch.zeros_like(places.pages)  # [num_rows]
        self.logits = logits

    def fill(self, rows: Sequence[PlanRow], places: PagedPlaces, late: LateTokens | None) -> None:
        padding = [0] * (len(self._token_ids) - len(rows))
        device = self._token_ids.device
        self._token_ids.copy_(to_device(torch.tensor([row.token_ids[0] for row in rows] + padding), device))
        if late is not None:
            late.put_into(self._token_ids)
        self._positions.copy_(to_device(torch.tensor([row.start_position for row in rows] + padding), device))
        self._places.copy_(places.to(device))

    def compute(self) -> None:
        hidden = self._decoder.hidden_states(self._token_ids, self._positions, self._step)
        self.logits.copy_(self._decoder.logits(hidden))
