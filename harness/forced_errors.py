"""Errors against the oracle at every place and forced position, of several parties that walk with it in step.

Values meet step by step, so what is held is a few numbers a position, and one group of prompts at a time runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harness.forced_values import Candidate, Tokens
from harness.golden_data import ENDED, Golden
from harness.progress import progress
from variants.errors import EngineError, UsageError
from variants.recipe import Place

ROWS_AT_ONCE = 72
ORACLE_TOP = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Battery:
    """Prompts, the tokens forced after each, and the tokens to watch at each position: int [N, T, W], -1 for none."""

    prompts: Sequence[Tokens]
    continuations: Sequence[Tokens]
    watch: np.ndarray | None = None

    @classmethod
    def of(cls, golden: Golden) -> "Battery":
        """A golden's prompts and its run 0; watched are its tokens and, where it has them, its top logprobs' ids."""
        tokens = golden.tokens[0]
        watch = tokens[..., None] if golden.top_ids is None else np.concatenate([tokens[..., None], golden.top_ids], -1)
        rows = [[int(i) for i in row if i != ENDED] for row in tokens]
        kept = [n for n, row in enumerate(rows) if row]
        return cls(prompts=[golden.prompts[n] for n in kept], continuations=[rows[n] for n in kept], watch=watch[kept])

    def part(self, rows: Sequence[int], tokens: int | None = None) -> "Battery":
        """Some of the prompts, and at most `tokens` of each continuation."""
        watch = None if self.watch is None else self.watch[list(rows), :tokens]
        continuations = [self.continuations[n][:tokens] for n in rows]
        return Battery(prompts=[self.prompts[n] for n in rows], continuations=continuations, watch=watch)

    def watching(self, *chosen: np.ndarray) -> "Battery":
        """With the tokens int [N, T] that each of some runs chose watched too, a column for each run."""
        assert self.watch is not None
        return replace(self, watch=np.concatenate([self.watch, *(c[..., None] for c in chosen)], -1))

    def beside(self, other: "Battery | None") -> "Battery":
        """With another's prompts after these, nothing watched; itself where there is no other."""
        if other is None:
            return self
        continuations = [*self.continuations, *other.continuations]
        return Battery(prompts=[*self.prompts, *other.prompts], continuations=continuations)

    def cut(self, lengths: Sequence[int]) -> "Battery":
        """The first tokens of each continuation, as many as given; prompts keep their numbers, 0 leaves one out."""
        return replace(self, continuations=[c[:n] for c, n in zip(self.continuations, lengths, strict=True)])


@dataclass(frozen=True)
class Party:
    """Who walks along: `copies` of each prompt, the first of all prompts first."""

    candidate: Candidate
    copies: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyErrors:
    """rms: float64 [C, S, P], error over a value's width. deviations: [C, P, W] logprob minus the oracle's, in nats."""

    rms: np.ndarray
    deviations: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class ErrorTable:
    """What a walk leaves, positions in the order of (prompt, t).

    positions: int [P, 2]. scale: [S, P] rms of the oracle's values. ids: int [P, W] watched tokens, -1 for none, the
    oracle's best first. oracle_logprobs: [P, W], NaN for none.
    """

    positions: np.ndarray
    scale: np.ndarray
    ids: np.ndarray
    oracle_logprobs: np.ndarray
    parties: dict[str, PartyErrors]

    def part(self, keep: np.ndarray) -> "ErrorTable":
        """The positions at which bool [P] is true."""
        parties = {
            name: PartyErrors(rms=p.rms[..., keep], deviations=p.deviations[:, keep])
            for name, p in self.parties.items()
        }
        return ErrorTable(
            positions=self.positions[keep],
            scale=self.scale[:, keep],
            ids=self.ids[keep],
            oracle_logprobs=self.oracle_logprobs[keep],
            parties=parties,
        )

    def index(self, prompt: int, t: int) -> int:
        """The position of (prompt, t). Raises UsageError where there is none."""
        found = np.flatnonzero((self.positions == (prompt, t)).all(-1))
        if not found.size:
            raise UsageError(f"prompt {prompt}, position {t} was not walked; choose one of the battery's")
        return int(found[0])

    def column(self, position: int, token: int) -> int:
        """Where `token` is among those watched. Raises UsageError where it is not."""
        found = np.flatnonzero(self.ids[position] == token)
        if not found.size or token < 0:
            at = self.positions[position].tolist()
            raise UsageError(f"token {token} was not watched at (prompt, t) = {at}; add it to the battery's watch")
        return int(found[0])


def errors_against(
    oracle: Candidate,
    parties: Mapping[str, Party],
    battery: Battery,
    places: Sequence[Place],
    *,
    begin: Callable[[int], None] = lambda group: None,
) -> ErrorTable:
    """Walk the oracle and all parties; ("lm_head", num_layers) must be among the places.

    begin: called with the number of each group of prompts before it runs. Raises EngineError for a value that is not
    finite.
    """
    head = next(place for place in places if place[0] == "lm_head")
    parts: list[_Step] = []
    walked = [n for n, forced in enumerate(battery.continuations) if forced]
    copies = sum(p.copies for p in parties.values()) + 1
    with progress("forcing", len(walked)) as done:
        lengths = [len(battery.continuations[n]) for n in walked]
        for number, near in enumerate(groups([battery.prompts[n] for n in walked], copies, lengths)):
            rows = [walked[i] for i in near]
            begin(number)
            parts += _walk_group(oracle, parties, battery, rows, tuple(places), head)
            for _ in rows:
                done()
    return _joined(parts, list(parties))


