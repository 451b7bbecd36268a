"""Override words: parsed by Hydra's grammar, checked against the schema, and refused in one line that helps."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from harness.nearest import did_you_mean
from variants.errors import UsageError

Groups = Mapping[str, Sequence[str]]


def parse(words: Sequence[str]) -> list[Override]:
    """Each word as Hydra reads it; raises UsageError for a word outside the grammar, saying how to quote it."""
    out: list[Override] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not key or (not equals and not key.startswith("~")):
            raise UsageError(f"{word!r} is not an override: expected KEY=VALUE, as in variant=f32")
        try:
            out += OverridesParser.create().parse_overrides([word])
        except OverrideParseException as error:
            raise UsageError(f"cannot read {word!r}: quote the value, as in \"{key}='{value}'\"") from error
    return out


def jobs(words: Sequence[str]) -> list[list[str]]:
    """The product of every sweep in the words, the first word slowest: one list of plain words for each job."""
    choices = [list(_choices(o)) for o in parse(words)]
    return [list(job) for job in itertools.product(*choices)]


def check_words(overrides: Sequence[Override], defaults: DictConfig, groups: Groups) -> None:
    """Refuse a sweep, an unknown key or an unknown choice, with the nearest name that exists."""
    keys = sorted({*groups, *_keys(defaults)})
    for o in overrides:
        key, word = str(o.key_or_group), str(o.input_line)
        if o.is_delete():
            raise UsageError(f"{word}: a setting cannot be removed; give it another value")
        if o.is_sweep_override():
            value = word.partition("=")[2]
            raise UsageError(f"{word} names several values: add -m to run each, or quote it: \"{key}='{value}'\"")
        if key in groups:
            _check_choice(key, str(o.value()), groups[key])
        elif key.split(".")[0] == "hydra" or "/" in key or "@" in key:
            raise UsageError(f"{word}: runs have no Hydra settings here; results=DIR says where the ledger is")
        elif key not in keys and not key.startswith("variant.override."):
            raise UsageError(f"no setting {key!r}{did_you_mean(key, keys)}; --config after the command lists them")


def one_line(error: BaseException) -> str:
    """What Hydra or OmegaConf said, in one line: its own words and, where they only wrap another error, that one's."""
    message = str(error)
    if message.startswith("Error merging override ") and error.__cause__ is not None:
        word = message.splitlines()[0].removeprefix("Error merging override ")
        message = f"{word}: {str(error.__cause__).splitlines()[0]}"
        if "is not a ListConfig" in message:
            key, _, value = word.partition("=")
            message = f"{word}: expected a list in brackets, {key}=[{value}]"
    lines = [line.strip().rstrip(".") for line in message.splitlines()]
    keep = [line for line in lines if line and not line.startswith(("reference_type", "object_type", "See https"))]
    return "; ".join(keep[:3])


def _choices(o: Override) -> Iterator[str]:
    if not o.is_sweep_override():
        return iter([str(o.input_line)])
    return (f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator())


def _check_choice(group: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        near = did_you_mean(value, choices)
        raise UsageError(f"no {group} {value!r}{near or '; there are ' + ', '.join(choices)}")


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in node:
        key = f"{prefix}{name}"
        yield key
        child = None if OmegaConf.is_missing(node, name) else node._get_node(name)
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{key}.")
