"""Jobs of a sweep through a launcher of Hydra's: joblib, submitit (local or SLURM), Ray. Nothing of it is ours.

The launcher is chosen and set in Hydra's own words (`hydra/launcher=joblib hydra.launcher.n_jobs=2`). What jobs print
goes where the launcher sends it; what they found is in their rows.
"""

import importlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.sweep import Told, run_job
from experiments.words import Flags
from harness.compose import launcher
from harness.config import Config
from harness.failure import one_line
from variants.errors import DeviceError


@dataclass(frozen=True)
class Task:
    """What a launcher runs, by number of job, in another process; it holds nothing that needs one to be set up."""

    module: str
    jobs: Sequence[tuple[Config, Flags]]

    def __call__(self, _: object) -> Told:
        from hydra.core.hydra_config import HydraConfig

        return run_job(importlib.import_module(self.module), *self.jobs[int(HydraConfig.get().job.num)])


def launch(module: str, words: Sequence[str], jobs: Sequence[tuple[Config, Flags]], *, folder: Path) -> list[Told]:
    """Launch every job; a launcher that loses a process tells of all jobs that did not come back.

    Each launch has a folder of its own under `folder`. Raises UsageError for a launcher that is not installed or words
    that it does not take.
    """
    task = Task(module, jobs)
    sweep = f"{flags.place.id}-{secrets.token_hex(4)}" if (flags := jobs[0][1]).place else secrets.token_hex(8)
    started = launcher(words, task, folder=folder.resolve() / sweep)
    try:
        returned = started.launch([[] for _ in jobs], initial_job_idx=0)
    except Exception as error:  # noqa: BLE001  # launchers raise what their schedulers do when a process is lost
        reason = f"the launcher lost a process ({one_line(error)}); its row says how far it came"
        return [Told(job=_words(flags), code=DeviceError.exit_code, message=reason) for _, flags in jobs]
    return [_told(one, flags) for one, (_, flags) in zip(returned, jobs, strict=True)]


def _told(returned: Any, flags: Flags) -> Told:
    if isinstance(value := returned._return_value, Told):
        return value
    return Told(job=_words(flags), code=DeviceError.exit_code, message=f"did not come back: {one_line(value)}")


def _words(flags: Flags) -> str:
    return " ".join(flags.place.words) if flags.place else ""
