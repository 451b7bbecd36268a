"""What the power experiment runs: benign variants composed from axes, planted defects, and the batteries of each.

A cell is one run that every rule judges. Variants are written as the words that `neartie gate` takes, so that any of
them can be run again by hand.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.compose import load
from harness.forced_errors import Battery
from harness.golden import load_golden
from variants.axes import Variant
from variants.errors import UsageError

FORMATS = {
    "bf16": "stream=bf16 gemm=bf16 norm.variance=stored",
    "bf16_stepwise": "stream=bf16 gemm=bf16 norm.variance=stored norm.rounding=twice elementwise.swiglu=stepwise "
    "elementwise.conv=stepwise elementwise.beta=bf16 kda.outputs=bf16 mla.kv_cache=bf16 moe.expert_sum=bf16",
    "bf16_in_place": "stream=bf16_in_place norm.variance=mixed kda.inputs=bf16 mla.inputs=bf16",
    "f16": "stream=f16 gemm=f16 moe.router=f32",
    "f32_stream": "moe.router=bf16_f32out params.a_log=bf16",
    "f32": "gemm=f32 moe.router=f32",
}
ORDERS = {
    "islands": "execution.batch=4",
    "recurrent": "execution.mode=incremental execution.batch=4 kda.prefill=recurrent kda.decode=recurrent "
    "mla.prefill=dense_f32 mla.decode=dense_f32",
    "chunk16": "execution.mode=incremental execution.batch=4 kda.prefill=chunk kda.decode=recurrent kda.chunk_size=16 "
    "mla.prefill=flash mla.tile_q=16 mla.tile_k=32 mla.decode=absorbed mla.kv_splits=2 moe.experts=grouped",
    "chunk5": "execution.mode=incremental execution.batch=3 kda.prefill=chunk kda.decode=recurrent_gemv "
    "kda.chunk_size=5 mla.prefill=online_f32 mla.decode=online_f32 mla.cache=expanded",
    "pieces": "execution.mode=incremental execution.batch=4 execution.prefill_piece=4 kda.prefill=recurrent_gemv "
    "kda.decode=recurrent_gemv mla.prefill=sdpa mla.decode=sdpa",
    "invariant": "execution.mode=incremental batch_invariant=true kda.prefill=island_f32 kda.decode=island_f32 "
    "mla.prefill=flash mla.tile_k=16 mla.decode=absorbed",
}
# The carrier of planted defects: every kind of code that a defect can sit in runs, in the formats of a bf16 engine.
CARRIER = (
    f"{FORMATS['bf16']} execution.mode=incremental execution.batch=4 kda.prefill=chunk kda.decode=recurrent "
    "kda.chunk_size=4 mla.prefill=dense_f32 mla.decode=absorbed"
)
ROWS, TOKENS = 4, 4  # three steps on carried state: the last is the one that a single-position fault hits
LONGEST_PROMPT = 24  # of the prompts that are drawn from wide: the work per cell stays alike


@dataclass(frozen=True)
class Slice:
    """Some prompts of a golden with the first tokens of each continuation."""

    golden: str
    rows: tuple[int, ...]
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        return f"{self.golden}:{'-'.join(map(str, self.rows))}"

    def battery(self) -> Battery:
        return Battery.of(load_golden(self.golden)).part(self.rows, self.tokens)


GATE = Slice("gate", tuple(range(ROWS)))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run. subject: what a row is called by; words: its variant. defect, severity, spread: empty where benign."""

    subject: str
    words: str
    battery: Slice
    seed: int
    defect: str = ""
    severity: str = ""
    spread: str = ""

    @property
    def benign(self) -> bool:
        return not self.defect

    @property
    def key(self) -> str:
        """Names the cell in a file of results, whatever the order in which cells were run."""
        parts = (self.subject, self.severity, self.spread, self.battery.name, str(self.seed))
        return "|".join(p for p in parts if p)


def variant_of(words: str) -> Variant:
    """The variant that the words mean on top of the defaults."""
    return load(["variant=f64_islands", *(f"variant.{word}" for word in words.split())]).variant


def benign_words() -> dict[str, str]:
    """Every format with every order, by name; what an order sets wins over its format."""
    return {f"{f}/{o}": joined(formats, orders) for f, formats in FORMATS.items() for o, orders in ORDERS.items()}


def joined(*groups: str) -> str:
    """Words of a variant as one text; a later group's stand in place of an earlier one's of the same names."""
    settings = dict(word.split("=", 1) for group in groups for word in group.split())
    return " ".join(f"{name}={value}" for name, value in settings.items())


def slices(seeds: Iterable[int]) -> list[tuple[int, Slice]]:
    """The halves of gate (seed 0), and for each seed prompts drawn from wide, 4, 3, 2 or 1 that run together."""
    lengths = [len(p) for p in load_golden("wide").prompts]
    short = [n for n, length in enumerate(lengths) if length <= LONGEST_PROMPT]
    drawn = [
        (seed, Slice("wide", tuple(sorted(random.Random(seed).sample(short, ROWS - (seed - 1) % ROWS)))))
        for seed in seeds
    ]
    return [(0, GATE), (0, Slice("gate", tuple(range(ROWS, 2 * ROWS)))), *drawn]


def benign_cells(seeds: Sequence[int]) -> list[Cell]:
    """Benign variants x batteries; the seed also draws the envelope's noise. Raises UsageError for fewer than 30."""
    words = benign_words()
    if len(words) < 30:
        raise UsageError(f"power: {len(words)} benign variants, expected at least 30; compose more")
    return [
        Cell(subject=label, words=text, battery=part, seed=seed)
        for label, text in words.items()
        for seed, part in slices(seeds)
    ]


def defect_cells(names: Iterable[str], severities: Iterable[str], spreads: Sequence[str]) -> list[Cell]:
    """Every defect at every severity and spread, in the carrier on the first half of gate."""
    names = list(names)
    return [
        Cell(subject=n, words=CARRIER, battery=GATE, seed=0, defect=n, severity=severity, spread=spread)
        for severity in severities
        for n in names
        for spread in spreads
    ]


def quick_cells(names: Sequence[str]) -> list[Cell]:
    """A few cells of each kind: three benign variants, one light defect at one layer for each given name."""
    wanted = ("bf16/recurrent", "f16/chunk16", "f32/chunk5")
    benign = [c for c in benign_cells(()) if c.battery == GATE and c.subject in wanted]
    return [*benign, *defect_cells(names, ("light",), ("one",))]
