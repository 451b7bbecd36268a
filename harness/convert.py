"""One checkpoint for every engine: the release's names, the transformers library's own, or a GGUF file."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from enum import Enum
from pathlib import Path

import torch

from harness.gguf_vocabulary import Vocabulary
from harness.gguf_write import WeightFormat, write_gguf
from harness.progress import progress
from harness.tokenizer_json import RANKS, write_kimi_tokenizer
from variants.checkpoint import Checkpoint
from variants.checkpoint_config import read_json_object
from variants.checkpoint_library import library_tensors
from variants.checkpoint_names import is_float32_parameter
from variants.checkpoint_write import config_fields, write_folder

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Target(Enum):
    """What is written: a GGUF file for llama.cpp; a folder in the release's names (vLLM, MLX, transformers, this
    project); a folder in the transformers library's in-memory names.
    """

    gguf = "gguf"
    hf = "hf"
    transformers = "transformers"


def convert(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    target: Target,
    weights: WeightFormat | None = None,
    vocabulary: Vocabulary = Vocabulary.ids,
    eos_reachable: bool | None = None,
) -> None:
    """Write `checkpoint` to `out`.

    weights: format of the matrices (ties_to_even); None keeps what is stored, and is float32 for GGUF, where a narrower
    one would make llama.cpp round the activations too. eos_reachable: None is False for a GGUF of ids, else True; a
    folder without it names no end of sequence. Raises UsageError where `out` holds a model already or cannot hold this
    one, InputError for a tokenizer that cannot be converted, DeviceError where a package is missing.
    """
    if target is Target.gguf:
        reachable = vocabulary is Vocabulary.text if eos_reachable is None else eos_reachable
        form = weights or WeightFormat.f32
        write_gguf(checkpoint, out, weights=form, vocabulary=vocabulary, eos_reachable=reachable)
        return
    checkpoint = checkpoint if weights is None else _cast(checkpoint, weights)
    without_eos = eos_reachable is False
    config = replace(checkpoint.config, eos_token_id=None) if without_eos else checkpoint.config
    tensors = checkpoint.tensors
    if config.tie_word_embeddings:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    if target is Target.transformers:
        tensors = library_tensors(tensors, config)
    # Read by MLX, which asks for both: no layer uses a rotation, nor this width.
    also = {"head_dim": config.hidden_size // config.num_heads, "rope_theta": 10000.0}
    with progress("convert: tensors", len(tensors)) as done:
        write_folder(out, config_fields(config) | also, tensors, written=done)
    _write_tokenizer(checkpoint.path, Path(out), without_eos=without_eos)


def _cast(checkpoint: Checkpoint, weights: WeightFormat) -> Checkpoint:
    dtype = getattr(torch, weights.value)
    tensors = {n: t if is_float32_parameter(n) else t.to(dtype) for n, t in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def _write_tokenizer(folder: Path, out: Path, *, without_eos: bool) -> None:
    for name in TOKENIZER:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    if not (folder / "tokenizer.json").is_file() and (folder / RANKS).is_file():
        write_kimi_tokenizer(folder, out / "tokenizer.json")
    settings = out / "tokenizer_config.json"
    if not settings.is_file():
        return
    fields = read_json_object(settings)
    fields["add_bos_token"] = False
    if without_eos:
        fields.pop("eos_token", None)
    if fields.get("tokenizer_class") == "TikTokenTokenizer":
        fields = {**fields, "tokenizer_class": "PreTrainedTokenizerFast"}
        fields.pop("auto_map", None)
    settings.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
