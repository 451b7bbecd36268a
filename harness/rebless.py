"""Stale goldens: was it the code or the environment that moved, and how a golden is replaced without losing the old."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from harness.golden_data import Golden
from harness.golden_io import write_golden
from variants.errors import InputError

# What a golden without an `environment` object may say of its environment at the top level.
STAMP_KEYS = ("torch", "triton", "cuda", "device", "driver", "threads", "engine_version")
# The code under test is not its environment.
CODE_KEYS = frozenset({"git", "dirty"})
FIRST = "environment differs: compare old and new code here first"


def environment_stamp(golden: Golden) -> dict[str, Any]:
    """The environment that the golden says it was made in; {} when it says nothing."""
    stamp = golden.provenance.get("environment")
    if isinstance(stamp, Mapping):
        return dict(stamp)
    return {key: golden.provenance[key] for key in STAMP_KEYS if key in golden.provenance}


def environment_differs(golden: Golden, environment: Mapping[str, Any]) -> list[str]:
    """The advice, then one line for each thing that moved between the golden's stamp and `environment`; [] if none.

    Only what both sides state is compared; a golden without a stamp cannot be cleared and says so.
    """
    stamp = environment_stamp(golden)
    if not stamp:
        return [f"environment unknown: golden {golden.name} carries no stamp; compare old and new code here first"]
    shared = [key for key in stamp if key in environment and key not in CODE_KEYS]
    moved = [f"{key}: golden {stamp[key]}, here {environment[key]}" for key in shared if stamp[key] != environment[key]]
    return [FIRST, *moved] if moved else []


def rebless(
    golden: Golden,
    made: Golden,
    *,
    who: str,
    why: str,
    environment: Mapping[str, Any],
    compared: str | None = None,
) -> Golden:
    """Puts `made` in the golden's place on disk and keeps the old files as NAME-<hash>.json and .npz.

    Where the environment moved, `compared` must say what running old and new code here showed. The record of who,
    why, when and both stamps is appended to provenance["blessed"]. Raises InputError when one of these is missing, when
    the golden is no NAME.json, or when `made` is of other prompts.
    """
    if golden.path is None or golden.path.suffix != ".json":
        raise InputError(f"golden {golden.name}: only a NAME.json on disk can be re-blessed; write it first")
    if not who.strip() or not why.strip():
        raise InputError("re-blessing needs who and why; they are kept in the golden")
    if made.battery_hash != golden.battery_hash:
        raise InputError(f"golden {golden.name}: the new one is of other prompts; capture it under a name of its own")
    moved = environment_differs(golden, environment)
    if moved and not (compared or "").strip():
        raise InputError(f"{'; '.join(moved)}; then say what that showed (--compared=WORDS)")
    blessed = {
        "who": who,
        "why": why,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "replaced": golden.hash,
        "compared": compared,
        "environment_before": environment_stamp(golden),
        "environment_after": dict(environment),
    }
    stamped = isinstance(made.provenance.get("environment"), Mapping)
    kept = {key: value for key, value in made.provenance.items() if stamped or key not in STAMP_KEYS}
    history = [*golden.provenance.get("blessed", []), blessed]
    new = replace(
        made,
        provenance={**kept, "environment": dict(environment), "blessed": history},
    )
    _keep_old(golden)
    return write_golden(new, golden.path, overwrite=True)


def _keep_old(golden: Golden) -> None:
    assert golden.path is not None
    for suffix in (".json", ".npz"):
        old = golden.path.with_suffix(suffix)
        kept = golden.path.with_name(f"{golden.path.stem}-{golden.hash[:12]}{suffix}")
        try:
            shutil.copy2(old, kept)
        except OSError as error:
            raise InputError(f"cannot keep {old} as {kept.name}: {error.strerror}; nothing was replaced") from error
