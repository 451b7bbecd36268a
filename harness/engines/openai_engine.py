"""Any OpenAI-compatible server as an engine: `/v1/completions`, one request a prompt, some of them at a time.

A request that fails for good ends the run with one line; what was finished by then is in a journal, and the same
command goes on from there. Tokens, logprobs and times are the server's; nothing is filled in where it says nothing.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.config import Config, Dialect, Feed
from harness.engines.answers import answers_of_prompt, generation_of, prompt_scores
from harness.engines.completion import Answer, merged, read_answer
from harness.engines.http_server import Chunk, JsonServer
from harness.engines.openai_requests import Form, models
from harness.engines.prompt_text import PromptText
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.journal import Journal
from harness.progress import progress
from variants.errors import EngineError, InputError, UsageError

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How a server is asked. folder: where unfinished answers are kept. text: its tokenizer, where one was named."""

    served: str | None = None
    dialect: Dialect = Dialect.openai
    top_k: int = 20
    as_text: bool = False
    concurrency: int = 1
    stream: bool = False
    text: PromptText | None = None
    folder: Path = Path("results/unfinished")
    cold: bool = False


class OpenAIEngine:
    """Asks one model of one server."""

    def __init__(self, server: JsonServer, habits: Habits) -> None:
        """Raises UsageError where prompts shall go as text and no tokenizer is named."""
        if habits.as_text and habits.text is None:
            raise UsageError("engine.feed=text needs engine.tokenizer=FILE, to turn the golden's ids into text")
        self._server, self._habits = server, habits
        self._scores: bool | None = None
        self._learned: dict[str, Any] = {}

    @classmethod
    def from_config(cls, config: Config) -> "OpenAIEngine":
        """Raises UsageError, InputError or DeviceError for a tokenizer that cannot be used."""
        choice = config.engine
        assert choice.url is not None
        key = os.environ.get(choice.key) or None
        server = JsonServer(choice.url, api_key=key, timeout_s=choice.timeout_s, retries=choice.retries)
        habits = Habits(
            served=choice.served,
            dialect=choice.dialect,
            top_k=choice.top_k,
            as_text=choice.feed is Feed.text,
            concurrency=choice.concurrency,
            stream=choice.stream,
            text=PromptText(choice.tokenizer) if choice.tokenizer else None,
            folder=Path(config.results) / "unfinished",
        )
        return cls(server, habits)

    @cached_property
    def _models(self) -> dict[str, int | None]:
        try:
            return models(self._server.get("/v1/models"))
        except EngineError:
            if self._habits.served:  # a server need not list its models to one who names one
                return {}
            raise

    @property
    def served(self) -> str:
        """The model's name at the server. Raises UsageError where there are several and none was named."""
        if self._habits.served:
            if self._models and self._habits.served not in self._models:
                raise UsageError(f"engine.served={self._habits.served}: the server has {', '.join(self._models)}")
            return self._habits.served
        if len(self._models) != 1:
            raise UsageError(f"engine.served: the server has {', '.join(self._models) or 'no model'}; name one of them")
        return next(iter(self._models))

    @property
    def info(self) -> EngineInfo:
        """What is known without asking for a token; `probe` finds out the rest."""
        habits, text = self._habits, self._habits.text
        vllm = habits.dialect is Dialect.vllm
        return EngineInfo(
            name="openai",
            version=f"{habits.dialect.name} dialect",
            device="unknown",
            dtype="unknown",
            tokenizer_sha256=text.sha256 if text else None,
            tokenizer_class=text.tokenizer_class if text else None,
            can_score=vllm if self._scores is None else self._scores,
            ids_in=not habits.as_text,
            top_logprobs=self._learned.get("top_logprobs", habits.top_k),
            ids_out=self._learned.get("ids_out", True),
            echoes_ids=self._learned.get("echoes_ids", vllm),
            batch=habits.concurrency,
            max_length=self._models.get(self.served),
            sampling=self._form.sampling,
            limits=tuple(self._learned.get("limits", ())),
        )

    @property
    def _form(self) -> Form:
        h = self._habits
        salt = secrets.token_hex(16) if h.cold else None
        return Form(served=self.served, dialect=h.dialect, top_k=h.top_k, cold=salt)

    def probe(self, prompt: Sequence[int]) -> None:
        """Ask for one token, and for the logprobs of the prompt, to learn what the server offers."""
        limits: list[str] = []
        try:
            answer = self._ask(prompt, 1, False, "probe")
            lists = {len(row) for row in answer.ranked}
            self._learned = {"ids_out": True, "echoes_ids": answer.prompt_ids is not None}
            self._learned["top_logprobs"] = min(lists) if lists else 0
            limits += answer.notes
        except EngineError as error:
            self._learned = {"ids_out": False, "echoes_ids": False, "top_logprobs": 0}
            limits.append(str(error))
        try:
            self._prompt_scores(list(prompt), 1, 2 if self._habits.top_k else 1, "probe")
            self._scores = True
        except EngineError as error:
            self._scores = False
            limits.append(f"no logprobs of a prompt: {error}")
        self._learned["limits"] = limits

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """Greedy tokens as the server says them.

        Raises EngineError where a request fails for good (finished ones are kept), InputError where the server counts
        other prompt tokens than it was given.
        """
        journal = Journal(self._habits.folder, self._question(max_tokens, stop_at_eos))
        answers, resumed = self._all(prompts, max_tokens, stop_at_eos, journal)
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            _check_count(n, prompt, answer, max_tokens)
        made = generation_of(answers, prompts, max_tokens, top_k=self._habits.top_k)
        journal.remove()
        kept = f"{resumed} of {len(prompts)} prompts were answered before, in a run that failed"
        notes = (*made.notes, *((kept,) if resumed else ()))
        if self._habits.concurrency > 1:
            notes = (*notes, f"{self._habits.concurrency} requests at a time: times are those of each under that load")
        return replace(made, notes=notes)

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        """Teacher-forced in one pass over prompt and tokens, where the server gives logprobs of a prompt."""
        if len(prompts) != len(continuations):
            raise UsageError(f"score: got {len(continuations)} continuations for {len(prompts)} prompts")
        rows = []
        for n, (prompt, forced) in enumerate(zip(prompts, continuations, strict=True)):
            rows.append(self._prompt_scores([*prompt, *forced], len(forced), top_k, f"prompt {n}"))
        return prompt_scores(rows, continuations, top_k)

    def arms(self) -> dict[str, "OpenAIEngine"]:
        """Other ways to ask the same, which must not matter: several at a time, past a prefix cache."""
        found: dict[str, OpenAIEngine] = {}
        if self._habits.concurrency == 1:
            found["4 at a time"] = OpenAIEngine(self._server, replace(self._habits, concurrency=4))
        if self._habits.dialect is not Dialect.openai:
            found["cold prefix cache"] = OpenAIEngine(self._server, replace(self._habits, cold=True))
        return found

    def _question(self, max_tokens: int, stop_at_eos: bool) -> dict[str, object]:
        body = replace(self._form, cold=None).generate([], max_tokens, stop_at_eos=stop_at_eos)
        habits = {"cold": self._habits.cold, "text": self._habits.as_text, "many": self._habits.concurrency}
        return {"server": self._server.name, "body": body, **habits}

    def _all(self, prompts: Prompts, max_tokens: int, stop_at_eos: bool, journal: Journal) -> tuple[list[Answer], int]:
        """Every answer in order, and how many of them were in the journal."""
        keys = [f"{n}:{','.join(map(str, p))}" for n, p in enumerate(prompts)]
        found = {k: Answer.of_plain(a) for k in keys if (a := journal.get(k)) is not None}
        missing = [n for n, k in enumerate(keys) if k not in found]

        def one(n: int) -> None:
            answer = self._ask(prompts[n], max_tokens, stop_at_eos, f"prompt {n}")
            journal.put(keys[n], answer.plain())
            found[keys[n]] = answer
            done()

        resumed = len(found)
        with _kept(lambda: len(found), len(prompts)), progress("answers", len(missing)) as done:
            _each(one, missing, self._habits.concurrency)
        return [found[k] for k in keys], resumed

    def _ask(self, prompt: Sequence[int], max_tokens: int, stop_at_eos: bool, where: str) -> Answer:
        h = self._habits
        given = h.text.text(prompt, where) if h.as_text and h.text else list(prompt)
        body = self._form.generate(given, max_tokens, stop_at_eos=stop_at_eos)
        id_of = h.text.id_of if h.text else None
        if not h.stream:
            began = time.monotonic()
            answer = read_answer(self._server.post(COMPLETIONS, body), top_k=h.top_k, id_of=id_of, where=where)
            return replace(answer, seconds=(time.monotonic() - began,) if len(answer.tokens) == 1 else ())
        chunks = self._server.stream(COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}})
        whole, counts = merged([c.content for c in chunks], where)
        answer = read_answer(whole, top_k=h.top_k, id_of=id_of, where=where)
        return replace(answer, seconds=_times(chunks, counts)) if sum(counts) == len(answer.tokens) else answer

    def _prompt_scores(self, ids: list[int], forced: int, top_k: int, where: str) -> list[dict[int, float]]:
        """(id -> logprob) of the last `forced` ids of a prompt."""
        body = self._server.post(COMPLETIONS, self._form.score(ids, top_k))
        text = self._habits.text
        return answers_of_prompt(body, len(ids), forced, text.id_of if text else None, where)


