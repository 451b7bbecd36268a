"""`-m`: every combination of the words' values, in this process with one load, or through a launcher of Hydra's.

Every job's settings are composed before the first one runs, so that a misspelt word costs nothing. A job that fails,
crashes or runs out of memory stops no other one, and the summary, read off the ledger, tells each.
"""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.command import Command
from experiments.outcome import INTERRUPTED, Contained, naming, sigterm_as_interrupt
from experiments.words import Flags, Line
from harness import sweep
from harness.compose import as_yaml, experiment_sweep, load
from harness.config import Config
from harness.ledger_read import Listing, read_folder
from harness.overrides import jobs
from harness.progress import tracked
from harness.sweep import Place
from variants.errors import EngineError, UsageError

OWN = ("resume", "gpus", "floor")


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words of a sweep taken apart. hydra: a launcher's. gpus: job k runs on device k modulo gpus; 0: as said."""

    plain: tuple[str, ...]
    hydra: tuple[str, ...]
    resume: bool
    gpus: int
    floor: float

    @property
    def searched(self) -> bool:
        return any(word.startswith("hydra/sweeper=") for word in self.hydra)


def split(overrides: Sequence[str]) -> Words:
    """Raises UsageError for a value of `resume` or `gpus` that cannot be."""
    own = {key: value for key, _, value in (o.partition("=") for o in overrides) if key in OWN}
    hydra = tuple(o for o in overrides if o.startswith(("hydra/", "hydra.", "+hydra.", "++hydra.")))
    plain = tuple(o for o in overrides if o not in hydra and o.partition("=")[0] not in OWN)
    resume, gpus = own.get("resume", "false"), own.get("gpus", "0")
    if resume not in ("true", "false"):
        raise UsageError(f"resume={resume}: expected true or false")
    if not gpus.isdigit():
        raise UsageError(f"gpus={gpus}: expected the number of devices that jobs are spread over")
    floor = own.get("floor", "0")
    if not floor.replace(".", "", 1).isdigit():
        raise UsageError(f"floor={floor}: expected tokens per second")
    words = Words(plain=plain, hydra=hydra, resume=resume == "true", gpus=int(gpus), floor=float(floor))
    if (words.floor and not words.searched) or (words.searched and (words.resume or words.gpus)):
        raise UsageError("floor= is of hydra/sweeper=optuna, which takes neither resume nor gpus")
    return words


def refuse_outside(overrides: Sequence[str]) -> None:
    """Raise UsageError for a word that only a sweep reads, in a single run."""
    words = split(overrides)
    keys = {o.partition("=")[0] for o in overrides}
    for word in (*words.hydra, *(key for key in OWN if key in keys)):
        raise UsageError(f"{word} is read by sweeps alone; add -m, or leave it out")
    for word in overrides:
        if word.startswith("experiment=") and experiment_sweep(word.partition("=")[2]):
            raise UsageError(f"{word} is a sweep; add -m to run it")


def run(command: Command, line: Line, module: ModuleType, root: type[Config]) -> int:
    """Run a sweep; returns the worst exit code of its jobs, those done before it was resumed too."""
    words = split(line.overrides)
    if words.searched:
        return _searched(command, line, module, root, words)
    work = _expand(words.plain)
    configs = [_pinned(_loaded(job, root), words.gpus, i) for i, job in enumerate(work)]
    if "config" in line.flags.values:
        print("---\n".join(as_yaml(config) for config in configs), end="")
        return 0
    if (words.resume or words.hydra) and not command.rows:
        raise UsageError(
            f"{command.name} keeps no rows, so it cannot be resumed or launched elsewhere; run it as it is"
        )
    swept = Swept(command=command, module=module, flags=line.flags, configs=configs, planned=_planned(command, work))
    if words.resume:
        swept = swept.resumed()
    with sigterm_as_interrupt():
        return swept.run(words.hydra)


def _loaded(job: Sequence[str], root: type[Config]) -> Config:
    with naming(job):
        return load(job, root=root)


def _searched(command: Command, line: Line, module: ModuleType, root: type[Config], words: Words) -> int:
    """A sweep whose jobs a sweeper of Hydra's chooses."""
    from experiments.search import Task, search

    if command.name != "gate":
        raise UsageError(f"a sweeper needs a score, which gate has and {command.name} has not")
    results = load([word for word in words.plain if word.startswith("results=")], root=root).results
    started = sweep.new_id(sweep.identity(command.name, [words.plain]))
    task = Task(module.__name__, root, line.flags, started, words.floor)
    told = search(task, words.plain, words.hydra, folder=Path(results).resolve() / "sweeps" / started)
    module.report(line.flags)
    return max((one.code for one in told), default=0)


def _expand(words: Sequence[str]) -> list[list[str]]:
    """One list of words a job: what the experiment files sweep over, then what the command line does."""
    typed = {word.partition("=")[0] for word in words}
    out: list[list[str]] = []
    for job in jobs(words):
        names = [word.partition("=")[2] for word in job if word.startswith("experiment=")]
        params = [p for name in names for p in experiment_sweep(name) if p.partition("=")[0] not in typed]
        out += jobs([*job, *params])
    return out


def _planned(command: Command, work: Sequence[Sequence[str]]) -> list[Place]:
    named = [[word for word in job if not word.startswith("results=")] for job in work]
    return sweep.places(sweep.new_id(sweep.identity(command.name, named)), named)


def _pinned(config: Config, gpus: int, number: int) -> Config:
    return replace(config, device=replace(config.device, index=number % gpus)) if gpus else config


