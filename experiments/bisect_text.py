"""What `neartie bisect` found, for a terminal."""

from typing import Any

from harness.first_difference import Excess, FirstDifference
from harness.localize import Flip
from harness.shares import Shares
from harness.text_table import text_table

LISTED = 12


def token_text(document: dict[str, Any]) -> str:
    """First differences, then the minimal set, its margins and what it cost."""
    if document["place"] is None:
        return f"{document['reason']} ({document['forwards']} forwards)"
    p, t = document["place"]
    flip: Flip = document["flip"]
    head = f"p{p}[{t}], forced along the golden ({document['golden_token']} there)"
    return "\n".join(
        [
            f"{document['a']} chooses {flip.token_a}, {document['b']} {flip.token_b} at {head}",
            *_first(document["first"]),
            *_flip(document, flip),
            *(f"captured: {path}" for path in document["captures"]),
            *([document["note"]] if "note" in document else []),
        ]
    )


def _first(first: FirstDifference) -> list[str]:
    if first.at_all is None:
        return ["no value differs under A's execution: the difference is in how they are run"]
    v = first.at_all
    return [
        f"first value that differs: {_place(v.site, v.layer)}, step {v.step}, by {v.relative:.2g} of its size",
        f"beyond rounding:          {_excess(first.beyond)}",
        f"in function, at float64:  {_excess(first.function)}",
    ]


def _excess(found: tuple[Excess, ...]) -> str:
    if not found:
        return "nothing; each operation is within what the coarser rule rounds"
    told = ", ".join(f"{_place(e.site, e.layer)} ({e.ratio:.3g}x its bound)" for e in found[:3])
    return told + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _flip(document: dict[str, Any], flip: Flip) -> list[str]:
    lines = ["", document["reason"]]
    if flip.minimal:
        lines += [
            f"logit of {flip.token_a} over {flip.token_b}, in nats: A {flip.margin_a:+.4g}, A with these places of B "
            f"{flip.margin_swapped:+.4g}, B {flip.margin_b:+.4g}",
            f"{len(flip.minimal)} of {len(flip.candidates)} places that differ; "
            + ("checked: with one fewer the token stays" if flip.one_minimal else "NOT 1-minimal"),
        ]
    if flip.alone is not None:
        lines.append(f"by itself the token is flipped by {len(flip.alone)} of them: {_places(flip.alone)}")
    if not flip.complete:
        lines.append("all places together do not give B's logits: B differs in something that is no place")
    cost = document["forwards"]
    lines.append(
        f"{flip.sets} sets tried in {flip.forwards} forwards; the first difference took {cost['first_difference']}, "
        f"finding the place {cost['finding_the_place']}"
    )
    return lines


def _places(places: tuple[tuple[str, int], ...]) -> str:
    told = ", ".join(_place(*place) for place in places[:LISTED])
    return (told or "none") + (f" and {len(places) - LISTED} more" if len(places) > LISTED else "")


def _place(site: str, layer: int) -> str:
    return site if layer < 0 else f"{site}@{layer}"


def shares_text(document: dict[str, Any]) -> str:
    """A row an axis, the largest share first; what was refused and what it cost."""
    found: Shares = document["shares"]
    rows = [[s.axis, f"{s.share:+.2f}", f"{s.error:.2f}", f"{s.low:+g} to {s.high:+g}"] for s in found.shares]
    rows.append(["sum", f"{found.after - found.before:+.2f}", "", ""])
    how = "every order that can run" if found.exact else f"{found.orders} orders drawn with a seed"
    lines = [
        f"{document['a']} {found.before:g}, {document['b']} {found.after:g} of {document['tokens']} tokens, "
        + ("free-running" if document["score"] == "free" else "teacher-forced"),
        "",
        text_table(("axis", "tokens", "error", "in one order"), rows),
        f"{how} ({found.acceptance:.0%} of all); {found.evaluated} sets scored in {document['forwards']} forwards",
    ]
    if document["refused_sets"]:
        worst = document["refused"][0]
        lines.append(f"{document['refused_sets']} sets cannot run, so no order passes through them; the smallest:")
        lines.append(f"  {', '.join(worst['axes'])}: {worst['why']}")
    return "\n".join(lines)
