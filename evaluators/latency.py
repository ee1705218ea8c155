"""Latency: baseline and candidate timed in turn in one process, so that both meet the same machine.

The order within a pair alternates (ABBA), so that neither always runs on the caches that the other left. The figure
is the median over the pairs of baseline time / candidate time: a slow moment hits both sides of one pair and leaves
the median alone. The interval speaks about this run on this machine, not about other machines or days.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import numpy as np

from evaluators.runtimes import Feeds, OnnxModel, Resources, open_onnx
from modelpress.errors import InvalidModel, InvalidRequest
from modelpress.evaluations import Latency
from modelpress.gate_judges import SPEED_CONFIDENCE
from modelpress.intervals import median_interval
from modelpress.reports import LatencyRow

VERSION = 2

Progress = Callable[[int, int], None]
"""Called with shapes done and shapes in all."""


def measure_latency(
    baseline: Path, *, candidate: Path, latency: Latency, device: str, seed: int, progress: Progress
) -> tuple[LatencyRow, ...]:
    """Time both models at every batch size x sequence length of `latency`, with `latency.threads` threads.

    The tokens are random ids of the vocabulary without padding, equal for both models.
    """
    resources = Resources(device=device, threads=latency.threads)
    models = (open_onnx(baseline, resources), open_onnx(candidate, resources))
    _check_lengths(models, latency.sequence_lengths)
    shapes = [(batch, length) for batch in latency.batch_sizes for length in latency.sequence_lengths]
    rows = []
    for batch, length in shapes:
        feeds = random_feeds(batch, length, vocabulary=_vocabulary(models), seed=seed)
        runs = [partial(model.logits, feeds) for model in models]
        with _no_garbage_collection():
            times = time_pairs(runs[0], runs[1], latency=latency, clock=perf_counter_ns)
        rows.append(summarize(*times, shape=(batch, length), threads=latency.threads))
        progress(len(rows), len(shapes))
    return tuple(rows)


def time_pairs(
    baseline: Callable[[], object], candidate: Callable[[], object], *, latency: Latency, clock: Callable[[], int]
) -> tuple[list[int], list[int]]:
    """Nanoseconds of every repeat of both, in pairs of alternating order, after `latency.warmup` untimed pairs."""
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(latency.warmup):
        baseline()
        candidate()
    for repeat in range(latency.repeats):
        order = ((0, baseline), (1, candidate)) if repeat % 2 == 0 else ((1, candidate), (0, baseline))
        for side, run in order:
            start = clock()
            run()
            times[side].append(clock() - start)
    return times


def summarize(
    baseline_ns: Sequence[int], candidate_ns: Sequence[int], *, shape: tuple[int, int], threads: int
) -> LatencyRow:
    """Medians, nearest-rank 95th percentiles and the median speed-up over the pairs, with its interval."""
    ratios = [base / cand for base, cand in zip(baseline_ns, candidate_ns, strict=True)]
    return LatencyRow(
        batch_size=shape[0],
        sequence_length=shape[1],
        repeats=len(ratios),
        threads=threads,
        baseline_median_ms=median(baseline_ns) / 1e6,
        baseline_p95_ms=_p95(baseline_ns) / 1e6,
        candidate_median_ms=median(candidate_ns) / 1e6,
        candidate_p95_ms=_p95(candidate_ns) / 1e6,
        speedup=median(ratios),
        speedup_interval=median_interval(ratios, confidence=SPEED_CONFIDENCE),
    )


def random_feeds(batch: int, length: int, *, vocabulary: int, seed: int) -> Feeds:
    """Token ids drawn evenly from the vocabulary, nothing masked; the same for the same seed and shape."""
    ids_NT = np.random.default_rng([seed, batch, length]).integers(0, vocabulary, size=(batch, length), dtype=np.int64)
    return {"input_ids": ids_NT, "attention_mask": np.ones_like(ids_NT), "token_type_ids": np.zeros_like(ids_NT)}


def _p95(times_ns: Sequence[int]) -> int:
    return sorted(times_ns)[math.ceil(0.95 * len(times_ns)) - 1]


def _vocabulary(models: Sequence[OnnxModel]) -> int:
    sizes = [model.config.get("vocab_size") for model in models]
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(known) != len(sizes):
        raise InvalidModel("config.json: `vocab_size` is missing: random tokens need it", field="vocab_size")
    return min(known)


def _check_lengths(models: Sequence[OnnxModel], lengths: Sequence[int]) -> None:
    limits = [model.config.get("max_position_embeddings") for model in models]
    longest = min((limit for limit in limits if limit), default=max(lengths))
    if max(lengths) > longest:
        raise InvalidRequest(
            f"latency.sequence_lengths holds {max(lengths)}, but the model takes at most {longest} tokens",
            field="evaluation.latency.sequence_lengths",
        )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in one side of a pair would be measured as that model's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
