"""What the API answers where it does not answer: one shape, {"error": {"message", "type", "param", "code"}}."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

INVALID, SERVER = "invalid_request_error", "server_error"
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not answered; `status` is HTTP's."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, SERVER if self.status >= 500 else INVALID)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return answer_json(self.body(), status=self.status, headers=self.headers)

    def raw(self) -> bytes:
        """A whole HTTP answer, where there is no request to answer to."""
        body = dumps(self.body())
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", "Connection: close", *(f"{k}: {v}" for k, v in self.headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body


def dumps(content: object) -> bytes:
    """JSON in ASCII, so that half a surrogate pair in what a client sent cannot break the answer; NaN is refused."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def answer_json(content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(content), status_code=status, headers=headers, media_type="application/json")
