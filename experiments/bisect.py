"""`neartie bisect`: where two variants part, which places flip a token, and what each axis adds to a score."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.bisect_text import shares_text, token_text
from experiments.gate import announced
from experiments.words import Flags
from harness import strict_json
from harness.axis_sets import Allowed, differing_axes, mixed_variant, several_axes
from harness.compose import named_variant
from harness.config import Config, EngineKind
from harness.engines.local import LocalEngine
from harness.first_difference import first_difference
from harness.gate import part_of
from harness.golden import Golden, load_golden
from harness.golden_data import ENDED
from harness.ledger import Ledger, Run
from harness.localize import Runner, Spot, first_token, minimal_flip
from harness.matched import matched
from harness.mixing import is_setting
from harness.numerics import check_device
from harness.op_capture import capture_op
from harness.op_file import write_capture
from harness.pregate import check_vocabulary
from harness.provenance import environment
from harness.shares import shares
from variants.axes import Variant
from variants.errors import UsageError
from variants.recipe import Recipe, resolve

FORCED, FREE = "forced", "free"


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """a, b: the two variants; a is `variant` unless named, and `against` another word for b.

    token: [prompt, position], None for the first that differs. alone: try every place by itself too, be they many.
    capture: a folder for the culprit's operation. shares: of a difference of scores, by axis. score: forced or free.
    orders: how many are drawn. batch: rows that run together in every run, 0 for what each variant says.
    """

    a: str | None = None
    b: str | None = None
    against: str | None = None
    token: list[int] | None = None
    alone: bool = False
    capture: str | None = None
    shares: bool = False
    score: str = FORCED
    orders: int = 24
    batch: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"bisect exchanges parts of variants, and engine={self.engine.kind.name} has none")
        if self.a is not None and self.variant != Variant():
            raise UsageError(f"a={self.a} and variant= both name the first variant; leave one of them out")
        if self.b is not None and self.against is not None:
            raise UsageError(f"b={self.b} and against={self.against} both name the second variant; leave one out")
        if self.token is not None and (len(self.token) != 2 or min(self.token) < 0):
            raise UsageError(f"token={self.token}: expected [PROMPT,POSITION], both from 0, as in token=[4,6]")
        if self.score not in (FORCED, FREE):
            raise UsageError(f"score={self.score}: expected {FORCED} or {FREE}")
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        of_token = {"token": self.token is not None, "alone": self.alone, "capture": self.capture is not None}
        of_shares = {"score": self.score != FORCED, "orders": self.orders != 24, "batch": self.batch != 0}
        for name, given in (of_token if self.shares else of_shares).items():
            if given:
                when = "with" if self.shares else "without"
                raise UsageError(f"{name}= has no effect {when} shares=true; leave it out")
        if self.orders < 2 or self.batch < 0:
            raise UsageError(
                f"orders={self.orders} batch={self.batch}: expected 2 or more orders, and no negative batch"
            )


def run(config: Settings, flags: Flags) -> int:
    """Bisect once and put it on record."""
    other = config.b if config.b is not None else config.against
    if other is None:
        raise UsageError("bisect needs a second variant: b=NAME, as in b=device_kda (`neartie variants` lists them)")
    if config.a is not None:
        config = replace(config, a=None, variant=named_variant(config.a), label=config.a)
    with Ledger(Path(config.results) / "ledger").begin(announced(config, flags, "bisect")) as row:
        document, reason, place = (_shares if config.shares else _token)(config, other, row)
        several = several_axes(config.variant, named_variant(other))
        document = {"a": config.label, "b": other, "several": several, **document}
        site, layer = place if place else (None, None)
        row.finish({"verdict": {"reason": reason, "site": site, "layer": layer}, "detail": {"bisect": document}})
    if flags.json:
        print(strict_json.dumps(strict_json.encode({"run_id": row.run_id, **document})[0]).decode(), end="")
    else:
        print((shares_text if config.shares else token_text)(document))
        if several:
            print(several)
    return 0


Told = tuple[dict[str, object], str, tuple[str, int] | None]


def _prepared(config: Settings, other: str, row: Run) -> tuple[Golden, LocalEngine, LocalEngine]:
    check_device(config.device)
    row.add({"environment": environment(device=config.device.torch_name)})
    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    row.add({"golden_hash": golden.hash, "battery_hash": golden.battery_hash, "bar": golden.bar.name})
    a = LocalEngine.from_config(config)
    b = LocalEngine(a.casts, named_variant(other), name=other, device=config.device)
    row.add({"model_hash": a.casts.checkpoint.sha256, "variant_hash": a.recipe.hash})
    row.add({"recipe": {"declared": a.recipe.as_dict()}})
    check_vocabulary(golden, a.casts.checkpoint.config.vocab_size)
    if a.recipe.hash == b.recipe.hash:
        raise UsageError(f"{config.label} and {other} are the same arm; there is nothing between them to find")
    return golden, a, b


def _token(config: Settings, other: str, row: Run) -> Told:
    golden, a, b = _prepared(config, other, row)
    runner = Runner(a.casts, device=config.device)
    tokens = [[int(t) for t in line if t != ENDED] for line in golden.tokens[0]]
    place = _asked(config, tokens) or first_token(runner, a.recipe, b.recipe, golden.prompts, tokens)
    searched = runner.count.forwards
    if place is None:
        reason = f"{config.label} and {other} choose the same token at every place of {golden.name}"
        reason += _uncaptured(config)
        return {"place": None, "reason": reason, "forwards": searched}, reason, None
    p, t = place
    spot = Spot(prompt=golden.prompts[p], forced=tokens[p][:t])
    first = first_difference(runner, a.recipe, b.recipe, spot)
    before = runner.count.forwards
    flip = minimal_flip(runner, a.recipe, b.recipe, spot, alone=config.alone)
    culprit = next((found for found in flip.minimal or () if not is_setting(found)), None)
    document: dict[str, object] = {
        "place": [p, t],
        "golden_token": tokens[p][t],
        "first": first,
        "flip": flip,
        "forwards": {"finding_the_place": searched, "first_difference": before - searched, "exchange": flip.forwards},
        "captures": _captures(config, runner, (a.recipe, b.recipe), spot, culprit),
    }
    if max(a.recipe.execution.batch, b.recipe.execution.batch) > 1:
        document["note"] = "the row ran alone here; in a batch its sums may be in another order"
    reason = _reason(flip.minimal, flip.token_a, flip.token_b) + ("" if culprit else _uncaptured(config))
    return {**document, "reason": reason}, reason, culprit


def _asked(config: Settings, tokens: list[list[int]]) -> tuple[int, int] | None:
    if config.token is None:
        return None
    p, t = config.token
    if p >= len(tokens) or t >= len(tokens[p]):
        there = f"{len(tokens)} prompts" if p >= len(tokens) else f"{len(tokens[p])} tokens at prompt {p}"
        raise UsageError(f"token=[{p},{t}] is not in this golden: it has {there}, counted from 0")
    return p, t


def _reason(minimal: tuple[tuple[str, int], ...] | None, token_a: int, token_b: int) -> str:
    if minimal is None:
        return f"no set of places turns {token_a} into {token_b}, not even all of them together"
    if not minimal:
        return f"both choose {token_a} here; nothing is to be flipped"
    named = ", ".join(site if n < 0 else f"{site}@{n}" for site, n in minimal[:6])
    more = f" and {len(minimal) - 6} more" if len(minimal) > 6 else ""
    return f"A with {named}{more} as in B chooses {token_b} instead of {token_a}"


def _uncaptured(config: Settings) -> str:
    return "" if config.capture is None else "; nothing was captured, for there is no culprit"


def _captures(
    config: Settings, runner: Runner, recipes: tuple[Recipe, Recipe], spot: Spot, place: tuple[str, int] | None
) -> list[str]:
    """The culprit's operation as A and as B ran it."""
    if config.capture is None or place is None:
        return []
    written = []
    for name, recipe in zip("ab", recipes, strict=True):
        found = capture_op(lambda probe, r=recipe: runner.model(r, probe=probe), spot, place)
        written.append(str(write_capture(found, Path(config.capture) / f"{place[0]}@{place[1]}-{name}")))
    return written


