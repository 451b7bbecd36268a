"""The weights of a run: a checkpoint's or random ones, on one device or several, in memory once in a process."""

from functools import lru_cache

from harness.config import Config, WeightsFrom
from harness.engines.assets import checkpoint_folder, geometry
from variants.checkpoint import load_checkpoint, load_config
from variants.checkpoint_write import random_checkpoint
from variants.placement import spread
from variants.weights import Casts


def casts_of(config: Config) -> Casts:
    """The weights that a run is on; the last ones are kept."""
    devices = config.device.names
    if config.model.weights is WeightsFrom.random:
        return random_casts(str(geometry(config.model.path)), config.seed, *devices)
    return shared_casts(str(checkpoint_folder(config.model.path)), config.model.sha256, *devices)


@lru_cache(maxsize=1)
def random_casts(path: str, seed: int, *devices: str) -> Casts:
    """Weights of a geometry, drawn where they lie."""
    config = load_config(path)
    placement = spread(config, devices)
    return Casts(random_checkpoint(config, seed=seed, placement=placement), placement=placement)


@lru_cache(maxsize=1)
def shared_casts(folder: str, sha256: str | None, *devices: str) -> Casts:
    """The checkpoint of a folder, each tensor read straight to its device."""
    placement = spread(load_config(folder), devices)
    return Casts(load_checkpoint(folder, expect_sha256=sha256, placement=placement), placement=placement)
