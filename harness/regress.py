"""A run held against a baseline: what changed for the worse, or at all, each finding with its place and its reason.

An arm's baseline holds its score, its tokens' first divergences, its verdict, its declared arithmetic, its speed over
several runs and its peak memory. With a STRICT or unmeasured bar the score and every divergence must be equal; with a
DISTRIBUTIONAL one the bar must still be met and no place may have left the golden's set of runs. Speed is held in both
directions, since a run that is suddenly faster skips work or makes the baseline stale. It is held per processor second,
which other work of the machine hardly moves; by the clock too where neither side's runs had to wait for a processor,
since a step that sleeps takes no processor's time. Memory is the least of a side's peaks: the others hold what the
process freed after earlier runs and its allocator keeps.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.ledger_pack import packed
from harness.ledger_view import diff, value_at
from variants.errors import InputError

VERSION = 1
CODE = ("git", "dirty")
# Not what a forward pass depends on: they differ from one start of the same program to the next.
NO_CAUSE = ("transformers", "fla", "cpu_count", "interop_threads")
DISTRIBUTIONAL = "DISTRIBUTIONAL"
QUIET = 0.05  # the most of a run's time that it may have stood in line for a processor for its clock to count


@dataclass(frozen=True, kw_only=True)
class Finding:
    """kind: baseline, input, environment, agreement, divergence, verdict, arithmetic, speed or memory."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Bands:
    """How far tok/s may move either way, and memory upward, as shares of the baseline's."""

    speed: float = 0.2
    memory: float = 0.1


def baseline_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a baseline keeps of the runs of one arm; raises InputError where one of them has no result."""
    for row in rows:
        if row["status"] != "ok":
            raise InputError(f"run {row['run_id']} is {row['status']}: {row['error']}; a baseline is made of good runs")
    last = rows[-1]
    names = ("variant", "golden", "golden_hash", "battery_hash", "model", "model_hash", "variant_hash", "bar")
    declared = {"recipe": last["recipe"] | {"observed": None}, "detail": None, "agreement": {"first_divergence": None}}
    return {
        "baseline": VERSION,
        **{name: last[name] for name in names},
        "agreement": {name: last["agreement"].get(name) for name in ("matched", "total", "exact_prompts", "bar_met")},
        "members": (last["detail"].get("agreement") or {}).get("members"),
        "divergences": _places(last),
        "verdict": last["verdict"]["class"],
        "recipe": packed(declared).get("recipe", {}),
        "decode_tok_s": _speeds(rows, "decode_tok_s.median"),
        "prefill_tok_s": _speeds(rows, "prefill_tok_s.median"),
        "decode_tok_cpu_s": _timed(rows, "decode_tok_cpu_s"),
        "prefill_tok_cpu_s": _timed(rows, "prefill_tok_cpu_s"),
        "waited_share": _timed(rows, "waited_share"),
        "peak_memory_bytes": min((int(n) for row in rows if (n := row["peak_memory_bytes"])), default=None),
        "environment": last["environment"],
        "made": {"time_utc": last["time_utc"], "git": last["environment"]["git"], "runs": len(rows)},
    }


def compare(base: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], bands: Bands) -> list[Finding]:
    """Every way in which the runs of an arm are not its baseline; none for an untouched tree.

    Where the environment is another one, what differs beside it cannot be put down to the code: the finding says that
    old and new code are to be run here first.
    """
    if failed := [row for row in rows if row["status"] != "ok"]:
        return [Finding(kind="agreement", text=f"run {failed[0]['status']}: {failed[0]['error']}")]
    now = baseline_of(rows)
    moved = [Finding(kind="input", text=f"{name} was {base[name]} and is {now[name]}") for name in _inputs(base, now)]
    if moved:
        return moved
    found = [*_environment(base, now), *_agreement(base, now), *_arithmetic(base, rows[-1])]
    for phase in ("decode", "prefill"):
        found += _phase(phase, base, now, bands.speed)
    return found + _memory(base["peak_memory_bytes"], now["peak_memory_bytes"], bands.memory)


def _inputs(base: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in ("golden_hash", "battery_hash", "model_hash") if base[name] != now[name]]


def _places(row: Mapping[str, Any]) -> list[list[int]]:
    """[prompt, position, golden id, candidate id] of each prompt's first divergence."""
    names = ("prompt", "position", "golden_id", "candidate_id")
    return [[entry[name] for name in names] for entry in row["agreement"]["first_divergence"] or ()]


