"""The OpenAPI description: bodies are read by our own parser, so they are described here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from harness.serving.requests import ChatRequest, CompletionRequest
from harness.serving.service import Service

REF = "#/components/schemas/"
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
SAID = {
    400: "A body that is not JSON, a field that is wrong, or more tokens than the context has",
    401: "No API key, or a wrong one",
    404: "No such model",
    408: "The body did not come in time",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "Too many answers wait or run; Retry-After says when to ask again",
    500: "The model gave logits that are not finite",
    503: "The server is stopping, or its engine has died",
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events", "content": {"application/json": {}, "text/event-stream": {}}}
}


def refusals(service: Service, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of these statuses, all of them where none is named; 401 only where there is a key."""
    shape = {"application/json": {"schema": {"$ref": f"{REF}Error"}}}
    there = [s for s in statuses or SAID if s != 401 or service.key]
    return {status: {"description": SAID[status], "content": shape} for status in there}


def _asks(name: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": f"{REF}{name}"}}}}}


ASKS_COMPLETION, ASKS_CHAT = _asks("CompletionRequest"), _asks("ChatRequest")


def described(app: FastAPI) -> dict[str, Any]:
    """The description of all routes, with the schemas of bodies and errors."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, bodies = models_json_schema(
            [(CompletionRequest, "validation"), (ChatRequest, "validation")], ref_template=REF + "{model}"
        )
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        schemas |= bodies["$defs"] | {"Error": ERROR}
        app.openapi_schema = found
    return app.openapi_schema
