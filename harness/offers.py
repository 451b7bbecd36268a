"""What an engine offers, and which instruments that allows: one screen for somebody who is about to ask it."""

from harness.engines.protocol import EngineInfo

# Read off transformers 5.24's own server.
NOTES = {
    "transformers": (
        "its server (`transformers serve`) takes text alone at /v1/completions and returns text alone: no ids, no "
        "logprobs, no echo; tokens cannot be gated through it, this engine runs the library in process instead",
    )
}

Row = tuple[str, str]


def offers(info: EngineInfo) -> list[Row]:
    """What it takes and gives, a row each; unknown things are said to be unknown."""
    logprobs = "all of the vocabulary" if info.top_logprobs is None else f"{info.top_logprobs} a token"
    if info.full_logits:
        logprobs = "whole rows of logits"
    hashes = [("weights", info.model_sha256), ("tokenizer", info.tokenizer_sha256)]
    return [
        ("engine", f"{info.name} {info.version}, {info.device}, {info.dtype}"),
        ("files", ", ".join(f"{what} {(sha or 'unknown')[:12]}" for what, sha in hashes)),
        ("prompts", "token ids" if info.ids_in else "text"),
        ("answers", "token ids" if info.ids_out else "text alone: tokens cannot be compared"),
        ("echo of prompt ids", _yes(info.echoes_ids)),
        ("logprobs", logprobs),
        ("logprobs of a prompt", _yes(info.can_score)),
        ("precisions", ", ".join(info.precisions) or "its own alone"),
        ("values inside", _yes(info.taps)),
        ("at a time", str(info.batch)),
        ("greatest length", "unknown" if info.max_length is None else str(info.max_length)),
        ("sampling", ", ".join(f"{k} {v}" for k, v in info.sampling.items()) or "unknown"),
    ]


def instruments(info: EngineInfo, *, oracle: bool) -> list[Row]:
    """Which instruments can run. oracle: whether the checkpoint that the golden was made of is here."""
    ranked = info.top_logprobs is None or info.top_logprobs >= 2 or info.full_logits
    here = "the golden's checkpoint is here" if oracle else "needs the golden's checkpoint: model=DIR"
    inside = info.taps and oracle
    return [
        ("gate", _can(info.ids_out, "tokens and first divergences", "needs token ids")),
        ("margins and noise", _can(ranked, "from its ranked logprobs", "needs 2 logprobs a token")),
        ("expected score", _can(info.ids_out and oracle, here, here)),
        ("envelope", _can((ranked or info.full_logits) and oracle, here, here if ranked else "needs logprobs")),
        ("local replay", _can(inside, "values inside can be read", "needs values inside")),
        ("precision ladder", _can(inside and len(info.precisions) > 1, "several precisions", "needs two precisions")),
    ]


def _can(can: bool, why: str, why_not: str) -> str:
    return f"yes, {why}" if can else f"no, {why_not}"


def _yes(said: bool) -> str:
    return "yes" if said else "no"