def groups(prompts: Sequence[Tokens], copies: int, steps: Sequence[int] = ()) -> list[list[int]]:
    """Prompts in groups of like length, so that `copies` of each fit one batch and little of it is padding.

    steps: tokens that follow each prompt; those that are followed by as many come together first.
    """
    size = max(1, ROWS_AT_ONCE // copies)
    order = sorted(range(len(prompts)), key=lambda i: (steps[i] if steps else 0, len(prompts[i]), i))
    return [order[i : i + size] for i in range(0, len(order), size)]


@dataclass(frozen=True)
class _Step:
    """One step of one group: an `ErrorTable` of its rows."""

    positions: np.ndarray
    scale: Tensor
    ids: Tensor
    logprobs: Tensor
    errors: dict[str, tuple[Tensor, Tensor]]


def _walk_group(
    oracle: Candidate,
    parties: Mapping[str, Party],
    battery: Battery,
    rows: list[int],
    places: tuple[Place, ...],
    head: Place,
) -> Iterator[_Step]:
    prompts, forced = [battery.prompts[n] for n in rows], [list(battery.continuations[n]) for n in rows]
    longest = max(len(f) for f in forced)
    padded = [f + [0] * (longest - len(f)) for f in forced]
    walks = [p.candidate.values(prompts * p.copies, padded * p.copies, places) for p in parties.values()]
    truth = oracle.values(prompts, padded, places)
    for t, (right, *theirs) in enumerate(zip(truth, *walks, strict=True)):
        live = [i for i, f in enumerate(forced) if len(f) > t]
        where = np.array([(rows[i], t) for i in live])
        ids = _watched(right[head], None if battery.watch is None else battery.watch[rows, t])
        best = _gathered(right[head], ids)
        errors = {}
        for (name, party), values in zip(parties.items(), theirs, strict=True):
            rms = torch.stack([_rms(values[p], right[p], party.copies) for p in places], 1)[..., live]
            own = _gathered(values[head], ids.repeat(party.copies, 1)).unflatten(0, (party.copies, -1))
            _check_finite(name, rms, places, where)
            errors[name] = rms, (own - best)[:, live]
        scale = torch.stack([right[p].pow(2).mean(-1).sqrt() for p in places])[:, live]
        yield _Step(where, scale, ids[live], best[live], errors)


def _rms(values: Tensor, right: Tensor, copies: int) -> Tensor:
    """[copies * rows, width] against [rows, width] -> [copies, rows]."""
    return (values.unflatten(0, (copies, -1)) - right).pow(2).mean(-1).sqrt()


def _watched(logits: Tensor, watch: np.ndarray | None) -> Tensor:
    """The oracle's best tokens, then the others that are wanted: int64 [rows, W], -1 where there are none."""
    best = logits.topk(min(ORACLE_TOP, logits.shape[-1]), -1).indices
    if watch is None:
        return best
    asked = torch.as_tensor(np.ascontiguousarray(watch), dtype=torch.int64, device=logits.device)
    again = (asked.unsqueeze(-1) == best.unsqueeze(1)).any(-1)
    return torch.cat([best, torch.where(again, -1, asked)], -1)


def _gathered(logits: Tensor, ids: Tensor) -> Tensor:
    """Logprobs of `ids`, NaN for -1."""
    logprobs = logits.log_softmax(-1).gather(-1, ids.clamp_min(0))
    return torch.where(ids >= 0, logprobs, torch.nan)


def _check_finite(name: str, rms: Tensor, places: tuple[Place, ...], where: np.ndarray) -> None:
    if bool(torch.isfinite(rms).all()):
        return
    _, place, row = (~torch.isfinite(rms)).nonzero()[0].tolist()
    prompt, t = where[row].tolist()
    raise EngineError(f"{name}: a value is not finite at {places[place][0]}, layer {places[place][1]}, p{prompt}[{t}]")


def _joined(steps: Sequence[_Step], names: Sequence[str]) -> ErrorTable:
    positions = np.concatenate([s.positions for s in steps])
    order = np.lexsort((positions[:, 1], positions[:, 0]))

    def cat(parts: list[Tensor], axis: int) -> np.ndarray:
        return torch.cat(parts, axis).cpu().numpy().take(order, axis)

    return ErrorTable(
        positions=positions[order],
        scale=cat([s.scale for s in steps], 1),
        ids=cat([s.ids for s in steps], 0),
        oracle_logprobs=cat([s.logprobs for s in steps], 0),
        parties={
            n: PartyErrors(
                rms=cat([s.errors[n][0] for s in steps], 2), deviations=cat([s.errors[n][1] for s in steps], 1)
            )
            for n in names
        },
    )