def _shares(config: Settings, other: str, row: Run) -> Told:
    golden, a, b = _prepared(config, other, row)
    runner, model = Runner(a.casts, device=config.device), a.casts.checkpoint.config

    def made(axes: frozenset[str]) -> Recipe:
        recipe = resolve(mixed_variant(a.variant, b.variant, axes), model)
        return recipe.with_execution(batch=config.batch) if config.batch else recipe

    def value(axes: frozenset[str]) -> float:
        return matched(runner, made(axes), golden, free=config.score == FREE)

    axes = tuple(x for x in differing_axes(a.variant, b.variant) if not (config.batch and x == "execution.batch"))
    allowed = Allowed(made)
    found = shares(axes, value, allowed=allowed, orders=config.orders, seed=config.seed)
    refused = sorted(
        ({"axes": sorted(s), "why": why} for s, why in allowed.refusals.items()), key=lambda r: len(r["axes"])
    )
    document = {
        "score": config.score,
        "tokens": int((golden.tokens[0] != ENDED).sum()),
        "shares": found,
        "refused": refused[:20],
        "refused_sets": len(refused),
        "forwards": runner.count.forwards,
    }
    first = found.shares[0]
    reason = f"{found.before:g} to {found.after:g}: most of it {first.axis}, {first.share:+.2f} tokens"
    return document, reason, None


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["bisect", *sys.argv[1:]]))
