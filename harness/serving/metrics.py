"""Prometheus metrics of a server, read off what it counts anyway when somebody scrapes."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from harness.serving.desk import Desk
from harness.serving.sequence import Piece, Sequence

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Of one desk; `answers` is counted by the app, everything else is here."""

    def __init__(self, desk: Desk) -> None:
        self.registry = CollectorRegistry()
        self._desk = desk
        self.answers = Counter("neartie_http_responses", "Answers by path and status.", ["path", "status"],
                               registry=self.registry)  # fmt: skip
        self._first = Histogram("neartie_first_token_seconds", "Arrival to first token.", buckets=SECONDS,
                                registry=self.registry)  # fmt: skip
        self._whole = Histogram("neartie_answer_seconds", "Arrival to last token.", buckets=SECONDS,
                                registry=self.registry)  # fmt: skip
        self.registry.register(self)  # pyright: ignore[reportArgumentType]
        desk.watch = self._watch

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges as they stand."""
        desk, stats = self._desk, self._desk.engine.stats
        ended = CounterMetricFamily("neartie_sequences", "Sequences that ended, by reason.", labels=["reason"])
        for reason, count in sorted(desk.finished.items()):
            ended.add_metric([reason], count)
        yield ended
        tokens = CounterMetricFamily("neartie_tokens", "Tokens of prompts and of answers.", labels=["kind"])
        for kind in ("prompt", "completion"):
            tokens.add_metric([kind], desk.tokens[kind])
        yield tokens
        yield CounterMetricFamily("neartie_steps", "Steps of the engine.", value=desk.engine.steps)
        yield CounterMetricFamily("neartie_preemptions", "Sequences that gave pages up.", value=stats.preemptions)
        yield CounterMetricFamily("neartie_prefix_hit_tokens", "Tokens shared.", value=stats.prefix_hit_tokens)
        for name, about, value in (
            ("live", "Sequences that wait or run.", desk.live),
            ("running", "Sequences with a slot.", stats.running),
            ("slots", "Slots in all.", stats.slots),
            ("pages", "Pages in all.", stats.pages),
            ("pages_used", "Pages with an owner.", stats.pages_used),
        ):
            yield GaugeMetricFamily(f"neartie_{name}", about, value=value)

    def _watch(self, sequence: Sequence, piece: Piece) -> None:
        if piece.finish in ("stop", "length") and sequence.first_s is not None and sequence.last_s is not None:
            self._first.observe(sequence.first_s - sequence.arrived_s)
            self._whole.observe(sequence.last_s - sequence.arrived_s)
