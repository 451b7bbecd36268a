"""`neartie capture`: K greedy runs of an engine become a golden; or replace one, with a reason, keeping the old."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.gate import announced, environment_of
from experiments.words import Flags
from harness.capture import Jitter, Plan, capture
from harness.config import READS, Config
from harness.engines import make_engine
from harness.engines.assets import checkpoint_folder
from harness.golden import Golden, load_golden, show_golden, write_golden
from harness.journal import Journal
from harness.numerics import check_device, policy
from harness.pregate import check_length
from harness.prompt_files import PromptList, read_prompts
from harness.rebless import rebless
from variants.checkpoint import load_config
from variants.errors import InputError, UsageError

TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """golden: the one to write, a path without its suffix. prompts: a golden's, or a file of them.

    tokenizer: of prompts that are texts, None for the model's. bos: whether the model's BOS goes before a text. runs:
    K. logprobs: how many to keep with each token of run 0. eos: `ignored`, or `stop` to end a row after it.
    """

    prompts: str = "gate"
    tokenizer: str | None = None
    bos: bool = True
    runs: int = 3
    logprobs: int = 20
    eos: str = "ignored"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runs < 1 or self.logprobs < 0 or self.eos not in ("ignored", "stop"):
            raise UsageError(
                f"capture: got runs={self.runs} logprobs={self.logprobs} eos={self.eos}; expected runs of 1 or more, "
                "logprobs of 0 or more, eos=ignored or eos=stop"
            )
        if self.require is not None:
            raise UsageError(f"require={self.require} has no effect: a capture is held to nothing")


def run(config: Settings, flags: Flags) -> int:
    """Capture, decide the bar, write; an existing golden is replaced only with --why, and kept beside the new one."""
    old = _existing(config, flags)
    check_device(config.device)
    with policy(config.device, tf32=config.variant.tf32, reduced_sums=config.variant.reduced_sums):
        golden = _captured(config, old)
    path = Path(config.golden)
    if old is None:
        golden = write_golden(golden, path)
    else:
        here = golden.provenance["environment"]
        why, who = flags.values["why"], flags.values.get("who") or "neartie capture"
        golden = rebless(old, golden, who=who, why=why, environment=here, compared=flags.values.get("compared"))
    print(json.dumps(show_golden(golden)) if flags.json else text(golden, old))
    return 0


def _existing(config: Settings, flags: Flags) -> Golden | None:
    path = Path(config.golden)
    path = path if path.suffix == ".json" else path.with_name(f"{path.name}.json")
    if not path.exists():
        if "why" in flags.values:
            raise UsageError(f"--why has no effect: there is no golden {path} to replace")
        return None
    if not flags.values.get("why"):
        raise InputError(
            f"golden {path} exists; to replace it (the old one is kept beside it) say --why=REASON, and "
            "--compared=WORDS where its environment moved; or choose another name"
        )
    return load_golden(path)


def _captured(config: Settings, old: Golden | None) -> Golden:
    asked = _prompts(config, old)
    count = config.limit or len(asked.prompts)
    plan = Plan(
        name=old.name if old else Path(config.golden).name.removesuffix(".json"),
        prompts=asked.prompts[:count],
        texts=asked.texts and asked.texts[:count],
        runs=config.runs,
        max_tokens=config.max_tokens or (old.tokens.shape[2] if old else TOKENS),
        stop_at_eos=config.eos == "stop",
        top_k=config.logprobs,
    )
    engine = make_engine(config)
    made = {"environment": environment_of(config), "prompts_note": asked.note}
    detail = announced(config, Flags(), "capture")["detail"]
    assert isinstance(detail, dict)
    made["settings"] = {k: detail["config"][k] for k in ("engine", "variant", "device") if k in detail["config"]}
    question = {"settings": made["settings"], "model": engine.info.model_sha256, "version": engine.info.version}
    shape = {"prompts": [list(p) for p in plan.prompts], "tokens": plan.max_tokens, "eos": config.eos}
    journal = Journal(Path(config.results) / "unfinished", {"capture": question, **shape, "url": config.engine.url})
    empty = Golden(name=plan.name, prompts=plan.prompts, tokens=_zeros(plan))
    check_length(empty, engine.info)
    golden = capture(engine, plan, journal=journal, made=made)
    journal.remove()
    return golden


def _zeros(plan: Plan) -> np.ndarray:
    return np.zeros((1, len(plan.prompts), plan.max_tokens), np.int32)


def _prompts(config: Settings, old: Golden | None) -> PromptList:
    """The prompts named, those of the golden that is replaced, with the model's tokenizer and BOS where it is read."""
    if old is not None and config.prompts == Settings.prompts:
        return PromptList(prompts=old.prompts, texts=old.texts, note=f"ids of golden {old.name}")
    tokenizer, bos = config.tokenizer, None
    if "model" in READS[config.engine.kind][1]:
        folder = checkpoint_folder(config.model.path)
        tokenizer = tokenizer or (str(folder) if (folder / "tokenizer.json").is_file() else None)
        bos = load_config(folder).bos_token_id if config.bos else None
    return read_prompts(config.prompts, tokenizer=tokenizer or config.engine.tokenizer, bos_id=bos)


def text(golden: Golden, old: Golden | None) -> str:
    """What was captured, for a terminal: sizes, bar, jitter, settings."""
    k, n, t = golden.tokens.shape
    logprobs = 0 if golden.top_ids is None else golden.top_ids.shape[-1]
    lines = [f"{golden.path}: {n} prompts x {t} tokens, K = {k}, bar {golden.bar.name}, {logprobs} logprobs a token"]
    lines += [f"  {Jitter.of_plain(found)}" for found in golden.provenance["jitter"]]
    how = "read back" if golden.sampling.get("read_back") else "stated, not reported by the engine"
    lines.append(f"  plain greedy ({how}), EOS {golden.sampling['eos']}, hash {golden.hash[:12]}")
    lines += [f"  {note}" for note in golden.provenance["notes"]]
    if old is not None:
        same = "its tokens are the same" if np.array_equal(old.tokens[0], golden.tokens[0]) else "run 0 differs from it"
        lines.append(f"  replaces {old.hash[:12]}, kept as {kept_name(old)}: {same}")
    return "\n".join(lines)


def kept_name(old: Golden) -> str:
    assert old.path is not None
    return f"{old.path.stem}-{old.hash[:12]}.json"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["capture", *sys.argv[1:]]))
