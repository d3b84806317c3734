"""What a commit has to match before decode takes a sequence over. Changes nothing."""

from __future__ import annotations

from decode_worker.decode_sequence import DecodeSequence, Reservation
from serving_core.errors import RefusalCode, Refused
from serving_core.transfer_ticket import HandoffCommit


def check_commit(commit: HandoffCommit, sequence: DecodeSequence, reservation: Reservation) -> None:
    """Raises ``Refused`` unless the commit names this sequence, its plan's bytes, all of which arrived, and a token that
    nothing contradicts. For pages lent to this worker's own prefill phase no bytes are sent, and whoever claims some did not
    fill them."""
    if commit.key != sequence.key:
        raise Refused(
            RefusalCode.MALFORMED,
            f"Reservation {commit.reservation_id} belongs to {sequence.key}, but the commit names {commit.key}.",
        )
    if commit.num_cached_tokens >= sequence.request.num_prompt_tokens:
        raise Refused(
            RefusalCode.MALFORMED,
            f"The commit of {commit.key} claims {commit.num_cached_tokens} cached tokens, but the prompt has "
            f"{sequence.request.num_prompt_tokens}, of which the last is always computed.",
        )
    if not reservation.is_lent:
        _check_bytes(commit, reservation)
    elif commit.num_bytes_sent:
        raise Refused(
            RefusalCode.MALFORMED,
            f"The commit of {commit.key} claims {commit.num_bytes_sent} bytes for pages lent to this worker's prefill phase.",
        )
    # Taken by an earlier copy of this commit, or by the router before this attempt began.
    taken_before = sequence.output_token_ids or sequence.request.output_token_ids
    if taken_before:
        require_token(commit, taken_before[0])


def require_token(commit: HandoffCommit, token_id: int) -> None:
    """Raises ``Refused`` (TOKEN_MISMATCH) unless the commit names ``token_id``."""
    if commit.token_id != token_id:
        raise Refused(
            RefusalCode.TOKEN_MISMATCH,
            f"The commit of {commit.key} attempt {commit.attempt} names token {commit.token_id}, but {token_id} stands.",
        )


def _check_bytes(commit: HandoffCommit, reservation: Reservation) -> None:
    ledger = reservation.ledger
    if commit.num_bytes_sent != ledger.num_bytes_expected:
        raise Refused(
            RefusalCode.MALFORMED,
            f"The commit of {commit.key} claims {commit.num_bytes_sent} bytes, but {ledger.num_bytes_expected} are expected.",
        )
    if not ledger.is_complete:
        raise Refused(
            RefusalCode.INCOMPLETE,
            f"{ledger.num_bytes_received} of {ledger.num_bytes_expected} bytes of {commit.key} have arrived.",
        )
