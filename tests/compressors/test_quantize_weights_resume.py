"""A stage that is killed anywhere goes on after its last finished layer, to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compressors.decoders import make_decoder
from tests.compressors.quantizing import Bench, Killed, KillingMonitor
from tests.compressors.streams import FailingSink, KeepingMonitor

LAYERS = 3
RECIPES = (
    {"algorithm": "rtn"},
    {"algorithm": "gptq", "symmetric": False},
    {"algorithm": "awq"},
    {"algorithm": "signround", "training": {"steps": 4, "batch_size": 2}},
    {"algorithm": "rtn", "scheme": "w8a8", "group_size": None, "smooth_quant": 0.5},
    {"algorithm": "rtn", "scheme": "nf4"},
)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, make_decoder(tmp_path / "model", num_hidden_layers=LAYERS, dtype="bfloat16"))


@pytest.mark.parametrize("fields", RECIPES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_a_stage_killed_after_each_layer_ends_with_the_bytes_of_one_that_was_not(
    bench: Bench, fields: dict[str, object]
):
    record, whole = bench.run(**fields)
    monitor = KillingMonitor(bench.root / "checkpoint")
    for _ in range(LAYERS):
        with pytest.raises(Killed):
            bench.run(monitor=monitor, **fields)
    resumed, manifest = bench.run(monitor=monitor, **fields)
    assert manifest.digest == whole.digest
    assert [layer.error for layer in resumed.layers] == [layer.error for layer in record.layers]
    assert resumed.details == record.details


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_stage_killed_in_the_middle_of_a_file_ends_with_the_same_bytes(bench: Bench, fail_at: int):
    _, whole = bench.run()
    other = Bench(bench.root / "other", bench.model)
    monitor = KeepingMonitor(bench.root / "checkpoint")
    with pytest.raises(KeyboardInterrupt):
        other.run(monitor=monitor, sink=FailingSink(other.store, fail_at=fail_at, error=KeyboardInterrupt()))
    monitor.steps.clear()
    assert other.run(monitor=monitor)[1].digest == whole.digest


def test_finished_layers_are_not_computed_again(bench: Bench):
    first, _ = bench.run(monitor=(monitor := KeepingMonitor(bench.root / "checkpoint")))
    again, _ = bench.run(monitor=monitor)
    assert [layer.seconds for layer in again.layers] == [layer.seconds for layer in first.layers]


def test_a_layer_that_the_store_has_lost_is_made_again(bench: Bench):
    monitor = KeepingMonitor(bench.root / "checkpoint")
    _, whole = bench.run(monitor=monitor)
    lost = whole.entry(f"model-00003-of-0000{LAYERS + 1}.safetensors")
    next(path for path in bench.blobs() if path.name == lost.digest.hex).unlink()
    assert bench.run(monitor=monitor)[1].digest == whole.digest


def test_progress_counts_the_decoder_layers(bench: Bench):
    bench.run(monitor=(monitor := KeepingMonitor(bench.root / "checkpoint")))
    assert monitor.steps == [(number, LAYERS) for number in (1, 2, 3)]


@pytest.mark.parametrize("scheme", ["w4a16", "nf4"])
def test_training_of_the_whole_model_is_resumed_to_the_same_bytes(bench: Bench, scheme: str):
    fields = {"algorithm": "qat", "scheme": scheme, "training": {"steps": 4, "batch_size": 2, "checkpoint_every": 2}}
    record, whole = bench.run(**fields)
    monitor = KillingMonitor(bench.root / "checkpoint")
    for _ in range(2):
        with pytest.raises(Killed):
            bench.run(monitor=monitor, **fields)
    assert bench.run(monitor=monitor, **fields)[1].digest == whole.digest
    assert record.after["token_kl"] <= record.before["token_kl"]
