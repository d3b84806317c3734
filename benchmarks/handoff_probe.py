"""What a client sees of one request to a running server, and what the server's metrics say of its hand-off."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serving_core.metric_names import (
    ACKNOWLEDGED,
    HANDOFFS_TOTAL,
    KV_TRANSFER_BYTES_TOTAL,
    KV_TRANSFER_EXPOSED_SECONDS,
    KV_TRANSFER_SECONDS,
)

METRICS_TIMEOUT_S = 10.0
_METRICS_INTERVAL_S = 0.05
_SUM_TRANSFER, _SUM_EXPOSED = f"{KV_TRANSFER_SECONDS}_sum", f"{KV_TRANSFER_EXPOSED_SECONDS}_sum"
_WORDS = " river stone market winter engine paper garden letter harbour copper lantern meadow"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTotals:
    """Of all prefill workers since they started: acknowledged hand-offs, their times, and all page bytes sent."""

    num_acknowledged: int
    transfer_s: float
    exposed_s: float
    num_bytes: int

    @classmethod
    def parse(cls, text: str) -> HandoffTotals:
        """Of the answer of /metrics."""
        totals = dict.fromkeys((HANDOFFS_TOTAL, _SUM_TRANSFER, _SUM_EXPOSED, KV_TRANSFER_BYTES_TOTAL), 0.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels
                if sample.name in totals and labels["role"] == "prefill" and labels.get("result", ACKNOWLEDGED) == ACKNOWLEDGED:
                    totals[sample.name] += sample.value
        return cls(
            num_acknowledged=round(totals[HANDOFFS_TOTAL]),
            transfer_s=totals[_SUM_TRANSFER],
            exposed_s=totals[_SUM_EXPOSED],
            num_bytes=round(totals[KV_TRANSFER_BYTES_TOTAL]),
        )

    def since(self, before: HandoffTotals) -> HandoffTotals:
        return HandoffTotals(
            num_acknowledged=self.num_acknowledged - before.num_acknowledged,
            transfer_s=self.transfer_s - before.transfer_s,
            exposed_s=self.exposed_s - before.exposed_s,
            num_bytes=self.num_bytes - before.num_bytes,
        )


class HandoffProbe:
    """Asks one server, one request at a time. Its prompts are words at random, so that no two begin alike and the prefix cache
    has none of them; and words, so that the answer is text of which each token can be sent at once."""

    def __init__(self, url: str, http: httpx.AsyncClient, seed: int) -> None:
        self._url = url
        self._http = http
        self._random = random.Random(seed)
        self._word_ids: list[int] = []

    async def token_times(self, num_prompt_tokens: int, num_tokens: int) -> list[float]:
        """Seconds from the request to each of the tokens of the answer. Raises ``httpx.HTTPError``, or ``RuntimeError`` when
        the stream fails or tokens come together."""
        prompt = await self._draw_prompt(num_prompt_tokens)
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        started_at = time.perf_counter()
        times = [now - started_at async for now in self._stream(body)]
        if len(times) != num_tokens:
            raise RuntimeError(f"{num_tokens} tokens came in {len(times)} events")
        return times

    async def _draw_prompt(self, num_tokens: int) -> list[int]:
        if not self._word_ids:
            body = {"prompt": _WORDS, "add_special_tokens": False}
            answer = (await self._http.post(f"{self._url}/tokenize", json=body)).raise_for_status()
            self._word_ids = answer.json()["tokens"]
        return self._random.choices(self._word_ids, k=num_tokens)

    async def _stream(self, body: dict[str, object]) -> AsyncIterator[float]:
        async with self._http.stream("POST", f"{self._url}/generate", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise RuntimeError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                if event["token_ids"]:
                    yield time.perf_counter()

    async def totals(self) -> HandoffTotals:
        return HandoffTotals.parse((await self._http.get(f"{self._url}/metrics")).raise_for_status().text)

    async def totals_after(self, before: HandoffTotals, num_handoffs: int) -> HandoffTotals:
        """What came to the totals ``before`` with so many hand-offs more. Workers report about once a second, so it waits.
        Raises ``TimeoutError``."""
        async with asyncio.timeout(METRICS_TIMEOUT_S):
            while True:
                added = (await self.totals()).since(before)
                if added.num_acknowledged >= num_handoffs:
                    return added
                await asyncio.sleep(_METRICS_INTERVAL_S)
