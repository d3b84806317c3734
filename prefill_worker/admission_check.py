"""What a prefill worker can ever compute, and whether a request, its ticket and what is held already belong together."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.token_rules import TokenRules
from prefill_worker.prefill_sequence import PrefillSequence
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import WorkerId
from serving_core.kv_page_layout import KVPageLayout
from serving_core.transfer_ticket import TransferTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCheck:
    """The fixed limits of one prefill worker; ``num_pages`` is its whole pool. Every check raises ``Refused``."""

    worker_id: WorkerId
    layout: KVPageLayout
    rules: TokenRules
    num_pages: int

    def check_ticket(self, request: GenerateRequest, ticket: TransferTicket) -> None:
        """MALFORMED for a ticket of something else."""
        if ticket.key != request.key or ticket.num_prompt_tokens != request.num_prompt_tokens:
            raise Refused(
                RefusalCode.MALFORMED,
                f"The ticket is for {ticket.key} with {ticket.num_prompt_tokens} prompt tokens, the request is {request.key} "
                f"with {request.num_prompt_tokens}.",
            )

    def check_request(self, request: GenerateRequest) -> None:
        """MALFORMED for ids that are no tokens, TOO_LARGE for a prompt that can never fit."""
        self.rules.check_token_ids(request)
        if request.num_prompt_tokens >= self.rules.max_model_len:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"The prompt of {request.num_prompt_tokens} tokens leaves no room in a window of {self.rules.max_model_len}.",
            )
        num_pages = self.layout.num_pages_for(request.num_prompt_tokens)
        if num_pages > self.num_pages:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"The prompt of {request.key} needs {num_pages} pages, but prefill worker {self.worker_id} has "
                f"{self.num_pages}.",
            )

    def check_same_sequence(self, request: GenerateRequest, held: PrefillSequence) -> None:
        """MALFORMED for a retry that is another request, TOKEN_MISMATCH for one whose log denies the known token 0."""
        if not request.is_same_sequence(held.request):
            raise Refused(
                RefusalCode.MALFORMED,
                f"{request.key} came again with another prompt, sampling or cache salt than in attempt {held.attempt}.",
            )
        log = request.output_token_ids
        if log and held.first_token is not None and log[0] != held.first_token.token_id:
            raise Refused(
                RefusalCode.TOKEN_MISMATCH,
                f"{request.key} came again with token {log[0]} first, but {held.first_token.token_id} was taken before.",
            )
