"""How the next token is chosen and when a sequence ends by its tokens. Text rules (stop strings) are the router's alone."""

from __future__ import annotations

from dataclasses import dataclass

from serving_core.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one sequence. An invalid one cannot be constructed: ``InvalidRequest`` names the parameter.

    Invariants: ``max_tokens >= 1``; ``0 <= temperature <= 2`` (0 is greedy); ``0 < top_p <= 1``; ``top_k`` is 0 (off) or a
    count ``>= 1``; ``0 <= min_tokens <= max_tokens``; ``seed`` is an unsigned 64-bit number, drawn by the router when the
    client gave none; ``num_logprobs`` is None (none wanted) or how many alternatives are reported beside the chosen token.
    ``stop_token_ids`` end the sequence like the model's own end token; ``ignore_eos`` switches only the latter off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0.0 <= self.temperature <= 2.0, "temperature", self.temperature, "between 0 and 2")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or at least 1")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"between 0 and {MAX_SEED}")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "between 0 and max_tokens")
        _require(all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "ids of at least 0")
        if self.num_logprobs is not None:
            _require(0 <= self.num_logprobs <= MAX_LOGPROBS, "logprobs", self.num_logprobs, f"between 0 and {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _require(holds: bool, param: str, value: object, right: str) -> None:
    if not holds:  # NaN fails every comparison and so lands here as well
        raise InvalidRequest(f"{param} is {value!r} but must be {right}.", param=param, code="invalid_value")
