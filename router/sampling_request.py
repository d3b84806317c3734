"""From a client's options to ``SamplingParams``: defaults, the context window, ids within the vocabulary."""

from __future__ import annotations

from router.openai_schemas import CompletionOptions
from serving_core.errors import InvalidRequest
from serving_core.sampling_params import MAX_SEED, SamplingParams

_MIN_SIGNED_SEED = -(2**63)


def sampling_params(
    options: CompletionOptions,
    *,
    prompt_param: str,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    drawn_seed: int,
) -> SamplingParams:
    """Raises ``InvalidRequest``. ``prompt_param`` is the client's word for its prompt, ``drawn_seed`` the default seed.

    ``top_p`` 0 keeps the likeliest token only, which is greedy. A negative seed, which OpenAI's signed 64 bits allow, means its
    two's complement.
    """
    max_tokens = _max_tokens(
        options, prompt_param=prompt_param, num_prompt_tokens=num_prompt_tokens, max_model_len=max_model_len
    )
    for token_id in options.stop_token_ids or ():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"stop_token_ids holds {token_id}, but must hold ids from 0 to {vocab_size - 1}.",
                param="stop_token_ids",
                code="invalid_value",
            )
    temperature = 1.0 if options.temperature is None else options.temperature
    top_p = 1.0 if options.top_p is None else options.top_p
    if top_p == 0.0:
        temperature, top_p = min(temperature, 0.0), 1.0  # a negative temperature stays one, to be refused
    top_k = 0 if options.top_k in (None, -1) else options.top_k
    assert top_k is not None
    seed = drawn_seed if options.seed is None else options.seed
    if _MIN_SIGNED_SEED <= seed < 0:
        seed += MAX_SEED + 1
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k >= vocab_size else top_k,
        seed=seed,
        min_tokens=options.min_tokens or 0,
        ignore_eos=bool(options.ignore_eos),
        stop_token_ids=options.stop_token_ids or (),
    )


def _max_tokens(options: CompletionOptions, *, prompt_param: str, num_prompt_tokens: int, max_model_len: int) -> int:
    name, requested = options.token_limit
    if requested is not None and requested < 1:
        raise InvalidRequest(f"{name} is {requested} but must be at least 1.", param=name, code="invalid_value")
    num_left = max_model_len - num_prompt_tokens
    if requested is None and num_left >= 1:
        return num_left
    if requested is None or requested > num_left:
        raise InvalidRequest(
            f"The context window is {max_model_len} tokens, but the prompt has {num_prompt_tokens} and "
            f"{1 if requested is None else requested} more were requested; shorten the prompt or lower {name}.",
            param=prompt_param if num_left < 1 else name,
            code="context_length_exceeded",
        )
    return requested
