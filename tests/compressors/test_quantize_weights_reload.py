"""What is stored loads in transformers and computes what the layers computed that were calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressors.decoder_layers import DecoderLayers
from compressors.layer_algorithms import layer_output
from compressors.layer_streams import stored_layer
from compressors.quantization_plan import QuantizationPlan
from compressors.quantization_progress import FinishedLayer
from compressors.weight_files import WeightFiles, read_json
from modelpress.manifests import Manifest
from modelpress.reports import StageRecord
from service.storage.stored_folders import StoredFolder
from tests.compressors.decoders import make_decoder, trained_decoder
from tests.compressors.quantizing import Bench

CPU = torch.device("cpu")
IDS_BT = torch.randint(4, 128, (2, 24), generator=torch.Generator().manual_seed(1))
CASES = (
    ("llama", {"algorithm": "gptq"}),
    ("mistral", {"algorithm": "awq"}),
    ("qwen2", {"algorithm": "signround", "training": {"steps": 4, "batch_size": 2}}),
    ("qwen3", {"algorithm": "gptq", "group_size": 64}),
    ("llama", {"scheme": "w8a16", "group_size": None}),
)


def calibrated_states(bench: Bench, record: StageRecord, manifest: Manifest, **fields: object) -> torch.Tensor:
    """The last layer's outputs [B, T, H] as the stage computes them, layer by layer, from the stored files."""
    decoder = DecoderLayers.open(WeightFiles.read(bench.base), read_json(bench.base, "config.json"), device=CPU)
    plan = QuantizationPlan.of(bench.arguments(**fields), decoder)
    written, hidden_BTH = StoredFolder(manifest, bench.store), decoder.embedding()(IDS_BT)
    for number, arguments in enumerate(decoder.arguments(IDS_BT.shape[1])):
        entry = manifest.entry(f"model-0000{number + 2}-of-0000{len(decoder) + 1}.safetensors")
        records = record.layers[7 * number : 7 * number + 7]
        layer = stored_layer(plan, number, FinishedLayer.of(entry, records, {}), written=written)
        hidden_BTH = layer_output(layer, hidden_BTH, arguments)
    return hidden_BTH


@pytest.mark.parametrize(("model_type", "fields"), CASES, ids=str)
@torch.no_grad()
def test_a_reloaded_model_is_the_one_that_was_calibrated(tmp_path: Path, model_type: str, fields: dict[str, object]):
    bench = Bench(tmp_path, make_decoder(tmp_path / "model", model_type=model_type))
    record, manifest = bench.run(**fields)
    model = AutoModelForCausalLM.from_pretrained(bench.folder(manifest), dtype=torch.float32)
    found = model(input_ids=IDS_BT, output_hidden_states=True).hidden_states[-1]
    expected = model.model.norm(calibrated_states(bench, record, manifest, **fields))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_tokenizer_and_its_chat_template_load(tmp_path: Path):
    bench = Bench(tmp_path, make_decoder(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(bench.folder(bench.run_uncalibrated()[1]))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w3 w4"}], tokenize=False) == "<s> w3 w4 </s>"


@pytest.mark.slow
@torch.no_grad()
def test_calibrated_codes_beat_rounding_on_a_trained_model(tmp_path: Path):
    bench = Bench(tmp_path, trained_decoder())
    base = AutoModelForCausalLM.from_pretrained(trained_decoder())(input_ids=IDS_BT).logits
    errors = {}
    for algorithm in ("rtn", "gptq"):
        _, manifest = bench.run(algorithm=algorithm, calibration_samples=32)
        model = AutoModelForCausalLM.from_pretrained(bench.folder(manifest), dtype=torch.float32)
        errors[algorithm] = float((model(input_ids=IDS_BT).logits - base).norm())
    assert errors["gptq"] < errors["rtn"]
