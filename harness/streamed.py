"""The float64 forward with one layer's weights in memory at a time: layer by layer over all rows.

Beside the checkpoint as it is stored, the widest thing held is one layer in float64 (or the embedding, or the head), so
a model whose weights fill most of a device can still be judged on it. Every position comes from one pass over prompt
and forced tokens; in float64 that differs from the decode path by less than 1e-10 nats.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.progress import tracked
from variants.binding import Binder
from variants.decode import padded
from variants.dtypes import DType
from variants.layers import Norm
from variants.model import Layer
from variants.recipe import Recipe
from variants.rounding import NoProbe
from variants.state import State
from variants.weights import Casts, Weights

Tokens = Sequence[int]
TOKENS_AT_ONCE = 4096  # bounds activations and, squared over a row, attention scores
ROWS_AT_ONCE = 32  # bounds recurrent states, which do not shrink with the row
HEAD_AT_ONCE = 256  # positions of logits; 0.3 GB each time at 160 k tokens of vocabulary


@dataclass
class Group:
    """Rows that run together: their indices, ids [B, W] filled up at the right, real lengths, residual stream."""

    rows: list[int]
    tokens: Tensor
    lengths: list[int]
    stream: Tensor

    def advance(self, layer: Layer, binder: Binder, piece: int) -> None:
        """Run one layer over the rows, in pieces where they are longer than `piece` tokens.

        Filling counts as tokens here: it stands at the right, where nothing before it sees it.
        """
        rows, width = self.tokens.shape
        state = State(binder.config, binder.recipe, slots=rows, max_len=width, device=str(self.stream.device))
        out = []
        for start in range(0, width, piece):
            x = self.stream[:, start : start + piece]
            batch = state.batch(range(rows), [x.shape[1]] * rows, x.shape[1], str(x.device))
            out.append(layer(x, x, batch, state)[0])  # in float64 no sum is rounded: stored and unrounded are one
            state.advance(batch.slots, batch.lengths)
        self.stream = torch.cat(out, 1) if len(out) > 1 else out[0]


@torch.inference_mode()
def streamed_logits(
    casts: Casts,
    recipe: Recipe,
    prompts: Sequence[Tokens],
    continuations: Sequence[Tokens],
    *,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (row, first position, logits [n, V] float64) until every continuation token of every row has its logits.

    casts: used by this pass alone, emptied after each layer. recipe: one that computes everything in float64. A row
    without continuation yields nothing. Rows of like length run together, at most `tokens_at_once` tokens of them.
    """
    assert recipe == recipe.at_precision(DType.f64), "the stream is carried unrounded, which holds in float64 alone"
    binder = Binder(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics), NoProbe(), -1, "prefill")
    sequences = {i: [*p, *c[:-1]] for i, (p, c) in enumerate(zip(prompts, continuations, strict=True)) if len(c)}
    groups = [_embedded(binder, rows, sequences) for rows in _grouped(sequences, tokens_at_once)]
    casts.drop()
    layers = binder.config.num_layers
    for i in tracked("oracle: layers", range(layers), layers):
        layer = Layer(binder.on(i))
        for group in groups:
            group.advance(layer, binder, tokens_at_once)
        del layer
        gc.collect()  # a block holds its own methods, so nothing else lets its weights go
        casts.drop()
    head = Head(binder)
    for group in groups:
        for row, n, stream in zip(group.rows, group.lengths, group.stream, strict=True):
            first = len(prompts[row]) - 1
            for at in range(first, n, HEAD_AT_ONCE):
                yield row, at - first, head(stream[at : min(at + HEAD_AT_ONCE, n)])
    casts.drop()


class Head:
    """The final norm and the product with lm_head: stream [n, D] -> logits [n, V]."""

    def __init__(self, binder: Binder) -> None:
        b = binder.on(binder.config.num_layers)
        self.norm = Norm(b, "final_norm", "model.norm.weight", b.config.rms_norm_eps)
        self.operand = b.at("lm_head_in")
        self.product = b.product("lm_head", b.weights.get("lm_head.weight", b.rule("lm_head").accum))

    def __call__(self, stream: Tensor) -> Tensor:
        return self.product(self.operand(self.norm(stream, stream)))


def _embedded(binder: Binder, rows: list[int], sequences: dict[int, list[int]]) -> Group:
    embedding = binder.weights.get("model.embed_tokens.weight", binder.rule("embed").accum)
    tokens, lengths = padded([sequences[i] for i in rows], binder.weights.casts.device)
    return Group(rows, tokens, lengths, binder.at("embed")(embedding[tokens]))


def _grouped(sequences: dict[int, list[int]], tokens_at_once: int) -> Iterator[list[int]]:
    """Rows in groups of like length, the longest first, each of at most `tokens_at_once` tokens with its filling."""
    order = sorted(sequences, key=lambda i: -len(sequences[i]))
    while order:
        size = min(ROWS_AT_ONCE, max(1, tokens_at_once // len(sequences[order[0]])))
        yield order[:size]
        order = order[size:]
