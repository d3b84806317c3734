"""The router's HTTP application, composed: the OpenAI routes, further routes, errors, keys, request ids."""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.answer import GenerationMetrics
from router.api_key import ApiKeyGate
from router.chat_template import ChatTemplate
from router.completion_service import CompletionService
from router.generate_api import make_generate_routes
from router.generation import Generator
from router.http_errors import http_error
from router.openai_api import make_openai_routes
from router.prompt_encoder import PromptEncoder
from router.request_scope import RequestScope
from router.token_api import make_token_routes
from router.tokenizer import Tokenizer
from serving_core.clock import Clock, MonotonicClock
from serving_core.errors import TwinpoolError

_log = logging.getLogger(__name__)


def create_app(
    *,
    generator: Generator,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    model_name: str,
    metrics: GenerationMetrics,
    extra_routes: Sequence[APIRouter] = (),
    api_key: str | None = None,
    admin_key: str | None = None,
    clock: Clock | None = None,
    unix_time: Callable[[], int] = lambda: int(time.time()),
    make_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
) -> FastAPI:
    """The whole HTTP side. ``extra_routes`` are those of health, metrics and administration.

    ``make_id`` gives letters and digits, unique in this process; ids of completions are made of them.
    """
    if not chat_template.is_available:
        _log.warning("The model has no chat template: /v1/chat/completions will answer 400, /v1/completions works.")
    # No documentation pages: they load scripts from elsewhere, and bodies are checked by ``parse_body``, not by FastAPI.
    app = FastAPI(title="Twinpool", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    prompts = PromptEncoder(tokenizer=tokenizer, chat_template=chat_template, max_model_len=lambda: generator.max_model_len)
    service = CompletionService(
        generator=generator,
        tokenizer=tokenizer,
        prompts=prompts,
        model_name=model_name,
        metrics=metrics,
        clock=clock or MonotonicClock(),
        unix_time=unix_time,
        make_id=make_id,
        draw_seed=draw_seed,
    )
    app.include_router(make_openai_routes(service, model_name=model_name, created=unix_time()))
    app.include_router(make_generate_routes(service))
    app.include_router(
        make_token_routes(prompts, check_model=service.check_model, max_model_len=lambda: generator.max_model_len)
    )
    for routes in extra_routes:
        app.include_router(routes)
    for kind in (TwinpoolError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _respond_with_error)
    app.add_middleware(ApiKeyGate, api_key=api_key, admin_key=admin_key)
    app.add_middleware(RequestScope, make_id=make_id)  # added last, so outermost
    return app


async def _respond_with_error(request: Request, error: Exception) -> Response:
    return http_error(error).response()
