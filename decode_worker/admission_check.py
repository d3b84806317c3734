"""What a decode worker can ever serve, and how many pages that takes. Knows nothing of what is held at the moment."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.token_rules import TokenRules
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import WorkerId
from serving_core.kv_page_layout import KVPageLayout
from serving_core.page_demand import PageDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCheck:
    """The fixed limits of one decode worker; ``num_pages`` is its whole pool."""

    worker_id: WorkerId
    layout: KVPageLayout
    rules: TokenRules
    num_pages: int

    def max_pages_for(self, request: GenerateRequest) -> int:
        """Pages for the sequence at its longest."""
        return self._demand(request).max_num_pages(self.layout.page_size)

    def first_pages_for(self, request: GenerateRequest, num_evictions: int) -> int:
        """Pages to be reserved: for the prompt, the log and one token more, and after evictions for room to grow."""
        return self._demand(request, num_evictions).num_pages(self.layout.page_size)

    def check(self, request: GenerateRequest) -> None:
        """Raises ``Refused``: MALFORMED for ids that are no tokens, TOO_LARGE for what can never fit."""
        self.rules.check_token_ids(request)
        num_known_tokens = request.num_prompt_tokens + len(request.output_token_ids)
        if num_known_tokens >= self.rules.max_model_len:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"{num_known_tokens} tokens of prompt and answer leave no room in a window of {self.rules.max_model_len}.",
            )
        num_pages = self.max_pages_for(request)
        if num_pages > self.num_pages:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"{request.key} needs up to {num_pages} pages, but decode worker {self.worker_id} has {self.num_pages}.",
            )

    def _demand(self, request: GenerateRequest, num_evictions: int = 0) -> PageDemand:
        return PageDemand(
            num_tokens=request.num_prompt_tokens + len(request.output_token_ids) + 1,
            max_num_tokens=self.rules.max_total_tokens(request),
            num_evictions=num_evictions,
        )
