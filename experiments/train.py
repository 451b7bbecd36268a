"""`neartie train`: a small checkpoint from scratch with the transformers library, in the release's names."""

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.words import Flags
from harness.config import Config, EngineKind
from harness.convert import Target, convert
from harness.engines.assets import checkpoint_folder
from harness.engines.transformers_load import quiet
from harness.gguf_write import WeightFormat
from harness.numerics import check_device, policy
from harness.progress import tracked
from harness.training import Schedule, batches, new_model, read_tokens, train, validation_loss
from variants.checkpoint import load_checkpoint, load_config
from variants.errors import UsageError

HELD_BACK = 0.02  # share of the text, its end, that validation alone reads
VALIDATION = 4  # batches


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """text: a file or folder. out: the new checkpoint's folder. The rest is `harness.training.Schedule`."""

    text: str = ""
    out: str = ""
    steps: int = 2454
    batch: int = 64
    length: int = 512
    rate: float = 3e-3
    warmup: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("text", "out"):
            if not getattr(self, name):
                raise UsageError(f"train needs {name}=PATH")
        for name, least in (("steps", 1), ("batch", 1), ("length", 2), ("warmup", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: expected {least} or more")
        if not self.rate > 0:
            raise UsageError(f"rate={self.rate}: expected above 0")
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"engine={self.engine.kind.name} has no effect: the transformers library trains; leave it")

    @property
    def schedule(self) -> Schedule:
        return Schedule(steps=self.steps, batch=self.batch, length=self.length, rate=self.rate, warmup=self.warmup)


def run(config: Settings, flags: Flags) -> int:
    """Train, then save with the library and write again under the release's names, matrices in bf16."""
    check_device(config.device)
    if any(Path(config.out).glob("*.safetensors*")):
        raise UsageError(f"out={config.out}: holds weights already; name an empty folder")
    folder = checkpoint_folder(config.model.path)
    geometry = load_config(folder)
    tokens = read_tokens(Path(config.text), folder / "tokenizer.json")
    kept = int(len(tokens) * (1 - HELD_BACK))
    bos = geometry.bos_token_id or 0
    with policy(config.device), quiet():
        model = new_model(geometry, seed=config.seed, device=config.device.torch_name)
        rows = batches(tokens[:kept], config.schedule, bos=bos, seed=config.seed)
        for p in tracked("steps", train(model, rows, config.schedule), config.steps):
            if p.step % 50 == 0 or p.step == config.steps - 1:
                print(f"step {p.step}: loss {p.loss:.4f}, rate {p.rate:.2e}", file=sys.stderr)
        few = replace(config.schedule, steps=VALIDATION)
        held = list(batches(tokens[min(kept, len(tokens) - config.length) :], few, bos=bos, seed=config.seed + 1))
        loss = validation_loss(model.eval(), held)
    sha256 = _save(model, folder, config.out)
    said = {"out": config.out, "tokens": len(tokens), "validation_loss": loss, "model_sha256": sha256}
    print(json.dumps(said) if flags.json else f"{config.out}: validation loss {loss:.3f} nats a token, {sha256[:12]}")
    return 0


def _save(model, folder: Path, out: str) -> str:
    """What save_pretrained writes, repaired: dense layers under their own names, decay and router in float32."""
    with tempfile.TemporaryDirectory() as saved, quiet():
        model.save_pretrained(saved)
        trained = load_checkpoint(saved)
        convert(replace(trained, path=folder), out, target=Target.hf, weights=WeightFormat.bf16)
    return load_checkpoint(out).sha256


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
