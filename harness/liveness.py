"""Whether the process that left a marker is still running, told by its id and the moment it started.

An id alone is not enough: after a crash or a restart another process may bear it.
"""

import os
import subprocess
from pathlib import Path

PROC = Path("/proc")


def started(pid: int) -> str | None:
    """When process `pid` started, as a text to compare for equality; None when there is no such process.

    Linux: the boot's random id and the start in clock ticks since that boot. Elsewhere: what `ps` prints.
    """
    if not (PROC / "self" / "stat").exists():
        return _started_by_ps(pid)
    try:
        stat = (PROC / str(pid) / "stat").read_text()
        boot = (PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets
    state, ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{boot} {ticks}"


def _started_by_ps(pid: int) -> str | None:
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    environment = os.environ | {"LC_ALL": "C"}
    listed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return listed.stdout.strip() or None


def this_process() -> dict[str, object]:
    """The id and start of this process, to be stored and later given to `is_running`."""
    pid = os.getpid()
    return {"pid": pid, "started": started(pid)}


def is_running(process: object) -> bool:
    """True while the very process that `this_process` described runs on this machine, in this boot."""
    if not isinstance(process, dict) or not isinstance(process.get("pid"), int):
        raise ValueError(f"process is {process!r}, expected its pid and start")
    now = started(process["pid"])
    return now is not None and now == process.get("started")
