"""What a decode worker can ever serve, and how many pages that takes. Knows nothing of what is held at the moment."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.token_rules import TokenRules
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import WorkerId
from serving_core.kv_page_layout import KVPageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCheck:
    """The fixed limits of one decode worker; ``num_pages`` is its whole pool."""

    worker_id: WorkerId
    layout: KVPageLayout
    rules: TokenRules
    num_pages: int

    def num_pages_for(self, request: GenerateRequest) -> int:
        """Pages for the sequence at its longest: what is reserved, since nothing is ever taken back from it."""
        return self.layout.num_pages_for(self.rules.max_total_tokens(request))

    def check(self, request: GenerateRequest) -> None:
        """Raises ``Refused``: MALFORMED for a log that would need replay, TOO_LARGE for what can never fit."""
        if len(request.output_token_ids) > 1:
            raise Refused(
                RefusalCode.MALFORMED,
                f"{request.key} brings {len(request.output_token_ids)} answer tokens, but more than one would need replay, "
                "which this version does not have.",
            )
        if request.num_prompt_tokens >= self.rules.max_model_len:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"The prompt of {request.num_prompt_tokens} tokens leaves no room in a window of {self.rules.max_model_len}.",
            )
        num_pages = self.num_pages_for(request)
        if num_pages > self.num_pages:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"{request.key} needs up to {num_pages} pages, but decode worker {self.worker_id} has {self.num_pages}.",
            )
