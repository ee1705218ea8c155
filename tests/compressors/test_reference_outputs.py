"""What SignRound aims at is what the unquantized model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compressors.activations import NonFiniteError
from compressors.compute_types import fastest_products
from compressors.decoder_layers import DecoderLayers
from compressors.reference_outputs import ReferenceOutputs
from compressors.weight_files import WeightFiles, read_json
from tests.compressors.decoders import VOCABULARY, make_decoder
from tests.compressors.quantizing import Bench

LAYERS = 3
CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, make_decoder(tmp_path / "model", num_hidden_layers=LAYERS))


@pytest.mark.parametrize("asked", [(0, 1, 2), (1, 2), (2, 2)])
def test_each_layer_has_the_hidden_states_of_the_whole_model(bench: Bench, asked: tuple[int, ...]):
    ids_NT = torch.randint(VOCABULARY, (5, 16), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()
    caught: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _module, _inputs, out, number=number: caught.update({number: out}))
    decoder = DecoderLayers.open(WeightFiles.read(bench.base), read_json(bench.base, "config.json"), device=CPU)
    with torch.no_grad():
        with fastest_products(CPU):
            model(ids_NT)
        reference = ReferenceOutputs.embed(decoder, ids_NT, scratch=bench.root)
        for number in asked:
            (found_NTH,) = reference.of(number).batches(8)
            assert torch.allclose(found_NTH, caught[number], atol=1e-5)
    assert len(list(bench.root.glob("reference-*"))) == 1


def test_the_layer_that_gives_nan_is_known_whichever_was_asked_for(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """As after a resume, where the first layer asked for is a later one."""
    decoder = DecoderLayers.open(WeightFiles.read(bench.base), read_json(bench.base, "config.json"), device=CPU)
    load = DecoderLayers.load

    def damaged(decoder: DecoderLayers, number: int) -> torch.nn.Module:
        layer = load(decoder, number)
        if number == 1:
            layer.get_parameter("mlp.down_proj.weight").fill_(float("nan"))
        return layer

    monkeypatch.setattr(DecoderLayers, "load", damaged)
    reference = ReferenceOutputs.embed(decoder, torch.zeros(2, 16, dtype=torch.long), scratch=bench.root)
    with torch.no_grad(), pytest.raises(NonFiniteError):
        reference.of(2)
    assert reference.layers_run == 1
