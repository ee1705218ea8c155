"""Which modules an adapter is on: PEFT's own answer, for several hundred generated configurations and names."""

from __future__ import annotations

import random
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from compressors.target_modules import Targeting, matching_key

MODULES = (
    "lm_head",
    "q_proj",
    "score",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.10.self_attn.k_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.1.mlp.experts.0.down_proj",
    "model.layers.0.mlp.experts.1.down_proj",
    "transformer.h.1.attn.c_proj",
    "transformer.h.0.mlp.c_proj",
    "bert.encoder.layer.1.attention.self.query",
    "encoder.block.0.layer.1.DenseReluDense.wi",
    "decoder.block.1.layer.0.SelfAttention.q",
    "vision.layers.1.blocks.0.self_attn.q_proj",
    "xq_proj",
    "model.layers.0.lm_head_norm",
)
NAMES = (
    *("q_proj", "k_proj", "down_proj", "c_proj", "lm_head", "q", "wi", "query", "self_attn.q_proj", "proj", "layers"),
    *("mlp.experts.0.down_proj", "layers.1.self_attn.q_proj", "1.self_attn.q_proj", "model.embed_tokens", "score"),
)
EXPRESSIONS = (
    r".*\.(q|k)_proj",
    r".*layers\.(0|1)\..*",
    "q_proj",
    r"(?!.*experts).*down_proj",
    r".*",
    r"model\.layers\.\d\..*",
    r".*q_proj$",
)
PATTERNS = ("layers", "h", "block", "layer", "blocks", "experts", "nope", r"lay\w+")


def configuration(seed: int) -> dict[str, Any]:
    """One configuration; most fields are left out most of the time."""
    draw = random.Random(seed)

    def some(names: tuple[str, ...]) -> list[str]:
        return draw.sample(names, draw.randint(1, 3))

    fields: dict[str, Any] = {
        "target_modules": draw.choice([some(NAMES), draw.choice(EXPRESSIONS)]),
        "exclude_modules": draw.choice([None, None, some(NAMES), draw.choice(EXPRESSIONS)]),
        "modules_to_save": draw.choice([None, None, some(("lm_head", "score", "embed_tokens", "q_proj"))]),
    }
    if isinstance(fields["target_modules"], list):
        fields["layers_to_transform"] = draw.choice([None, 0, 1, [0], [1, 10], [11], []])
        if fields["layers_to_transform"] not in (None, []):
            patterns = [None, draw.choice(PATTERNS), draw.sample(PATTERNS, 2)]
            fields["layers_pattern"] = draw.choice(patterns)
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_the_modules_are_those_of_peft(first: int) -> None:
    answers: list[bool] = []
    for seed in range(first, first + 100):
        fields = configuration(seed)
        ours, theirs = Targeting.model_validate(fields), LoraConfig(**fields)
        for module in MODULES:
            expected = bool(check_target_module_exists(theirs, module))
            assert ours.targets(module) == expected, (fields, module)
            answers.append(expected)
    assert 100 < sum(answers) < len(answers) - 100


def test_without_names_nothing_is_targeted() -> None:
    assert not any(Targeting(target_modules=None).targets(module) for module in MODULES)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj"],
        ["self_attn.q_proj", "q_proj"],
        [r"layers\.0\..*", "down_proj"],
        ["layers.1.self_attn.q_proj"],
        [r".*\.[01]\..*_proj"],
        ["^model.layers.0.self_attn.q_proj"],
        ["proj"],
        ["a|c_proj", "query"],
    ],
)
def test_ranks_and_alphas_are_looked_up_as_peft_does(patterns: list[str], module: str) -> None:
    assert matching_key(dict.fromkeys(patterns, 1), module) == get_pattern_key(patterns, module)
