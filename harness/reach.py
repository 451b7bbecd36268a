"""At which lengths a recipe's code changes, a prompt long enough to pass them all, and prompts of all lengths.

A golden of short prompts never enters a second chunk of the delta rule, a second tile of keys or a second page, and
what is wrong there cannot show in it. Local replay needs no golden tokens, only some: so it also runs one prompt made
of the golden's own, long enough.
"""

from collections.abc import Iterable, Sequence

from harness.forced_errors import Battery
from harness.lockstep import Tokens
from variants.axes import Execution
from variants.recipe import Recipe

WIDEST = 320  # tokens; a longer prompt would cost more than the rest of a verdict
FORCED = 4
PAST = 9  # tokens in the piece that comes last, so that it is neither empty nor whole


def of_all_lengths(battery: Battery, most: int) -> list[tuple[Tokens, Tokens]]:
    """At most so many prompts, each with the tokens after it, by length: the shortest, the longest, evenly between."""
    rows = sorted(zip(battery.prompts, battery.continuations, strict=True), key=lambda row: len(row[0]))
    count = min(most, len(rows))
    return [rows[i * (len(rows) - 1) // max(1, count - 1)] for i in range(count)]


def text_of(rows: Iterable[tuple[Tokens, Tokens]]) -> list[int]:
    """All tokens of rows, one after the other."""
    return [token for row in rows for tokens in row for token in tokens]


def repeated(text: Sequence[int], count: int) -> tuple[int, ...]:
    """So many tokens of a text, again and again."""
    return (tuple(text) * -(-count // len(text)))[:count]


def lengths_of(recipe: Recipe) -> dict[str, int]:
    """What changes with length under a recipe, and the tokens after which it does: {"second chunk": 64, ...}."""
    found: dict[str, int] = {}
    for phase in ("prefill", "decode"):
        core, attention = recipe.rules[f"kda_core.{phase}"], recipe.rules[f"mla_core.{phase}"]
        size, tile = dict(core.options).get("chunk_size", 0), dict(attention.options).get("tile_k", 0)
        splits = dict(attention.options).get("kv_splits", 1)
        found |= {f"chunk {n} of the delta rule": size * (n - 1) for n in (2, 3) if size > 1}
        found |= {"second tile of keys": tile} if tile > 1 else {}
        found |= {f"{splits} runs of keys": tile * splits} if splits > 1 else {}
        found |= {"five times sixteen keys": 64} if attention.impl == "native" else {}  # it sums in sixteen lanes
    run = recipe.execution
    found |= {"second piece of prefill": run.prefill_piece} if run.prefill_piece else {}
    return found | ({"second page": run.block_size} if run.mode is Execution.paged else {})


def beyond(recipe: Recipe, battery: Battery) -> list[str]:
    """What no sequence of a battery reaches, in words for a reader."""
    longest = max(len(p) + len(c) for p, c in zip(battery.prompts, battery.continuations, strict=True))
    return [f"{what} (after {size} tokens)" for what, size in lengths_of(recipe).items() if longest <= size]


def long_enough(recipe: Recipe, battery: Battery, max_length: int) -> Battery | None:
    """A prompt of the battery's tokens, again and again, that passes every length up to WIDEST and fits its pages.

    None where the battery's prompts do so themselves, and where nothing of that length fits.
    """
    run = recipe.execution
    most = run.pages * run.block_size if run.mode is Execution.paged and run.pages else max_length
    limit = min(WIDEST, min(max_length, most) - FORCED - PAST)
    wanted = max((size for size in lengths_of(recipe).values() if size <= limit), default=0) + PAST
    if wanted == PAST or max(map(len, battery.prompts)) >= wanted:
        return None
    ids = list(repeated(text_of(zip(battery.prompts, battery.continuations, strict=True)), wanted + FORCED))
    return Battery(prompts=[ids[:wanted]], continuations=[ids[wanted:]])
