"""`neartie convert`: one checkpoint in the form that another engine reads."""

import json
import sys
from dataclasses import dataclass
from enum import Enum

from experiments.words import Flags
from harness.config import Config
from harness.convert import Target, convert
from harness.engines.assets import checkpoint_folder
from harness.gguf_vocabulary import Vocabulary
from harness.gguf_write import WeightFormat
from variants.checkpoint_library import load_any_checkpoint
from variants.errors import InputError, UsageError


class Eos(Enum):
    """Whether the engine may take a token for the end of a sequence."""

    reachable = True
    unreachable = False


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """to, out: what is written, and where. The others are told of in `harness.convert.convert`."""

    to: Target = Target.gguf
    out: str = ""
    weights: WeightFormat | None = None
    vocabulary: Vocabulary = Vocabulary.ids
    eos: Eos | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out:
            raise UsageError("convert needs out=FILE (to=gguf) or out=DIR (to=hf, to=transformers)")
        if self.vocabulary is not Vocabulary.ids and self.to is not Target.gguf:
            raise UsageError(f"vocabulary={self.vocabulary.name} has no effect with to={self.to.name}; leave it out")


def run(config: Settings, flags: Flags) -> int:
    """Convert one checkpoint, whose weights are checked as for any run."""
    folder = checkpoint_folder(config.model.path)
    checkpoint = load_any_checkpoint(folder)
    if config.model.sha256 not in (None, checkpoint.sha256):
        raise InputError(f"{folder}: weights have sha256 {checkpoint.sha256}, expected {config.model.sha256}")
    reachable = None if config.eos is None else config.eos.value
    convert(
        checkpoint,
        config.out,
        target=config.to,
        weights=config.weights,
        vocabulary=config.vocabulary,
        eos_reachable=reachable,
    )
    if flags.json:
        print(json.dumps({"out": config.out, "to": config.to.name, "model_sha256": checkpoint.sha256}))
    else:
        print(
            "\n".join([f"{config.out}: {config.to.name} of {folder.name} {checkpoint.sha256[:12]}", *checkpoint.notes])
        )
    return 0


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["convert", *sys.argv[1:]]))
