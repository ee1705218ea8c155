"""Greedy continuations of a few prompts by both models, to be read side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from evaluators.language_models import open_language_model
from evaluators.runtimes import Resources, read_config
from evaluators.token_comparison import ComparedModels, Progress
from evaluators.token_windows import check_vocabulary, common_tokens
from evaluators.tokenization import load_tokenizer
from modelpress.errors import InvalidDataset, InvalidModel
from modelpress.evaluations import LanguageEvaluation
from modelpress.language_reports import Generation
from modelpress.language_rows import LanguageRows, Place, read_language_rows

PROMPT_TOKENS = 32
"""Of a text that serves as a prompt."""
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class EncodedPrompt:
    place: Place
    text: str
    ids: list[int]


def generate(
    models: ComparedModels, *, data: Path, evaluation: LanguageEvaluation, resources: Resources, progress: Progress
) -> tuple[Generation, ...]:
    """Continue the first prompts of the dataset, or without any the beginnings of its first texts.

    Prompts are taken as they stand, without a chat template. Each step takes the most likely token: the model's own
    sampling settings are not looked at, save the tokens that end a text, which are the baseline's for both. One model
    is open at a time; `progress` counts continuations. Raises InvalidDataset naming the line of a prompt that is too
    long for the model.
    """
    tokenizer, config = load_tokenizer(models.baseline), read_config(models.baseline)
    prompts = encode_prompts(read_language_rows(data, evaluation), tokenizer, count=evaluation.generations)
    for prompt in prompts:
        _check_length(prompt, config, evaluation)
        check_vocabulary(prompt.ids, config)
    stop = stop_tokens(models.baseline)
    both: list[list[list[int]]] = []
    for folder in (models.baseline, models.candidate) if prompts else ():
        model, new = open_language_model(folder, resources), list[list[int]]()
        for prompt in prompts:
            new.append(model.greedy(prompt.ids, max_new_tokens=evaluation.max_new_tokens, stop=stop))
            progress(len(both) * len(prompts) + len(new), 2 * len(prompts))
        both.append(new)
        del model  # before the next one is opened
    return tuple(_compared(prompt, new, tokenizer) for prompt, *new in zip(prompts, *both, strict=True))


def encode_prompts(rows: LanguageRows, tokenizer: Any, *, count: int) -> list[EncodedPrompt]:
    """The first `count` prompts, or the first 32 tokens of the first `count` texts that have any."""
    if rows.prompts:
        return [
            EncodedPrompt(row.place, row.prompt, tokenizer(row.prompt, verbose=False)["input_ids"])
            for row in rows.prompts[:count]
        ]
    return list(islice(_beginnings(rows, tokenizer), count))


def _beginnings(rows: LanguageRows, tokenizer: Any) -> Iterator[EncodedPrompt]:
    for row in rows.texts:
        if ids := tokenizer(row.text, verbose=False)["input_ids"][:PROMPT_TOKENS]:
            yield EncodedPrompt(row.place, tokenizer.decode(ids, skip_special_tokens=True), ids)


def stop_tokens(model: Path) -> frozenset[int]:
    """`eos_token_id` of generation_config.json, else of config.json: one id, several, or none."""
    found = read_generation_config(model).get("eos_token_id", read_config(model).get("eos_token_id"))
    ids = found if isinstance(found, list) else [found]
    return frozenset(token for token in ids if isinstance(token, int))


def read_generation_config(model: Path) -> Mapping[str, Any]:
    """Empty where there is none; InvalidModel where it is no JSON object."""
    file = model / GENERATION_CONFIG
    try:
        config = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise InvalidModel(f"{GENERATION_CONFIG} is not JSON", field=GENERATION_CONFIG) from error
    if not isinstance(config, dict):
        raise InvalidModel(f"{GENERATION_CONFIG} holds no JSON object", field=GENERATION_CONFIG)
    return config


def _compared(prompt: EncodedPrompt, new: list[list[int]], tokenizer: Any) -> Generation:
    baseline, candidate = new
    return Generation(
        index=prompt.place.index,
        prompt=prompt.text,
        baseline=tokenizer.decode(baseline, skip_special_tokens=True),
        candidate=tokenizer.decode(candidate, skip_special_tokens=True),
        equal_tokens=common_tokens(baseline, candidate),
        tokens=max(map(len, new)),
    )


def _check_length(prompt: EncodedPrompt, config: Mapping[str, Any], evaluation: LanguageEvaluation) -> None:
    longest = config.get("max_position_embeddings")
    needed = len(prompt.ids) + evaluation.max_new_tokens
    if not prompt.ids:
        raise InvalidDataset(f"{prompt.place.name}: the prompt gives no token", field=evaluation.prompt_column)
    if isinstance(longest, int) and needed > longest:
        raise InvalidDataset(
            f"{prompt.place.name}: {len(prompt.ids)} tokens and max_new_tokens {evaluation.max_new_tokens} are more "
            f"than the {longest} that the model takes",
            field=evaluation.prompt_column,
        )
