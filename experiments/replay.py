"""`neartie replay`: one captured operation again, alone; the bits of its own rule, and its error against float64."""

import sys

from experiments.words import Flags
from harness import strict_json
from harness.config import Config
from harness.numerics import policy
from harness.op_capture import OpCapture
from harness.op_error import LIMIT, OpError
from harness.op_file import read_capture
from harness.op_replay import OpReplay, replay_op

FAULT = 1


def run(config: Config, flags: Flags) -> int:
    """Replay one file; exit code 1 with --fail where what was captured is not what its rule says."""
    (path,) = flags.words
    capture = read_capture(path)
    with policy(config.device, tf32=capture.recipe.tf32, reduced_sums=capture.recipe.reduced_sums):
        found = replay_op(capture)
    if flags.json:
        print(strict_json.dumps(strict_json.encode(_document(capture, found))[0]).decode(), end="")
    else:
        print(_text(capture, found))
    return FAULT if found.fault and "fail" in flags.values else 0


def _document(capture: OpCapture, found: OpReplay) -> dict[str, object]:
    return {
        "where": capture.where,
        "rule": capture.recipe.rule(*capture.where.place, capture.where.phase).as_dict(),
        "model_hash": capture.model_sha256,
        "inputs": _inputs(capture),
        "bit_equal": found.bit_equal,
        "fault": found.fault,
        "error": {name: _error(e) for name, e in (("captured", found.captured), ("own", found.own)) if e},
        "worst": found.worst,
        "changed": found.changed,
        "hints": list(found.hints),
    }


def _error(e: OpError) -> dict[str, object]:
    counts = {"non_finite": e.non_finite, "over": e.over, "positions": e.positions}
    return {"relative": e.relative, "ratio": e.worst, "at": list(e.worst_at), "scale": e.scale, **counts}


def _inputs(capture: OpCapture) -> list[str]:
    return [*capture.inputs.values, *capture.inputs.carried, *capture.inputs.parameters]


def _text(capture: OpCapture, found: OpReplay) -> str:
    w = capture.where
    rule = capture.recipe.rule(*w.place, w.phase)
    span = ", ".join(f"{s}..{s + n - 1}" for s, n in zip(w.starts, w.lengths, strict=True))
    lines = [
        f"{w.site}, layer {w.layer}, {w.phase}, positions {span}: {rule.algorithm} by {rule.impl}, sums in "
        f"{rule.accum.name}, stores {rule.output.name if rule.output else 'as computed'}",
        f"reads {', '.join(_inputs(capture))}",
        "its own rule gives the captured bits"
        if found.bit_equal
        else "its own rule gives OTHER BITS than were captured",
    ]
    if found.captured is None:
        return "\n".join([*lines, f"float64 chooses another set of experts for {found.changed} tokens"])
    e, worst = found.captured, found.worst
    assert worst is not None
    verdict = "beyond rounding" if e.in_excess else "within rounding"
    call = f" of call {worst.call}" if w.calls > 1 else ""
    lines += [
        f"against float64: {e.relative:.3g} of the values' size; {e.worst:.3g} of its bound, limit {LIMIT:g}",
        f"so {verdict}; largest error at {list(worst.index)}{call}: {worst.captured:.9g} for {worst.exact:.9g}, "
        f"{worst.ulps:.3g} ulp of {found.format.name}",
    ]
    if not found.bit_equal and found.own is not None:
        lines.append(
            f"the replay itself: {found.own.relative:.3g} of the values' size, {found.own.worst:.3g} of the bound"
        )
    return "\n".join([*lines, *found.hints])


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["replay", *sys.argv[1:]]))
