"""What a folder is, told offline from the files that only one kind has."""

import json
import struct

import pytest

from modelpress.errors import InvalidModel, InvalidRequest
from modelpress.inspection import folder_kind, inspect_folder
from modelpress.manifests import scan_folder


def write_safetensors(file, **shapes):
    """Tensors of zeros, F32."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


@pytest.fixture
def model(tmp_path):
    config = {"model_type": "bert", "architectures": ["BertModel"], "id2label": {"0": "no", "1": "yes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", a=[2, 3], b=[5])
    return tmp_path


def test_a_model(model):
    found = inspect_folder(model)
    assert (found.kind, found.name) == ("model", f"artifacts/{scan_folder(model).digest}")
    assert (found.file_count, found.size_bytes) == (2, sum(f.stat().st_size for f in model.iterdir()))
    assert found.facts == {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "labels": ["no", "yes"],
        "quantized_by": None,
        "parameters": 11,
        "dtypes": {"F32": 11},
    }
    assert found.warnings == ()


def test_a_model_of_any_architecture_quantized_or_not(model):
    config = {"model_type": "mamba", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (model / "config.json").write_text(json.dumps(config))
    found = inspect_folder(model)
    assert (found.kind, found.facts["model_type"], found.facts["quantized_by"]) == ("model", "mamba", "gptq")
    assert (found.facts["architectures"], found.facts["labels"]) == (None, None)


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "OFT", "PROMPT_TUNING"])
def test_an_adapter_of_any_kind(model, kind):
    (model / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    found = inspect_folder(model)
    assert (found.kind, found.facts["peft_type"], found.facts["r"]) == ("adapter", kind, None)


def test_a_model_with_pickles_and_without_weights_is_warned_about(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert inspect_folder(model).warnings == (
        "pytorch_model.bin looks like a pickle, which is never loaded",
        "there are no weights as .safetensors or .onnx",
    )


def test_a_model_whose_weights_are_not_what_they_say_is_refused(model):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InvalidModel, match="Git LFS pointer"):
        inspect_folder(model)


def test_an_adapter(model):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["query"]}
    (model / "adapter_config.json").write_text(json.dumps(config))
    found = inspect_folder(model)
    assert found.kind == "adapter"
    assert (found.facts["r"], found.facts["target_modules"], found.facts["parameters"]) == (4, ["query"], 11)


def test_a_dataset(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part/a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x", "label": "a"}\r\n\n{"text": "y", "label": "b"}')
    (tmp_path / "part/b.jsonl").write_text('{"text": "z"}\n')
    found = inspect_folder(tmp_path)
    assert found.facts == {
        "files": ["part/a.jsonl", "part/b.jsonl"],
        "rows": 3,
        "columns_of_first_row": ["text", "label"],
    }


def test_an_output_is_repeated_as_a_claim(tmp_path):
    report = {"decision": {"verdict": "APPROVED"}, "conversion": "conversions/a", "model_digest": "sha256:0"}
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "config.json").write_text("{}")
    found = inspect_folder(tmp_path)
    assert found.kind == "output"
    assert (found.facts["verdict_claimed"], found.facts["signed"]) == ("APPROVED", False)
    assert "nothing here was verified" in found.warnings[0]


def test_a_folder_that_is_nothing_known_names_what_is_known(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InvalidRequest, match=r"config\.json.*adapter_config\.json.*\.jsonl.*report\.json"):
        folder_kind(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1, "a": 2}', "\xff"])
def test_a_config_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidModel, match=r"config\.json"):
        inspect_folder(tmp_path)
