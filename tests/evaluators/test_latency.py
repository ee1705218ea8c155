"""Pairs are timed in alternating order and summarised by medians; no test looks at a real clock's figure."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from evaluators.latency import measure_latency, random_feeds, summarize, time_pairs
from modelpress.errors import InvalidRequest
from modelpress.evaluations import Latency


class Machine:
    """A clock that moves only while a model runs."""

    def __init__(self) -> None:
        self.now, self.log = 0, []

    def clock(self) -> int:
        return self.now

    def model(self, name: str, cost: int):
        def run() -> None:
            self.log.append(name)
            self.now += cost

        return run


def test_pairs_alternate_their_order_after_the_warm_up():
    machine = Machine()
    times = time_pairs(
        machine.model("B", 30), machine.model("C", 10), latency=Latency(warmup=1, repeats=4), clock=machine.clock
    )
    assert "".join(machine.log) == "BC" + "BC" + "CB" + "BC" + "CB"
    assert times == ([30] * 4, [10] * 4)


def test_a_row_holds_medians_percentiles_and_the_median_of_the_paired_ratios():
    baseline = [30_000_000 + i * 1_000_000 for i in range(20)]
    candidate = [10_000_000] * 10 + [20_000_000] * 10
    row = summarize(baseline, candidate, shape=(1, 64), threads=2)
    assert (row.batch_size, row.sequence_length, row.repeats, row.threads) == (1, 64, 20, 2)
    assert (row.baseline_median_ms, row.candidate_median_ms) == (39.5, 15.0)
    assert (row.baseline_p95_ms, row.candidate_p95_ms) == (48.0, 20.0)
    ratios = sorted(base / cand for base, cand in zip(baseline, candidate, strict=True))
    assert row.speedup == pytest.approx((ratios[9] + ratios[10]) / 2)
    # ranks 6 and 15 of 20 are the 95 % interval of a median: coverage 0.9586
    assert (row.speedup_interval.low, row.speedup_interval.high) == (ratios[5], ratios[14])
    assert row.speedup_interval.confidence == pytest.approx(0.9586, abs=1e-4)


def test_tokens_are_seeded_unmasked_and_inside_the_vocabulary():
    one, same = (random_feeds(3, 50, vocabulary=11, seed=5) for _ in range(2))
    other = random_feeds(3, 50, vocabulary=11, seed=6)
    assert (one["input_ids"] == same["input_ids"]).all()
    assert not (one["input_ids"] == other["input_ids"]).all()
    assert set(np.unique(one["input_ids"])) == set(range(11))
    assert one["attention_mask"].all()
    assert not one["token_type_ids"].any()


def test_every_shape_is_measured_once_with_the_threads_stated(tmp_path, table, write_model):
    baseline, candidate = (write_model(tmp_path / name, table) for name in ("baseline", "candidate"))
    seen = []
    rows = measure_latency(
        baseline,
        candidate=candidate,
        latency=Latency(batch_sizes=(1, 2), sequence_lengths=(4, 24), warmup=1, repeats=6, threads=1),
        device="cpu",
        seed=0,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [(row.batch_size, row.sequence_length) for row in rows] == [(1, 4), (1, 24), (2, 4), (2, 24)]
    assert {(row.repeats, row.threads) for row in rows} == {(6, 1)}
    assert all(row.speedup_interval.low <= row.speedup <= row.speedup_interval.high for row in rows)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert gc.isenabled()


def test_lengths_beyond_the_model_are_refused_before_anything_runs(tmp_path, table, write_model):
    baseline, candidate = (write_model(tmp_path / name, table) for name in ("baseline", "candidate"))
    with pytest.raises(InvalidRequest, match="holds 64, but the model takes at most 24"):
        measure_latency(
            baseline, candidate=candidate, latency=Latency(), device="cpu", seed=0, progress=lambda *_: None
        )
