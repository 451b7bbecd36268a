"""Jobs of a sweep through a launcher of Hydra's: joblib, submitit (local or SLURM), Ray. Nothing of it is ours.

The launcher is chosen and set in Hydra's own words (`hydra/launcher=joblib hydra.launcher.n_jobs=2`). One that starts
all jobs at once, as submitit's local one does, is given them in parts by `hydra.sweeper.max_batch_size`. What jobs
print goes where the launcher sends it; what they found is in their rows.
"""

import importlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

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
    """Launch every job; a launcher that loses a process tells of all jobs of that part, and those after it.

    Each launch has a folder of its own under `folder`. Raises UsageError for a launcher that is not installed or words
    that it does not take.
    """
    task = Task(module, jobs)
    sweep = f"{flags.place.id}-{secrets.token_hex(4)}" if (flags := jobs[0][1]).place else secrets.token_hex(8)
    started = launcher(words, task, folder=folder.resolve() / sweep)
    size = OmegaConf.select(started.config, "hydra.sweeper.max_batch_size") or len(jobs)  # pyright: ignore
    returned: list[Any] = []
    try:
        for first in range(0, len(jobs), size):
            returned += started.launch([[] for _ in jobs[first : first + size]], initial_job_idx=first)
    except Exception as error:  # noqa: BLE001  # launchers raise what their schedulers do when a process is lost
        reason = f"the launcher lost a process ({one_line(error)}); its row says how far it came"
        lost = jobs[len(returned) :]
        return [
            *(_told(one, flags) for one, (_, flags) in zip(returned, jobs, strict=False)),
            *(Told(job=_words(flags), code=DeviceError.exit_code, message=reason) for _, flags in lost),
        ]
    return [_told(one, flags) for one, (_, flags) in zip(returned, jobs, strict=True)]


def _told(returned: Any, flags: Flags) -> Told:
    if isinstance(value := returned._return_value, Told):
        return value
    return Told(job=_words(flags), code=DeviceError.exit_code, message=f"did not come back: {one_line(value)}")


def _words(flags: Flags) -> str:
    return " ".join(flags.place.words) if flags.place else ""
