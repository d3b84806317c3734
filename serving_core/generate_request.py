"""One sequence to be generated, as the router hands it to both workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving_core.errors import BrokenContract
from serving_core.ids import SequenceKey
from serving_core.sampling_params import SamplingParams

MAX_CACHE_SALT_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Everything the two phases need, and all of it: whatever else they keep is a function of this and the output ids.

    Invariants: ``prompt_token_ids`` holds at least one id; ``output_token_ids`` is the router's log of tokens already
    delivered (positions in it are taken, never sampled again) and is shorter than ``sampling.max_tokens``. Keys and values are
    shared only between requests of an equal ``cache_salt``, of at most ``MAX_CACHE_SALT_BYTES`` bytes.
    """

    key: SequenceKey
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    cache_salt: bytes = b""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise BrokenContract("a prompt holds at least one token")
        if len(self.output_token_ids) >= self.sampling.max_tokens:
            raise BrokenContract(f"{len(self.output_token_ids)} tokens of {self.sampling.max_tokens} are already delivered")
        if len(self.cache_salt) > MAX_CACHE_SALT_BYTES:
            raise BrokenContract(f"the cache salt has {len(self.cache_salt)} bytes, above {MAX_CACHE_SALT_BYTES}")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def is_same_sequence(self, other: GenerateRequest) -> bool:
        """Whether both ask for the same, however much of it is delivered already."""
        return replace(self, output_token_ids=()) == replace(other, output_token_ids=())

    @property
    def max_total_tokens(self) -> int:
        """Prompt and answer together at their longest: what has to fit into a decode worker's pool."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens
