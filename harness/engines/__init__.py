"""Engines; `make_engine` makes the one that a Config names, each kind imported only when it is asked for."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from harness.engines.assets import checkpoint_folder
from harness.engines.protocol import Engine
from harness.parts import part
from variants.errors import InputError

if TYPE_CHECKING:
    from harness.config import Config, EngineChoice


@part("load")
def make_engine(config: Config) -> Engine:
    """The engine of a Config; what was loaded last is kept, so that the jobs of a multirun share one load.

    Raises InputError for a checkpoint or folder that cannot be used, DeviceError for a device or library that is not
    there, UsageError for a choice that the engine does not have.
    """
    return _MAKERS[config.engine.kind.name](config)


def _local(config: Config) -> Engine:
    from harness.engines.local import LocalEngine

    return LocalEngine.from_config(config)


def _transformers(config: Config) -> Engine:
    return _loaded(
        str(checkpoint_folder(config.model.path)), config.model.sha256, config.engine, config.device.torch_name
    )


@lru_cache(maxsize=1)
def _loaded(folder: str, sha256: str | None, choice: EngineChoice, device: str) -> Engine:
    from harness.engines.transformers_engine import TransformersEngine

    options = {"dtype": choice.dtype.name, "attention": choice.attention.name, "experts": choice.experts.name}
    engine = TransformersEngine.load(folder, device=device, **options)
    if sha256 is not None and engine.info.model_sha256 != sha256:
        raise InputError(f"{folder}: weights have sha256 {engine.info.model_sha256}, expected {sha256}; correct one")
    return engine


def _replay(config: Config) -> Engine:
    from harness.engines.replay import ReplayEngine

    assert config.engine.folder is not None
    return ReplayEngine(config.engine.folder, run=config.engine.run)


def _openai(config: Config) -> Engine:
    from harness.engines.openai_engine import OpenAIEngine

    return OpenAIEngine.from_config(config)


def _vllm(config: Config) -> Engine:
    from harness.engines.vllm_engine import VllmEngine

    return VllmEngine.from_config(config)


def _llama_server(config: Config) -> Engine:
    from harness.engines.library_servers import llama_engine

    return llama_engine(config)


def _mlx(config: Config) -> Engine:
    from harness.engines.library_servers import mlx_engine

    return mlx_engine(config)


_MAKERS = {
    "local": _local,
    "transformers": _transformers,
    "replay": _replay,
    "openai": _openai,
    "vllm": _vllm,
    "llama_server": _llama_server,
    "mlx": _mlx,
}
