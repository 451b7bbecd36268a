"""Rates of the paged runner, and of the server in front of it, whose clients are a process of their own."""

import json
import subprocess
import sys
from functools import partial

from harness.device_timing import Timed
from harness.engines.local import LocalEngine
from harness.numerics import policy
from harness.rates import PROMPT, REPEATS, WARM_STEPS, Asked, Rates, stepped, time_decodes, time_prefills
from variants.errors import EngineError, UsageError
from variants.request import Request
from variants.runner import Runner

CLIENT_S = 300


def measured(engine: LocalEngine, asked: Asked, rates: Rates) -> None:
    """The runner, step by step, then the server: wall clock of what the host waits for. Raises UsageError where the
    variant runs fewer sequences together than are asked for.
    """
    run = engine.recipe.execution
    if run.batch < max(asked.batches):
        raise UsageError(f"batches={list(asked.batches)}: execution.batch={run.batch} runs fewer together")
    with policy(engine.device, tf32=engine.recipe.tf32, reduced_sums=engine.recipe.reduced_sums):
        runner = Runner(engine.model, max_len=asked.longest)
        time_decodes("runner", asked, _vocab(engine), partial(_run, runner), rates)
        time_prefills("runner", asked, _vocab(engine), partial(_run, runner), rates)
        del runner
    rates.attempt("server", lambda: _served(engine, asked, rates))


def _vocab(engine: LocalEngine) -> int:
    return engine.casts.checkpoint.config.vocab_size


def _run(runner: Runner, prompts: list[list[int]], tokens: int) -> list[float]:
    for ids in prompts:
        runner.add(Request(ids=tuple(ids), max_tokens=tokens))

    def step() -> bool:
        runner.step()
        return runner.busy

    return stepped(step)


def _served(engine: LocalEngine, asked: Asked, rates: Rates) -> None:
    """A step's time is what so many tokens more take: whole answers of `steps + 1` tokens less those of one."""
    from harness.serving import build, server

    service = build.make_service(engine, build.Offer(max_len=asked.longest))
    with server.Beside(service) as beside:
        for count in asked.batches:
            prompts = asked.prompts(count, PROMPT, _vocab(engine))
            _answers(beside.url, prompts, WARM_STEPS)
            more = [_answers(beside.url, prompts, asked.steps + 1) for _ in range(REPEATS)]
            one = [_answers(beside.url, prompts, 1) for _ in range(REPEATS)]
            ms = [1e3 * (a - b) / asked.steps for a, b in zip(more, one, strict=True)]
            rates.add("server", "decode", (count, PROMPT), Timed.of(ms))


def _answers(url: str, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until all prompts, sent together, are answered."""
    asked = json.dumps({"url": url, "prompts": prompts, "tokens": tokens})
    command = [sys.executable, "-m", "harness.rates_clients"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=CLIENT_S, check=False)
    if done.returncode:
        raise EngineError(f"the server's clients failed: {(done.stderr.strip() or 'no word').splitlines()[-1]}")
    return float(done.stdout)
