"""The routes of the OpenAI-style API. Each reads a body and hands it on."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from router.completion_service import CompletionService
from router.openai_schemas import ChatCompletionBody, CompletionBody
from router.request_body import read_checked


def make_openai_routes(service: CompletionService, *, model_name: str, created: int) -> APIRouter:
    """``created`` is the Unix time that /v1/models tells; it never changes while the server runs."""
    routes = APIRouter(prefix="/v1")
    model = {"id": model_name, "object": "model", "created": created, "owned_by": "twinpool"}

    @routes.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.chat(await read_checked(request, ChatCompletionBody))

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        return await service.complete(await read_checked(request, CompletionBody))

    @routes.get("/models")
    async def list_models() -> dict[str, object]:
        return {"object": "list", "data": [model]}

    @routes.get("/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, object]:
        service.check_model(name)
        return model

    return routes
