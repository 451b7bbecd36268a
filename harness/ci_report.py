"""What a build server shows of a regression check: JUnit XML, and Markdown for a step's summary."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from harness.regress import Finding


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One arm: what it is called, how it scored, how fast it was, how long the check took, and what was found."""

    arm: str
    agree: str
    tok_s: str
    seconds: float
    findings: tuple[Finding, ...]


def junit(checked: Sequence[Checked]) -> bytes:
    """A JUnit document: one test case an arm, failed where anything was found."""
    failed = sum(bool(one.findings) for one in checked)
    suite = ElementTree.Element("testsuite", name="neartie regress", tests=str(len(checked)), failures=str(failed))
    suite.set("errors", "0")
    suite.set("time", f"{sum(one.seconds for one in checked):.3f}")
    for one in checked:
        case = ElementTree.SubElement(suite, "testcase", classname="neartie.regress", name=one.arm)
        case.set("time", f"{one.seconds:.3f}")
        if one.findings:
            first = one.findings[0]
            failure = ElementTree.SubElement(case, "failure", type=first.kind, message=first.text)
            failure.text = "\n".join(f"{finding.kind}: {finding.text}" for finding in one.findings)
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)


def markdown(checked: Sequence[Checked]) -> str:
    """A table of the arms, then each finding; pipes and newlines in a text are escaped."""
    lines = ["### neartie regress", "", "| arm | agree | decode tok/s | findings |", "|---|---|---|---|"]
    for one in checked:
        kinds = ", ".join(dict.fromkeys(finding.kind for finding in one.findings)) or "none"
        lines.append(f"| {_cell(one.arm)} | {one.agree} | {one.tok_s} | {kinds} |")
    found = [(one.arm, finding) for one in checked for finding in one.findings]
    lines += ["", *(f"- **{finding.kind}** {_cell(arm)}: {_cell(finding.text)}" for arm, finding in found)]
    return "\n".join(lines) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
