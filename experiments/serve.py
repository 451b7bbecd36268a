"""`neartie serve`: a variant behind the OpenAI API, over the library's own paged runner; a row tells what it served."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gate import announced
from experiments.outcome import sigterm_as_interrupt
from experiments.words import Flags
from harness import strict_json
from harness.compose import as_plain
from harness.config import Config, EngineKind
from harness.engines.local import LocalEngine
from harness.ledger import Ledger, Run
from harness.ledger_read import read_row
from harness.memory import peak_memory
from harness.numerics import check_device, policy
from harness.provenance import environment
from variants.errors import DeviceError, EngineError, UsageError
from variants.runner import memory_plan

OWN = {"host", "port", "served", "max_len", "queue", "body_bytes", "grace_s", "key"}
MACHINES = {"host", "port"}  # a record names nobody's machine
UNREAD = ("golden", "seed", "limit", "max_tokens", "require")
WATCHED = (1, 2, 3, 4, 5)  # ids of a short prompt


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """host, port: where to listen; port 0: one that is free. served: the model's name, "" for its folder's.

    max_len: tokens of a prompt and its answer, 0 for the model's own. queue: answers that wait or run at a time.
    body_bytes: of one request. grace_s: that answers get to finish in when the server is stopped. key: the environment
    variable that holds the API key; where it is not set, none is asked for.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served: str = ""
    max_len: int = 0
    queue: int = 256
    body_bytes: int = 2**20
    grace_s: float = 10.0
    key: str = "NEARTIE_API_KEY"

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [f for f in UNREAD if getattr(self, f) != getattr(Config, f)]
        if changed or self.engine.kind is not EngineKind.local:
            raise UsageError(f"serve: {', '.join(changed) or 'engine'} has no effect; leave it out")
        for name, least in (("port", 0), ("max_len", 0), ("queue", 1), ("body_bytes", 1), ("grace_s", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"serve: {name}={getattr(self, name)}, expected {least} or more")


def run(config: Settings, flags: Flags) -> int:
    """Serve until SIGTERM or Ctrl-C; what runs by then has grace_s to finish. Before it serves, both interrupt."""
    about = announced(config, flags, "serve") | {"golden": None, "detail": {"config": _settings(config)}}
    with sigterm_as_interrupt(), Ledger(Path(config.results) / "ledger").begin(about) as row:
        flags.results.append(row)
        check_device(config.device)
        row.add({"environment": environment(device=config.device.torch_name)})
        with policy(config.device, tf32=config.variant.tf32, reduced_sums=config.variant.reduced_sums):
            engine = LocalEngine.from_config(config)
        row.add({"variant_hash": engine.recipe.hash, "recipe": {"declared": engine.recipe.as_dict()}})
        row.add({"model_hash": engine.info.model_sha256})
        with peak_memory(config.device.torch_name) as memory:
            done = _served(config, engine, row)
        row.finish({"peak_memory_bytes": memory.bytes, "detail": {"served": done, "memory_since": memory.since}})
    return 0


def _settings(config: Settings) -> dict[str, object]:
    return {k: v for k, v in as_plain(config).items() if k in OWN - MACHINES}


def _served(config: Settings, engine: LocalEngine, row: Run) -> dict[str, object]:
    """Serve to the end; what was served."""
    try:
        from harness.serving import build, server
    except ImportError as error:
        raise DeviceError(f"serve needs a package ({error}): pip install 'neartie[serve]'") from error
    build.check_variant(engine)
    length = build.max_len(engine, config.max_len)
    offer = build.Offer(
        name=config.served,
        max_len=length,
        queue=config.queue,
        limits=build.Limits(body_bytes=config.body_bytes),
        key=server.key_from(config.key),
    )
    with server.bound(config.host, config.port) as listening:
        observed = engine.observed(WATCHED)
        row.add({"recipe": {"observed": observed.as_dict()}})
        if observed.contradictions:
            raise EngineError(f"what ran is not what was declared: {observed.contradictions[0]}")
        _say(memory_plan(engine.model, max_len=length))

        def ready() -> build.Service:
            service = build.make_service(engine, offer)
            keyed = "API key asked for" if service.key else "no API key"
            _say([f"serving {service.name} as {config.label} on {server.address(listening)} ({keyed})"])
            return service

        service, cut = server.serve_until_signal(ready, listening, grace_s=config.grace_s)
    return {**build.served(service), "cut_short": cut}


def _say(lines: list[str]) -> None:
    """To stderr, so that stdout holds one JSON document under --json; at once, since somebody waits for it."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def report(flags: Flags) -> None:
    """The row, as JSON or as a line."""
    record = read_row(flags.results[0].path)
    print(strict_json.dumps(record).decode() if flags.json else _ending(record["detail"]["served"]))


def _ending(done: dict[str, Any]) -> str:
    """What was served, in one line; times are of answers that were given whole."""
    ended = ", ".join(f"{count} {how}" for how, count in sorted(done["ended"].items()))
    answers = str(sum(done["ended"].values())) + (f" ({ended})" if ended else "")
    times = [
        f"; {name} {', '.join(f'{q} {seconds:.3g} s' for q, seconds in done[field].items())}"
        for name, field in (("first token", "first_token_s"), ("whole answer", "answer_s"))
        if done[field] is not None
    ]
    tokens = done["tokens"].get("completion", 0)
    return f"served: answers {answers}, tokens {tokens}, cut short {done['cut_short']}{''.join(times)}"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
