"""/generate: one prompt in, one answer out, with its token ids."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from router.completion_service import CompletionService
from router.openai_schemas import GenerateBody
from router.request_body import read_checked


def make_generate_routes(service: CompletionService) -> APIRouter:
    """The one route."""
    routes = APIRouter()

    @routes.post("/generate")
    async def generate(request: Request) -> Response:
        return await service.generate(await read_checked(request, GenerateBody))

    return routes
