"""What is measured on an exported BERT is what the torch model answers, text by text and without padding."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from evaluators.footprint import measure_footprint
from evaluators.runtimes import Resources
from evaluators.text_classification import predict_probes
from evaluators.tokenization import load_tokenizer
from modelpress.evaluations import Evaluation

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12", "w13 w14"]


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).logits


@pytest.fixture
def exported(tmp_path, tokenizer_folder):
    """A tiny seeded BERT and the folder of its export."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=24,
        id2label={0: "no", 1: "yes"},
        label2id={"no": 0, "yes": 1},
        attn_implementation="eager",
    )
    model = BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    config.save_pretrained(folder)
    example = tuple(torch.ones((2, 5), dtype=torch.int64) for _ in range(3))
    free = {0: torch.export.Dim("N", min=1, max=64), 1: torch.export.Dim("T", min=2, max=24)}
    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        Logits(model).eval(),
        example,
        folder / "model.onnx",
        dynamo=True,
        dynamic_shapes=dict.fromkeys(names, free),
        input_names=names,
        output_names=["logits"],
        external_data=False,
        verbose=False,
    )
    return model, folder


@pytest.mark.filterwarnings("ignore")  # of the exporter, about names and its own future
def test_padded_batches_in_the_runtime_answer_as_torch_does_on_single_texts(tmp_path, exported, write_rows):
    model, folder = exported
    data = write_rows(tmp_path / "d", [{"text": text} for text in TEXTS])
    evaluation = Evaluation(max_length=24, batch_size=3)
    found = predict_probes(folder, data=data, evaluation=evaluation, resources=Resources(), progress=lambda *_: None)
    tokenizer = load_tokenizer(folder)
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits[0].numpy() for text in TEXTS]
    np.testing.assert_allclose(found.logits, expected, atol=1e-5)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert measure_footprint(folder, candidate=folder).candidate_parameters == parameters
