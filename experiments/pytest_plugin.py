"""The gate in pytest: `pytest --gate variant=f32 --gate-golden=gate`, and the fixtures `gate` and `golden`.

With --gate one test more is collected for each variant, which runs the gate, holds it against --gate-require (the
golden's own bar unless told otherwise) or against the baseline of --gate-baseline, and fails with position and reason.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.gate import GateResult
    from harness.golden_data import Golden


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("neartie", "precision parity")
    group.addoption(
        "--gate", action="append", default=[], metavar="KEY=VALUE", help="a setting of the gated run; repeat"
    )
    group.addoption("--gate-golden", default="gate", metavar="G", help="the golden (gate)")
    group.addoption("--gate-require", default=None, metavar="bar|strict|exact|N", help="what must be met (bar)")
    group.addoption("--gate-baseline", default=None, metavar="DIR", help="hold it against this baseline instead")
    group.addoption("--gate-base", default="main", metavar="BRANCH", help="the branch whose merge base is read (main)")


def words(config: pytest.Config) -> list[str]:
    """The override words of the gated run."""
    from harness.compose import quote

    return [*_option(config, "--gate"), f"golden={quote(_option(config, '--gate-golden'))}"]


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(name)


class GateItem(pytest.Item):
    """One gated run as a test."""

    def __init__(self, *, words: list[str], **more: Any) -> None:
        super().__init__(**more)
        self.words = words

    def runtest(self) -> None:
        folder, require = (_option(self.config, name) for name in ("--gate-baseline", "--gate-require"))
        lines = _against_baseline(self, folder) if folder else _against_bar(self.words, require or "bar")
        if lines:
            raise GateFailure("\n".join(lines))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, ValueError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        return self.path, None, self.name


class GateFailure(ValueError):
    """The gate was missed; each line is one finding."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if given := _option(config, "--gate"):
        items.append(GateItem.from_parent(session, name=f"gate[{' '.join(given)}]", words=words(config)))


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> "Golden":
    """The golden of --gate-golden."""
    from harness.golden import load_golden

    return load_golden(_option(request.config, "--gate-golden"))


@pytest.fixture(scope="session")
def gate(request: pytest.FixtureRequest) -> "Callable[..., GateResult]":
    """A function of override words that runs a gate and returns its result; --gate's words come first."""
    given = words(request.config)
    return lambda *more: _run([*given, *more])


def _run(given: list[str]) -> "GateResult":
    from experiments.gate import gate_without_row
    from harness.compose import load

    return gate_without_row(load(given))


def _against_bar(given: list[str], require: str) -> list[str]:
    result = _run([*given, f"require='{require}'"])
    if result.met:
        return []
    agreement = result.agreement
    lines = [f"{agreement.matched}/{agreement.total}: --gate-require={require} is missed"]
    for d in agreement.first_divergence:
        lines.append(f"prompt {d.prompt} diverges at position {d.position}: {d.candidate_id} for {d.golden_id}")
    return lines


def _against_baseline(item: GateItem, folder: str) -> list[str]:
    from experiments.regress import Settings, run
    from experiments.words import Flags
    from harness.compose import load, quote

    base = _option(item.config, "--gate-base")
    config = load([*item.words, f"baseline={quote(folder)}", f"base={quote(base)}", "repeats=1"], root=Settings)
    flags = Flags(job=tuple(item.words))
    run(config, flags)
    return [f"{finding.kind}: {finding.text}" for _, checked in flags.results for finding in checked.findings]
