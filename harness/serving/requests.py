"""What a request may hold, as the OpenAI API names it and vLLM extends it; a field that is none of these is refused.

A setting that this server does not have is taken at the value that changes nothing, and refused at any other.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from harness.serving.api_error import ApiError

MOST_STOPS, LONGEST_STOP, MOST_CHOICES, MOST_TOP = 16, 256, 128, 20
SEED = Field(ge=-(2**63), lt=2**63)
IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TEXT_SCHEMA = {"type": "string", "minLength": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        TEXT_SCHEMA,
        {"type": "array", "items": TEXT_SCHEMA, "minItems": 1},
        IDS_SCHEMA,
        {"type": "array", "items": IDS_SCHEMA, "minItems": 1},
    ]
}
Ids = list[int]
Prompts = list[str] | list[Ids]


def _prompts(value: Any) -> Prompts:
    """One text, texts, one list of ids, or lists of ids: as a list of prompts of one kind."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and value and all(_is_id(v) for v in value):
        value = [value]
    if isinstance(value, list) and value:
        if all(isinstance(v, str) and v for v in value):
            return value
        if all(isinstance(v, list) and v and all(_is_id(i) for i in v) for v in value):
            return value
    raise ValueError("expected a text, a list of texts, a list of token ids, or a list of such lists; none empty")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _stops(value: object) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops):
        raise ValueError(f"expected a text or a list of texts, each of 1 to {LONGEST_STOP} characters")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"{len(stops)} stops, at most {MOST_STOPS}")
    return stops


def _only(*allowed: object) -> Callable[[Any], Any]:
    def check(value: object) -> object:
        if not any(value == a and isinstance(value, bool) is isinstance(a, bool) for a in allowed):
            raise ValueError(f"this server has no such setting; leave it out, or send {json.dumps(allowed[0])}")
        return value

    return check


def _enum(*allowed: object) -> WithJsonSchema:
    return WithJsonSchema({"enum": [*allowed, None]})


Zero = Annotated[Any, AfterValidator(_only(0, None)), _enum(0)]
One = Annotated[Any, AfterValidator(_only(1, None)), _enum(1)]
NoTopK = Annotated[Any, AfterValidator(_only(0, -1, None)), _enum(0, -1)]
NoBias = Annotated[Any, AfterValidator(_only({}, None)), _enum({})]
NoText = Annotated[Any, AfterValidator(_only("", None)), _enum("")]
STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP},
            "maxItems": MOST_STOPS,
        },
        {"type": "null"},
    ]
}
PromptField = Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(PROMPT_SCHEMA)]
StopField = Annotated[Any, BeforeValidator(_stops), WithJsonSchema(STOP_SCHEMA)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Sampled(BaseModel):
    """What both kinds of request share. temperature: 0 is greedy, the lowest id on ties. seed: none draws one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    temperature: float | None = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: StopField = Field(None, validate_default=True)
    seed: Annotated[int, SEED] | None = None
    user: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = False
    presence_penalty: Zero = 0
    frequency_penalty: Zero = 0
    repetition_penalty: One = 1
    logit_bias: NoBias = None
    top_k: NoTopK = 0
    min_p: Zero = 0
    min_tokens: Zero = 0

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def share(self) -> float:
        return 1.0 if self.top_p is None else self.top_p

    @property
    def heat(self) -> float:
        return 1.0 if self.temperature is None else self.temperature


class CompletionRequest(Sampled):
    """`/v1/completions`. prompt_logprobs, add_special_tokens and the token-id fields are vLLM's.

    cache_salt: asks for a cold prefix cache, and is refused where there is a warm one.
    """

    prompt: PromptField
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool | None = False
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    suffix: NoText = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    add_special_tokens: bool = True
    return_tokens_as_token_ids: bool | None = False
    cache_salt: str | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Annotated[str, AfterValidator(_only("text")), WithJsonSchema({"const": "text"})]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart]
    name: str | None = None


class ChatRequest(Sampled):
    """`/v1/chat/completions`. Without a number of tokens an answer may fill the context."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)


M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], body: bytes) -> M:
    """A request out of its body. Raises ApiError that names the first field that is wrong."""
    try:
        content = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8, and numbers too long to be read
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {why[:200]}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError(400, f"the body is {type(content).__name__}, expected a JSON object", code="invalid_json")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(p) for p in first["loc"])[:200]
        raise ApiError(400, f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param) from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
