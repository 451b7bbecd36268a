"""What all requests share."""

import time
from dataclasses import dataclass, field

from harness.serving.api_error import ApiError
from harness.serving.chat_template import ChatTemplate
from harness.serving.desk import Desk
from harness.serving.vocabulary import Vocabulary
from harness.serving.wire import Inbox, Limits


@dataclass(kw_only=True)
class Service:
    """name: of the model. longest: tokens of a prompt and its answer. stop: ids that end an answer. key: or None."""

    name: str
    desk: Desk
    vocabulary: Vocabulary
    longest: int
    stop: frozenset[int]
    shares_prefixes: bool
    template: ChatTemplate | None = None
    limits: Limits = field(default_factory=Limits)
    key: str | None = None
    inbox: Inbox = field(default_factory=Inbox)
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, named: str | None) -> None:
        if named not in (None, self.name):
            raise ApiError(
                404, f"no model {named[:100]!r} here, only {self.name!r}", param="model", code="model_not_found"
            )
