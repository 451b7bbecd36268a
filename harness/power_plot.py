"""The figure of the power experiment: detection against false alarms by rule, and detection by severity."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.plots import BLUE, GREY, VERMILION
from harness.power_report import RuleRow, Share
from harness.power_rules import RULES
from variants.errors import DeviceError

SEVERITIES = {"heavy": GREY, "medium": VERMILION, "light": BLUE}


def plot_power(rows: Sequence[RuleRow], path: Path) -> Path:
    """Write a PNG: for each rule the share of defects that it catches, by severity, and of benign runs that it flags.

    Bars are 95 % Wilson intervals. Raises DeviceError where the file cannot be written.
    """
    figure = Figure(figsize=(12, 0.42 * len(rows) + 2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.6, 1))
    order = list(reversed(rows))
    for offset, (severity, colour) in zip((0.24, 0.0, -0.24), SEVERITIES.items(), strict=True):
        _points(left, [row.by_severity[severity] for row in order], offset, colour)
        left.plot([], [], "o", color=colour, markersize=4, label=severity)
    _points(right, [row.alarms for row in order], 0.0, VERMILION)
    left.set_yticks(range(len(order)), [("* " if RULES[r.rule].ours else "") + r.title for r in order])
    left.set(xlabel="planted defects caught (%)", xlim=(-3, 103))
    right.set(xlabel="benign runs flagged (%)", xlim=(-3, 103))
    left.legend(loc="lower left", fontsize="small", title="severity")
    for axes in (left, right):
        axes.grid(axis="x", color=GREY, linewidth=0.5)
    figure.suptitle("What each rule catches, and what it flags for nothing (* ours)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DeviceError(f"cannot write {path}: {error.strerror}; name another folder with out=") from error
    return path


def _points(axes: Axes, shares: Sequence[Share], offset: float, colour: str) -> None:
    for y, share in enumerate(shares):
        if share.value is None or share.interval is None:
            continue
        low, high = share.interval
        mid = 100 * share.value
        # An interval of 0 or n hits ends in the share itself; rounding may leave it a hair on the wrong side.
        bars = [[max(0.0, mid - 100 * low)], [max(0.0, 100 * high - mid)]]
        axes.errorbar([mid], [y + offset], xerr=bars, fmt="o", color=colour, capsize=2, markersize=4)
