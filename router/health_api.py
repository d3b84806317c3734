"""``/health``, ``/ready`` and ``/metrics``: what probes and scrapers ask, open to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from router.metrics import RouterMetrics


def make_health_routes(*, metrics: RouterMetrics, what_is_missing: Callable[[], Sequence[str]]) -> APIRouter:
    """The three routes. ``what_is_missing`` names what keeps requests from being served, such as a phase without a worker."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @routes.get("/ready")
    async def ready() -> JSONResponse:
        missing = list(what_is_missing())
        return JSONResponse({"missing": missing}, status_code=503 if missing else 200)

    @routes.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return routes
