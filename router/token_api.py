"""/tokenize and /detokenize: what the server's tokenizer makes of a text, and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from router.prompt_encoder import PromptEncoder
from router.request_body import read_checked
from router.token_schemas import DetokenizeBody, TokenizeBody


def make_token_routes(
    prompts: PromptEncoder, *, check_model: Callable[[str | None], None], max_model_len: Callable[[], int]
) -> APIRouter:
    """A text may be longer than ``max_model_len``, which the reply tells beside the count."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_checked(request, TokenizeBody)
        check_model(body.model)
        if body.messages is not None:  # the template writes the special tokens itself
            text = await prompts.render(body.messages, add_generation_prompt=body.add_generation_prompt is not False)
            add_special_tokens = bool(body.add_special_tokens)
            token_ids = await prompts.encode_any(text, param="messages", add_special_tokens=add_special_tokens)
        else:
            add_special_tokens = body.add_special_tokens is not False
            token_ids = await prompts.encode_any(body.prompt or "", param="prompt", add_special_tokens=add_special_tokens)
        return await _json({"tokens": token_ids, "count": len(token_ids), "max_model_len": max_model_len()})

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_checked(request, DetokenizeBody)
        check_model(body.model)
        return await _json({"prompt": await prompts.decode(body.tokens, param="tokens")})

    return routes


async def _json(value: object) -> Response:
    content = await asyncio.to_thread(json.dumps, value, ensure_ascii=False, separators=(",", ":"))
    return Response(content.encode("utf-8"), media_type="application/json")
