"""From a client's options to ``SamplingParams``: defaults, the context window, ids within the vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from router.openai_schemas import SamplingOptions
from serving_core.errors import InvalidRequest
from serving_core.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams

_MIN_SIGNED_SEED = -(2**63)


def sampling_params(
    options: SamplingOptions,
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
    logit_bias = options.logit_bias or {}
    _check_token_ids("stop_token_ids", options.stop_token_ids or (), vocab_size)
    _check_token_ids("logit_bias", logit_bias, vocab_size)
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
        num_logprobs=_num_logprobs(options),
        min_p=options.min_p or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        repetition_penalty=1.0 if options.repetition_penalty is None else options.repetition_penalty,
        logit_bias=tuple(logit_bias.items()),
    )


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name} holds the token id {token_id}, but must hold ids from 0 to {vocab_size - 1}.",
                param=name,
                code="invalid_value",
            )


def _num_logprobs(options: SamplingOptions) -> int | None:
    name, count = options.wanted_logprobs
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} is {count} but must be between 0 and {MAX_LOGPROBS}.", param=name, code="invalid_value")
    return count


def _max_tokens(options: SamplingOptions, *, prompt_param: str, num_prompt_tokens: int, max_model_len: int) -> int:
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


@contextlib.contextmanager
def clients_words(options: SamplingOptions, prompt_param: str) -> Iterator[None]:
    """Gives an ``InvalidRequest`` from inside the client's own names for its prompt and its limit."""
    limit_param, _ = options.token_limit
    names = {"prompt": prompt_param, "max_tokens": limit_param}
    try:
        yield
    except InvalidRequest as error:
        message = str(error).replace(" max_tokens ", f" {limit_param} ")
        raise InvalidRequest(message, param=names.get(error.param or "", error.param), code=error.code) from error