def _times(chunks: Sequence[Chunk], counts: Sequence[int]) -> tuple[float, ...]:
    """When each token came; tokens of one chunk share out the time since the last."""
    times: list[float] = []
    last = 0.0
    for chunk, count in zip(chunks, counts, strict=True):
        step = (chunk.seconds - last) / count if count else 0.0
        times += [last + step * (i + 1) for i in range(count)]
        last = chunk.seconds if count else last
    return tuple(times)


def _check_count(n: int, prompt: Sequence[int], answer: Answer, max_tokens: int) -> None:
    if answer.prompt_count is not None and answer.prompt_count != len(prompt):
        more = answer.prompt_count == len(prompt) + 1
        why = "it adds a BOS of its own" if more else "it cuts or re-tokenizes prompts"
        raise InputError(
            f"input mismatch at prompt {n}: the server ran {answer.prompt_count} prompt tokens, the golden has "
            f"{len(prompt)}: {why}; feed ids, or turn that off"
        )
    if len(answer.tokens) > max_tokens:
        raise EngineError(f"prompt {n}: the server returned {len(answer.tokens)} tokens, {max_tokens} were asked for")
    if not answer.tokens:
        raise EngineError(f"prompt {n}: the server returned no token (finish reason {answer.finish or 'unsaid'})")


def _each(work: Callable[[int], None], items: Sequence[int], workers: int) -> None:
    """Run `work` on each item, so many at a time; the first failure stops what has not begun, and is raised."""
    if workers == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def _kept(done: Callable[[], int], total: int) -> Iterator[None]:
    """An EngineError on the way out says how much is kept."""
    try:
        yield
    except EngineError as error:
        raise EngineError(
            f"{error}; {done()} of {total} prompts are finished and kept: the same command goes on from there"
        ) from error
