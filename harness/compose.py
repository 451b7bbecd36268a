"""From the words of a command line to a Config: Hydra composes, the errors are ours, and OmegaConf stays in here."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config import READS, Config, EngineKind
from harness.overrides import check_words, one_line, parse
from variants.axes import SiteOverride, Variant
from variants.errors import UsageError

CONF = Path(__file__).resolve().parents[1] / "conf"

PLUGINS = ("joblib", "submitit", "ray", "optuna")  # the extras of this project that bring a plugin of Hydra's

C = TypeVar("C", bound=Config)
P = TypeVar("P", Launcher, Sweeper)


def load(words: Sequence[str] = (), *, root: type[C] = Config) -> C:
    """One run's Config from Hydra override words; raises UsageError, in one line, for any word that cannot be.

    root: the command's own Config where it has settings of its own.
    """
    overrides = _model_folder(parse(words))
    defaults = schema(root)
    check_words(overrides, defaults, groups())
    ConfigStore.instance().store(name="schema", node=defaults)
    lines = [str(o.input_line) for o in overrides]
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=lines, return_hydra_config=True)
        choice = str(composed.hydra.runtime.choices["variant"])
        config = _to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(one_line(error)) from error
    _refuse_unread(config, overrides)
    return dataclasses.replace(config, label=_label(config, choice, overrides))


def named_variant(name: str) -> Variant:
    """The variant of conf/variant/NAME.yaml, with what a row's label says was changed of it: NAME+impl.norms=torch."""
    base, *changes = name.split("+")
    return load([f"variant={base}", *(f"variant.{change}" for change in changes)]).variant


def experiment_sweep(name: str) -> list[str]:
    """The words that conf/experiment/NAME.yaml sweeps over, from its `hydra.sweeper.params`; none for another file."""
    path = CONF / "experiment" / f"{name}.yaml"
    loaded = OmegaConf.load(path) if path.is_file() else None
    params = OmegaConf.select(loaded, "hydra.sweeper.params") if isinstance(loaded, DictConfig) else None
    return [f"{key}={value}" for key, value in params.items()] if params else []


def launcher(words: Sequence[str], task: Callable[[Any], Any], *, folder: Path) -> Launcher:
    """The launcher that Hydra's own words name, ready to run `task` for each job; its files go under `folder`.

    Raises UsageError where its plugin is not installed, or it does not take one of the words.
    """
    return _plugin(
        words,
        folder,
        lambda context, composed: Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task, config=composed
        ),
    )


def sweeper(words: Sequence[str], task: Callable[[Any], Any], *, folder: Path) -> Sweeper:
    """As `launcher`: the sweeper that `hydra/sweeper=NAME` names, with the launcher that runs its jobs."""
    return _plugin(
        words,
        folder,
        lambda context, composed: Plugins.instance().instantiate_sweeper(
            hydra_context=context, task_function=task, config=composed
        ),
    )


def _plugin(words: Sequence[str], folder: Path, make: Callable[[HydraContext, DictConfig], P]) -> P:
    ConfigStore.instance().store(name="schema", node=schema(Config))
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]
    where = [f"hydra.sweep.dir={quote(str(folder))}", "hydra.sweep.subdir='${hydra.job.num}'", "hydra.job.name=neartie"]
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            composed = hydra.compose_config(
                config_name="config",
                overrides=[*quiet, *where, *words],
                run_mode=RunMode.MULTIRUN,
                from_shell=False,
                with_log_configuration=False,
            )
            context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks())
            return make(context, composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{one_line(error)}{_missing_plugin(words)}") from error


def _missing_plugin(words: Sequence[str]) -> str:
    named = [word.partition("=")[2].partition("_")[0] for word in words if word.startswith("hydra/")]
    return "".join(f"; is it installed? pip install 'neartie[{name}]'" for name in named if name in PLUGINS)


def groups() -> dict[str, tuple[str, ...]]:
    """The groups of conf/ and the choices of each, in alphabetical order."""
    folders = sorted(p for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("_"))
    return {folder.name: tuple(sorted(p.stem for p in folder.glob("*.yaml"))) for folder in folders}


def choice_summary(group: str, name: str) -> str:
    """The first line of a choice's file: a comment that says what it is."""
    lines = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if not line.startswith("# @package"))
    return first.removeprefix("#").strip()


def schema(node: type | DictConfig) -> DictConfig:
    """A Hydra schema of frozen dataclasses, open to YAML.

    OmegaConf marks each frozen dataclass read-only, which would block the merge, and does so again for each value of
    a dict of them as it is added: such a dict is left untyped here and typed in `_to_object`.
    """
    config = OmegaConf.structured(node) if isinstance(node, type) else node
    OmegaConf.set_readonly(config, None)
    for key in list(config):
        child = None if OmegaConf.is_missing(config, key) else config._get_node(key)
        if not isinstance(child, DictConfig):
            continue
        if dataclasses.is_dataclass(child._metadata.element_type):
            child._metadata.element_type = Any
        else:
            schema(child)
    return config


def _to_object(composed: DictConfig) -> Any:
    OmegaConf.set_struct(composed, False)
    sites = {str(site): _site_override(node) for site, node in composed.variant.override.items()}
    composed.variant.override = {}
    del composed["hydra"]
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    variant = dataclasses.replace(config.variant, override=sites)
    return dataclasses.replace(config, variant=variant)


def _site_override(node: DictConfig) -> SiteOverride:
    rule = OmegaConf.to_object(OmegaConf.merge(schema(SiteOverride), node))
    assert isinstance(rule, SiteOverride)
    return dataclasses.replace(rule, layers=tuple(rule.layers))


def _model_folder(overrides: list[Override]) -> list[Override]:
    """model=/a/folder is short for model=folder model.path=/a/folder."""
    out: list[Override] = []
    for o in overrides:
        value = str(o.value()) if o.key_or_group == "model" and not o.is_sweep_override() else ""
        folder = value not in groups()["model"] and ("/" in value or Path(value).is_dir()) and value != ""
        out += parse(["model=folder", f"model.path={quote(value)}"]) if folder else [o]
    return out


def quote(value: str) -> str:
    """A value as a word of Hydra's grammar that nothing in it can break: comma, slash, equals sign, space."""
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", value)
    return "'" + escaped.replace("'", "\\'") + "'"


def _refuse_unread(config: Config, overrides: Sequence[Override]) -> None:
    """A group that this kind of engine does not read is refused, but a model, which is told of in notes."""
    kind = config.engine.kind
    unread = {"variant", "device"} - READS[kind][1]
    for o in overrides:
        group = str(o.key_or_group).split(".")[0]
        if group in unread and str(o.key_or_group) not in config.own_words:
            raise UsageError(f"{o.input_line} has no effect with engine={kind.name}; leave it out, or use engine=local")


def _label(config: Config, choice: str, overrides: Sequence[Override]) -> str:
    if config.engine.kind is not EngineKind.local:
        return config.engine.label
    changes = [str(o.input_line).lstrip("+~") for o in overrides if str(o.key_or_group).startswith("variant.")]
    return "+".join([choice, *(c.removeprefix("variant.") for c in changes)])


def as_yaml(config: Config) -> str:
    """A Config as YAML, Enums by name."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def as_plain(config: Config) -> dict[str, object]:
    """A Config as JSON-plain data, Enums by name."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
