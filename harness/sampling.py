"""The sampling settings that were in effect when tokens were made, and whether they amount to plain greedy.

A backend may fill what a request leaves unset from the checkpoint's `generation_config.json`; another does not. A
golden therefore lists effective settings, and the file beside it counts unless the golden says it was ignored.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from variants.errors import InputError

GENERATION_CONFIG = "generation_config.json"
EOS_RULES = ("ignored", "stop", "unknown")

# Settings that can change an argmax, with the values that leave it alone; None and empty are neutral everywhere.
NEUTRAL: dict[str, float] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "penalty_alpha": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_tokens": 0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "guidance_scale": 1.0,
    "num_beams": 1,
}
PROCESSORS = (
    "bad_words_ids",
    "force_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "logit_bias",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "logits_processors",
)

_NUMBER = r"\s*(?:of|=|:)?\s*(\d+(?:\.\d+)?)"
_STATED = {
    name: re.compile(name.replace("_", "[ _-]") + _NUMBER)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p")
}


def plain_greedy_settings(*, eos: str = "ignored") -> dict[str, object]:
    """The settings to record for a golden that was made by argmax alone; `eos` is "ignored" or "stop"."""
    return normalize_sampling({"temperature": 0.0, "repetition_penalty": 1.0, "top_k": None, "eos": eos})


def normalize_sampling(raw: object) -> dict[str, object]:
    """Settings as a dict, from such a dict or from free text ("greedy (temperature 0), no penalties, EOS ignored").

    Free text is kept under "stated". `None` gives {} (nothing recorded). Raises InputError for anything else and for
    an EOS rule that is none of "ignored", "stop", "unknown".
    """
    if raw is None:
        return {}
    if isinstance(raw, str):
        return _from_text(raw)
    if not isinstance(raw, Mapping):
        raise InputError(f"sampling settings: got {type(raw).__name__}, expected an object or a sentence")
    settings = {str(key): value for key, value in raw.items()}
    if settings and settings.setdefault("eos", "unknown") not in EOS_RULES:
        raise InputError(f"sampling settings: eos is {settings['eos']!r}, expected one of {', '.join(EOS_RULES)}")
    return settings


def _from_text(text: str) -> dict[str, object]:
    lower = text.lower()
    settings: dict[str, object] = {"stated": text, "eos": "unknown"}
    if re.search(r"\b(?<!non-)(?<!not )greedy\b", lower):
        settings["temperature"] = 0.0
    for name, pattern in _STATED.items():
        if found := pattern.search(lower):
            settings[name] = float(found[1])
    if "no penalt" in lower:
        settings.setdefault("repetition_penalty", 1.0)
    elif "penalt" in lower and not any(name.endswith("_penalty") for name in settings):
        settings["unread"] = "a penalty without a value"
    if re.search(r"\beos (is )?ignored|ignor\w+ eos", lower):
        settings["eos"] = "ignored"
    elif re.search(r"\bstop\w*( at| on)? eos|eos stops", lower):
        settings["eos"] = "stop"
    return settings


def with_generation_config(settings: dict[str, object], folder: Path) -> dict[str, object]:
    """`settings` with the argmax-changing fields of the folder's generation_config.json under "generation_config".

    Settings whose "generation_config" is already there (an object, or "ignored" where the engine was told not to read
    the file) are returned as they are. Raises InputError when the file is not a JSON object.
    """
    path = folder / GENERATION_CONFIG
    if "generation_config" in settings or not path.is_file():
        return settings
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON ({error}); mend or remove it") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: got {type(content).__name__}, expected a JSON object")
    relevant = {key: value for key, value in content.items() if _changes_argmax(key, value)}
    return {**settings, "generation_config": relevant} if relevant else settings


def greedy_problems(settings: Mapping[str, object]) -> list[str]:
    """Why `settings` are not plain greedy, one reason a setting; empty when they are.

    Plain greedy is temperature 0 (or do_sample false) and no penalty, processor or beam. A top-k of 1 with a
    temperature is not: threshold samplers keep every token that ties with the maximum and then draw.
    """
    if not settings:
        return ["sampling settings are not recorded"]
    problems = _temperature_problems(settings)
    problems += [f"{key} {value}" for key, value in settings.items() if _changes_argmax(key, value)]
    if unread := settings.get("unread"):
        problems.append(f"{unread} in {settings.get('stated')!r}")
    file = settings.get("generation_config")
    if isinstance(file, Mapping):
        problems += [f"{k} {v} (from {GENERATION_CONFIG})" for k, v in file.items() if _changes_argmax(k, v)]
    return problems


def _temperature_problems(settings: Mapping[str, object]) -> list[str]:
    temperature = settings.get("temperature")
    if temperature is None:
        return [] if settings.get("do_sample") is False else ["temperature is not recorded"]
    return [] if temperature == 0 else [f"temperature {temperature}"]


def _changes_argmax(key: str, value: object) -> bool:
    if value is None or value is False or value == [] or value == {}:
        return False
    if key in PROCESSORS:
        return True
    if key in NEUTRAL:
        return value != NEUTRAL[key]
    # A penalty this table does not know: only the two customary neutral values are let through.
    return key.endswith("_penalty") and key != "length_penalty" and value not in (0, 1)
