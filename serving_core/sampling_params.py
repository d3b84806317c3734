"""How the next token is chosen and when a sequence ends by its tokens. Text rules (stop strings) are the router's alone."""

from __future__ import annotations

from dataclasses import dataclass

from serving_core.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
BANNING_BIAS = -100.0
"""A ``logit_bias`` this low does not make a token unlikely: it rules the token out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one sequence. An invalid one cannot be constructed: ``InvalidRequest`` names the parameter.

    Invariants: ``max_tokens >= 1``; ``0 <= temperature <= 2`` (0 is greedy); ``0 < top_p <= 1``; ``top_k`` is 0 (off) or a
    count ``>= 1``; ``0 <= min_tokens <= max_tokens``; ``seed`` is an unsigned 64-bit number, drawn by the router when the
    client gave none; ``num_logprobs`` is None (none wanted) or how many alternatives are reported beside the chosen token.
    ``stop_token_ids`` end the sequence like the model's own end token; ``ignore_eos`` switches only the latter off.

    ``0 <= min_p <= 1`` keeps the tokens at least that likely compared to the likeliest one (0: all). ``-2 <= presence_penalty,
    frequency_penalty <= 2`` are taken off the logit of a token that the answer holds: once, and as often as it does. A
    ``repetition_penalty`` (1: none) divides a positive logit and multiplies a negative one of each token in prompt or answer.
    ``logit_bias`` holds (token id, bias), ids distinct, ``-100 <= bias <= 100``, added last.
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
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

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
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "between -2 and 2")
        _require(
            MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            self.repetition_penalty,
            f"between {MIN_REPETITION_PENALTY} and {MAX_REPETITION_PENALTY:g}",
        )
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        num_biases = len(self.logit_bias)
        _require(num_biases <= MAX_LOGIT_BIASES, "logit_bias", f"{num_biases} entries", f"at most {MAX_LOGIT_BIASES} entries")
        for token_id, bias in self.logit_bias:
            _require(token_id >= 0, "logit_bias", token_id, "a map from ids of at least 0")
            _require(-100.0 <= bias <= 100.0, "logit_bias", bias, "a map to biases between -100 and 100")
        is_distinct = len({token_id for token_id, _ in self.logit_bias}) == num_biases
        _require(is_distinct, "logit_bias", self.logit_bias, "a map with each id once")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _require(holds: bool, param: str, value: object, right: str) -> None:
    if not holds:  # NaN fails every comparison and so lands here as well
        raise InvalidRequest(f"{param} is {value!r} but must be {right}.", param=param, code="invalid_value")