def _speeds(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    return [float(value) for row in rows if isinstance(value := value_at(row, column), (int, float))]


def _timed(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """What `detail.timing` of each row says under a name, the median of a rate; rows that do not say are left out."""
    values = [((row["detail"] or {}).get("timing") or {}).get(name) for row in rows]
    medians = [value["median"] if isinstance(value, Mapping) else value for value in values]
    return [float(value) for value in medians if value is not None]


def _environment(base: Mapping[str, Any], now: Mapping[str, Any]) -> list[Finding]:
    here, there = now["environment"], base["environment"]
    names = [n for n in there if n in here and n not in (*CODE, *NO_CAUSE) and there[n] != here[n]]
    if not names:
        return []
    said = ", ".join(f"{name} was {there[name]} and is {here[name]}" for name in names)
    return [Finding(kind="environment", text=f"{said}: compare old and new code here first (--ab)")]


def _agreement(base: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Finding]:
    was, here = base["agreement"], now["agreement"]
    if was["bar_met"] and not here["bar_met"]:
        yield Finding(kind="agreement", text=f"the {base['bar']} bar was met and is missed")
    if base["bar"] == DISTRIBUTIONAL:
        if (base["members"] or 0) > (now["members"] or 0):
            yield Finding(
                kind="agreement", text=f"{base['members']} tokens were of the golden's runs, {now['members']} are"
            )
    else:
        if was["matched"] != here["matched"]:
            yield Finding(kind="agreement", text=f"{was['matched']}/{was['total']} agreed, {here['matched']} do now")
        yield from _divergences(base["divergences"], now["divergences"])
    if base["verdict"] != now["verdict"]:
        yield Finding(kind="verdict", text=f"verdict was {base['verdict']} and is {now['verdict']}")


def _divergences(was: Sequence[Sequence[int]], now: Sequence[Sequence[int]]) -> Iterator[Finding]:
    before, after = ({place[0]: place for place in places} for places in (was, now))
    for prompt in sorted(before.keys() | after.keys()):
        a, b = before.get(prompt), after.get(prompt)
        if list(a or ()) != list(b or ()):
            yield Finding(kind="divergence", text=f"prompt {prompt} {_told(a)} and now {_told(b)}")


def _told(place: Sequence[int] | None) -> str:
    if place is None:
        return "agrees throughout"
    return f"diverges at position {place[1]} ({place[3]} for {place[2]})"


def _arithmetic(base: Mapping[str, Any], row: Mapping[str, Any]) -> list[Finding]:
    """The declared rules that changed: the reason for what changed in the tokens."""
    if base["variant_hash"] == row["variant_hash"]:
        return []
    from harness.ledger_pack import unpacked

    was = unpacked({"recipe": base["recipe"], "detail": None, "agreement": {}})["recipe"].get("declared") or {}
    fields = diff({"recipe": was}, {"recipe": row["recipe"]["declared"] or {}})
    said = [f"{f['field'].removeprefix('recipe.').removeprefix('sites.')} was {f['a']} and is {f['b']}" for f in fields]
    more = f" (and {len(said) - 3} more)" if len(said) > 3 else ""
    return [Finding(kind="arithmetic", text="; ".join(said[:3]) + more or "the variant's hash is another")]


def _phase(phase: str, base: Mapping[str, Any], now: Mapping[str, Any], band: float) -> list[Finding]:
    """Speed per processor second, and by the clock where that says nothing and both sides had the machine."""
    clock, processor = f"{phase}_tok_s", f"{phase}_tok_cpu_s"
    found = _speed(processor, base.get(processor, ()), now[processor], band)
    if found or not _quiet(base) or not _quiet(now):
        return found
    return _speed(clock, base[clock], now[clock], band)


def _quiet(side: Mapping[str, Any]) -> bool:
    return max(side.get("waited_share", ()), default=0.0) <= QUIET


def _speed(name: str, was: Sequence[float], now: Sequence[float], band: float) -> list[Finding]:
    """A finding where the medians are further apart than the band, and no run of one reaches a run of the other."""
    if not was or not now:
        return []
    ratio = statistics.median(now) / statistics.median(was)
    apart = max(now) < min(was) or min(now) > max(was)
    if 1 - band <= ratio <= 1 / (1 - band) or not apart:
        return []
    way = "slower" if ratio < 1 else "faster"
    spread = f"{min(was):.4g} to {max(was):.4g} over {len(was)}, now {min(now):.4g} to {max(now):.4g} over {len(now)}"
    return [Finding(kind="speed", text=f"{name} {way}: {ratio:.2f} times the baseline's ({spread} runs)")]


def _memory(was: int | None, now: int | None, band: float) -> list[Finding]:
    if not was or not now or now <= was * (1 + band):
        return []
    return [Finding(kind="memory", text=f"peak memory was {was} bytes and is {now}")]
