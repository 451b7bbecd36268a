"""The routes. Whatever a client sends is answered in the API's shape; what goes wrong here is a 500 in that shape."""

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.serving import admission
from harness.serving.api_error import ApiError, answer_json
from harness.serving.metrics import Metrics
from harness.serving.openapi import ASKS_CHAT, ASKS_COMPLETION, EVENTS, described, refusals
from harness.serving.requests import ChatRequest, CompletionRequest, parse
from harness.serving.service import Service
from harness.serving.wire import check_key, read_body

CLIENT_GONE = 499  # nobody reads it; a record and the metrics do


def make_app(service: Service) -> FastAPI:
    """The application over a service whose desk is started by the caller."""
    app = FastAPI(title="neartie serve", version="1", docs_url=None, redoc_url=None)
    metrics = Metrics(service.desk)
    app.include_router(_routes(service, metrics))
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _internal)
    app.add_middleware(_Counted, metrics=metrics)
    app.openapi = lambda: described(app)
    return app


def _routes(service: Service, metrics: Metrics) -> APIRouter:
    shown = [Depends(HTTPBearer(auto_error=False))] if service.key else []

    def authorized(request: Request) -> None:
        check_key(request, service.key)

    router = APIRouter(dependencies=[*shown, Depends(authorized)])
    open_ = APIRouter()

    @router.post("/v1/completions", responses=EVENTS | refusals(service), openapi_extra=ASKS_COMPLETION)
    async def completions(request: Request) -> Response:
        """Tokens after one prompt or several, given as text or as token ids."""
        asked = parse(CompletionRequest, await read_body(request, service.limits, service.inbox))
        return await (await admission.complete(service, asked)).answer(request)

    @router.post("/v1/chat/completions", responses=EVENTS | refusals(service), openapi_extra=ASKS_CHAT)
    async def chat_completions(request: Request) -> Response:
        """An answer to a conversation, where the model's tokenizer has a chat template."""
        asked = parse(ChatRequest, await read_body(request, service.limits, service.inbox))
        return await (await admission.chat(service, asked)).answer(request)

    _add_reading(service, metrics, router)

    @open_.get("/health", responses=refusals(service, 503))
    async def health() -> Response:
        """200 while requests are taken."""
        service.desk.check_open()
        return answer_json({"status": "ok"})

    open_.include_router(router)
    return open_


def _add_reading(service: Service, metrics: Metrics, router: APIRouter) -> None:
    @router.get("/v1/models", responses=refusals(service, 401))
    async def models() -> Response:
        """The one model that is served."""
        return answer_json({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{model:path}", responses=refusals(service, 401, 404))
    async def model(model: str) -> Response:
        """That model, by its name."""
        service.check_model(model)
        return answer_json(_model(service))

    @router.get("/metrics", responses=refusals(service, 401) | {200: {"content": {"text/plain": {}}}})
    async def measured() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "neartie",
        "max_model_len": service.longest,
    }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """A path or a method that is not there."""
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return ApiError(error.status_code, said, headers=error.headers).response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _internal(request: Request, error: Exception) -> Response:
    return ApiError(500, f"internal error ({type(error).__name__}); see the server's own output").response()


class _Counted:
    """Counts answers by route and status; a path that is no route is one of `other`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.answers.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)
