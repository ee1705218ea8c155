"""docs/documents.md has every field of recipe, policy and evaluation, with its default, and nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelpress.documents import Document
from modelpress.evaluations import Evaluation, LanguageEvaluation, Latency, read_evaluation
from modelpress.merge_recipes import Merge, MergeLora, MergeModels
from modelpress.policies import (
    AccuracyDrop,
    Flips,
    Gates,
    KlMean,
    KlP99,
    MergeChange,
    MergeDifference,
    MergeLogits,
    Parity,
    Perplexity,
    Size,
    Speed,
    Top1Agreement,
    read_policy,
)
from modelpress.quantization_recipes import QuantizeWeights, WeightTraining
from modelpress.recipes import Export, Prune, Quantize, Recover, TrainingArguments, read_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "documents.md").read_text()
ROW = re.compile(r"^\| `(?P<field>[\w.]+)` \| (?P<defaults>.+) \| [^|]+ \|$", re.MULTILINE)
READERS = {"Recipe": read_recipe, "Policy": read_policy, "Evaluation": read_evaluation}
TRAINING = set(TrainingArguments.model_fields)
MERGING = set(Merge.model_fields)
STAGES = {
    **{"merge_lora": MergeLora, "merge_models": MergeModels},
    **{"prune": Prune, "recover": Recover, "quantize": Quantize, "export": Export},
    "quantize_weights": QuantizeWeights,
}
GATES: dict[str, type[Document]] = {
    "accuracy_drop": AccuracyDrop,
    "flips": Flips,
    "kl_mean": KlMean,
    "kl_p99": KlP99,
    "size": Size,
    "speed": Speed,
    "parity": Parity,
    "perplexity": Perplexity,
    "top1_agreement": Top1Agreement,
    "merge_difference": MergeDifference,
    "merge_logits": MergeLogits,
    "merge_change": MergeChange,
}


def rows() -> Iterator[tuple[str, str]]:
    for method, stage in STAGES.items():
        for name in sorted(set(stage.model_fields) - TRAINING - MERGING - {"method", "training"}):
            yield f"{method}.{name}", default(stage, name)
    yield from ((name, default(Merge, name)) for name in MERGING)
    for name in TRAINING:
        yield name, f"{default(Recover, name)} | {default(Quantize, name)}"
    yield from ((f"training.{name}", default(WeightTraining, name)) for name in WeightTraining.model_fields)
    for gate, kind in GATES.items():
        yield from ((f"{gate}.{name}", default(kind, name)) for name in kind.model_fields)
    for name in set(Evaluation.model_fields) - {"latency"}:
        yield name, default(Evaluation, name)
    yield from ((f"latency.{name}", default(Latency, name)) for name in Latency.model_fields)
    for name in set(LanguageEvaluation.model_fields) - {"task"}:
        yield name, default(LanguageEvaluation, name)


def default(kind: type[Document], name: str) -> str:
    field = kind.model_fields[name]
    value: Any = field.default
    if field.is_required():
        return "required"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def test_the_gates_are_all_that_a_policy_has() -> None:
    assert list(GATES) == list(Gates.model_fields)


def test_the_tables_are_the_types() -> None:
    found = sorted((row["field"], row["defaults"]) for row in ROW.finditer(PAGE))
    assert found == sorted(rows())


@pytest.mark.parametrize("section", READERS)
def test_the_examples_can_be_read(section: str) -> None:
    text = PAGE.partition(f"\n## {section}\n")[2]
    examples = re.findall(r"```yaml\n(.*?)```", text.partition("\n## ")[0], flags=re.DOTALL)
    assert examples
    for example in examples:
        READERS[section](example)
