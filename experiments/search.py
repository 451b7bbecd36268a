"""A sweep whose next job is chosen by what the last ones found: Hydra's Optuna sweeper over axes of a variant.

The objective of a gate is the number of tokens that agree, for a run that decodes at `floor=TOK_S` tokens a second or
more; one that is slower counts below every one that is not. Sampler, number of trials and the rest are Hydra's words.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.sweep import Told, run_job
from experiments.words import Flags
from harness.compose import load, sweeper
from harness.config import Config
from harness.ledger_read import read_folder
from harness.sweep import Place
from variants.errors import EngineError


@dataclass
class Task:
    """One trial, in this process; returns what the sweeper maximises, and raises where the job failed."""

    module: str
    root: type[Config]
    flags: Flags
    id: str
    floor: float
    told: list[Told] = field(default_factory=list)

    def __call__(self, _: object) -> float:
        from hydra.core.hydra_config import HydraConfig

        words = tuple(HydraConfig.get().overrides.task)
        place = Place(id=self.id, job=len(self.told), of=int(HydraConfig.get().sweeper.n_trials), words=words)
        config = load(words, root=self.root)
        one = replace(self.flags, place=place, job=words, results=[])
        self.told.append(run_job(importlib.import_module(self.module), config, one))
        if self.told[-1].message:
            raise EngineError(self.told[-1].message)
        rows = read_folder(Path(config.results) / "ledger", since=self.id.partition("-")[0]).rows
        (row,) = (row for row in rows if (row["sweep"]["id"], row["sweep"]["job"]) == (self.id, place.job))
        self.flags.rows.append(row)
        return objective(row, self.floor)


def objective(row: dict, floor: float) -> float:
    """Tokens that agree at a speed of `floor` or more; below zero for a slower run, still in order of agreement."""
    matched, total = row["agreement"]["matched"], row["agreement"]["total"]
    fast = not floor or (row["decode_tok_s"]["median"] or 0.0) >= floor
    return float(matched if fast else matched - total - 1)


def search(task: Task, words: Sequence[str], hydra: Sequence[str], *, folder: Path) -> list[Told]:
    """Let the sweeper run its trials; the best is told on stderr. Raises UsageError where it is not installed."""
    from omegaconf import OmegaConf

    chosen: Any = sweeper(["hydra.sweeper.direction=maximize", *hydra], task, folder=folder)
    chosen.sweep(list(words))
    best = OmegaConf.to_container(OmegaConf.load(folder / "optimization_results.yaml"))
    assert isinstance(best, dict)
    params = " ".join(f"{name}={value}" for name, value in (best.get("best_params") or {}).items())
    print(f"neartie: best of {len(task.told)}: {best.get('best_value')} with {params}", file=sys.stderr)
    return task.told