@dataclass(frozen=True, kw_only=True)
class Swept:
    """A sweep that is ready to run. done: the rows that were there before, by number of job."""

    command: Command
    module: ModuleType
    flags: Flags
    configs: Sequence[Config]
    planned: Sequence[Place]
    done: tuple[int, ...] = ()

    @property
    def root(self) -> Path:
        roots = {config.results for config in self.configs}
        if len(roots) > 1:
            raise UsageError("results= names several folders; a sweep has one ledger")
        return Path(roots.pop()) / "ledger"

    def resumed(self) -> "Swept":
        """The same with the jobs left out that have a result, or are running in another process.

        Raises UsageError where there is nothing to resume, or an input has changed.
        """
        listing = read_folder(self.root)
        of = self.planned[0].id.rpartition("-")[2]
        found = sweep.newest(listing, of)
        if found is None:
            raise UsageError(f"no sweep of these words ({of}) is in {self.root}; leave resume=true out to start it")
        planned = [replace(place, id=found) for place in self.planned]
        rows = sweep.outcomes(listing, planned)
        kept = [i for i, row in enumerate(rows) if row and (row["status"] in sweep.DONE or row["status"] is None)]
        there = [row for row in rows if row and row["status"] in sweep.DONE]
        numbers = {id(row): i for i, row in enumerate(rows)}
        sweep.refuse_changed(there, lambda row: _inputs(self.configs[numbers[id(row)]]))
        print(f"neartie: sweep {found}: {len(kept)} of {len(planned)} jobs are there", file=sys.stderr)
        return replace(self, planned=planned, done=tuple(kept))

    def run(self, hydra: Sequence[str]) -> int:
        todo = [i for i in range(len(self.planned)) if i not in self.done]
        if hydra and todo:
            from experiments.launch import launch

            told = launch(self.module.__name__, hydra, [self._job(i) for i in todo], folder=self.root.parent / "sweeps")
        else:
            told = [*self._in_process(todo)]
        rows = sweep.outcomes(self._listing(), self.planned) if self.command.rows else []
        self.flags.rows.extend(row for row in rows if row and row["status"] is not None)
        if hasattr(self.module, "report"):
            self.module.report(self.flags)
        elif self.flags.json:
            print(json.dumps(self.flags.rows if hydra else [o.document for o in told]))
        self._summarise(told, todo)
        return max([*(o.code for o in told), *(_code(rows[i]) for i in self.done)], default=0)

    def _listing(self) -> Listing:
        """The rows since the sweep began, which its id tells; never the rest of a large ledger."""
        return read_folder(self.root, since=self.planned[0].id.partition("-")[0])

    def _job(self, number: int) -> tuple[Config, Flags]:
        place = self.planned[number]
        return self.configs[number], replace(self.flags, place=place if self.command.rows else None, job=place.words)

    def _in_process(self, todo: Sequence[int]):
        for number in tracked("jobs", todo, len(todo)):
            outcome = run_job(self.module, *self._job(number))
            yield outcome
            if outcome.code == INTERRUPTED:
                return

    def _summarise(self, told: Sequence["Told"], todo: Sequence[int]) -> None:
        """On stderr: each job that failed, each that was never started, and how to go on."""
        lines = [f"error: [{o.job}] {o.message}" for o in told if o.message]
        lines += [f"not started: [{' '.join(self.planned[i].words)}]" for i in todo[len(told) :]]
        failed = sum(bool(o.message) for o in told)
        left = len(todo) - len(told)
        if failed or left:
            print(f"neartie: {failed} of {len(self.planned)} jobs failed, {left} not started", file=sys.stderr)
        for text in lines:
            print(f"neartie: {text}", file=sys.stderr)
        if (failed or left) and self.command.rows:
            print("neartie: the same command with resume=true runs what is missing", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Told:
    """How a job ended, plain enough to come back from another process; `document` is what it printed as JSON."""

    job: str
    code: int
    message: str = ""
    document: Any = None


def run_job(module: ModuleType, config: Config, flags: Flags) -> Told:
    """One job, contained: whatever it raises is told and not raised."""
    words = " ".join(flags.place.words) if flags.place else config.label
    outcome = Contained(words)
    said = io.StringIO()
    quiet = flags.json and not hasattr(module, "report")
    with outcome, naming(flags.job), contextlib.redirect_stdout(said) if quiet else contextlib.nullcontext():
        outcome.code = module.run(config, flags)
    if outcome.message and quiet:
        document: Any = {"error": outcome.as_dict()}
    else:
        document = json.loads(said.getvalue()) if said.getvalue() else None
    return Told(job=words, code=outcome.code, message=outcome.message, document=document)


def _inputs(config: Config) -> dict[str, Any]:
    """The inputs of a job as they are now, as its row records them."""
    from experiments.gate import announced
    from harness.config import READS
    from harness.engines.assets import checkpoint_folder
    from harness.gate import part_of
    from harness.golden import load_golden
    from variants.checkpoint import weights_sha256

    detail = announced(config, Flags())["detail"]
    assert isinstance(detail, dict)
    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    model = "model" in READS[config.engine.kind][1]
    weights = weights_sha256(checkpoint_folder(config.model.path)) if model else None
    return {"golden_hash": golden.hash, "model_hash": weights, "config": detail["config"]}


def _code(row: dict | None) -> int:
    """The exit code of a job by its row alone: a requirement that was missed, or logits that were not finite."""
    if row is None or row["status"] == "invalid":
        return EngineError.exit_code if row else 0
    return 0 if (row["detail"] or {}).get("met", True) else 1
