"""Do base, recipe and datasets of a language model fit together? Judged from their facts, each misfit one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from compressors.decoder_families import DECODERS, STATIC_ROPE
from compressors.decoder_targets import choose_targets, misfits
from modelpress.errors import InvalidDataset, InvalidModel, InvalidRecipe, InvalidRequest
from modelpress.evaluations import AnyEvaluation, LanguageEvaluation
from modelpress.language_rows import asked_columns
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.recipes import Recipe
from service.fit import Facts, overlap_warnings, refuse_dataset
from service.language_estimates import stored_dtype

EVALUATION, TRAIN = "inputs.evaluation", "inputs.train"


def check_task(base: Facts, evaluation: AnyEvaluation) -> None:
    """The evaluation measures what the base does."""
    task = base["task"]
    if task != evaluation.task:
        raise InvalidRequest(
            f"evaluation.task is {evaluation.task!r}, and inputs.base is a {base['architecture']} for {task!r}: write "
            f"`task: {task}` into the evaluation document (`--evaluation`), or name another base",
            reason="TASK_MISFIT",
            field="evaluation.task",
        )


def check_windows(recipe: Recipe, evaluation: LanguageEvaluation, base: Facts) -> None:
    """No window and no continuation is longer than the model's positions."""
    lengths = {"evaluation.window": evaluation.window, "evaluation.max_new_tokens": evaluation.max_new_tokens}
    for field, stage in _quantizers(recipe):
        lengths[f"{field}.sequence_length"] = stage.sequence_length
    most = base["max_positions"]
    for field, length in lengths.items():
        if length > most:
            raise InvalidRequest(
                f"{field} is {length}: the model takes at most {most} tokens: set it to {most} or less",
                reason="TOO_LONG",
                field=field,
            )


def check_targets(recipe: Recipe, base: Facts) -> None:
    """Every name of `targets` and `ignore` matches, the groups divide as many targets as the recipe asks for, and the
    weights have a dtype that scales can have.
    """
    for field, stage in _quantizers(recipe):
        if "F64" in base["dtypes"]:
            raise InvalidModel(
                f"inputs.base has weights in F64, and {field} reads F32, BF16 and F16: save the model in one of them",
                reason="BAD_TENSORS",
                field="inputs.base",
            )
        try:
            targets = choose_targets(stage, DECODERS[base["model_type"]], layers=base["layers"])
            odd = misfits(stage, targets, base["tensors"])
        except InvalidRecipe as fault:
            sentence = f"{field}.{fault.message}"
            raise InvalidRecipe(sentence, reason=fault.reason, field=f"{field}.{fault.field}") from None
        if stage.scale_dtype == "stored" and recipe.merge is None:
            _check_one_dtype([name for name in targets.quantized if name not in odd], base, field=field)


def check_positions(recipe: Recipe, base: Facts) -> None:
    """A graph can compute the model's positions."""
    if recipe.export.format == "onnx" and base["rope_type"] not in STATIC_ROPE:
        raise InvalidRequest(
            f"recipe.export.format is 'onnx', and the rope_type {base['rope_type']!r} of inputs.base depends on the "
            "text's length, which a graph cannot: export another format, or save the model with one of "
            f"{', '.join(STATIC_ROPE)}",
            reason="POSITIONS_MISFIT",
            field="recipe.export.format",
        )


def language_warnings(recipe: Recipe, evaluation: LanguageEvaluation, datasets: Mapping[str, Facts]) -> Iterator[str]:
    """Check every dataset; what is odd but possible comes back as sentences. `datasets` by field."""
    for field, dataset in datasets.items():
        yield from dataset["warnings"]
        if field == TRAIN:
            check_calibration_texts(dataset, evaluation.text_column)
        else:
            check_rows(dataset, evaluation, field=field)
    if TRAIN in datasets:
        yield from _calibration_warnings(recipe, evaluation, datasets)


def check_calibration_texts(dataset: Facts, column: str) -> None:
    """Every row has a text."""
    if column not in dataset["columns"]:
        _no_column(dataset, column, TRAIN)
    facts = dataset["columns"][column]
    if facts["missing_at"]:
        refuse_dataset(f"{facts['missing_at']}: no column {column!r}, which other rows have", TRAIN)
    _check_kind(dataset, column, "not_text", expected="text", field=TRAIN)
    _check_not_empty(dataset, column, TRAIN)


def check_rows(dataset: Facts, evaluation: LanguageEvaluation, *, field: str) -> None:
    """Every row is a text, a question or a prompt, and there are texts."""
    if evaluation.text_column not in dataset["columns"]:
        _no_column(dataset, evaluation.text_column, field)
    for columns, place in dataset["row_kinds"]:
        try:
            asked_columns(columns, place, evaluation)
        except InvalidDataset as misfit:
            refuse_dataset(misfit.message, field)
    for column, fault, expected in (
        (evaluation.text_column, "not_text", "text"),
        (evaluation.prompt_column, "not_text", "text"),
        (evaluation.choices_column, "not_choices", "a list of two or more texts, all different and none empty"),
        (evaluation.answer_column, "not_count", "the number of the right choice, from 0"),
    ):
        if column in dataset["columns"]:
            _check_kind(dataset, column, fault, expected=expected, field=field)
    for answer, choices, place, value, count in dataset["answers_beyond"]:
        if (answer, choices) == (evaluation.answer_column, evaluation.choices_column):
            refuse_dataset(f"{place}: column {answer!r} holds {value}: the {count} choices are counted from 0", field)
    _check_not_empty(dataset, evaluation.text_column, field)


def _calibration_warnings(
    recipe: Recipe, evaluation: LanguageEvaluation, datasets: Mapping[str, Facts]
) -> Iterator[str]:
    train = datasets[TRAIN]
    if recipe.quantize_weights is None:
        yield f"{TRAIN} is set, and no stage of the recipe reads it"
        return
    if recipe.needs_training_data:
        yield from overlap_warnings(datasets[EVALUATION], train, evaluation.text_column)
    size = train["columns"][evaluation.text_column]["text_bytes"]
    for field, stage in _quantizers(recipe):
        wanted = stage.calibration_samples * stage.sequence_length
        if size < wanted:
            yield (
                f"{field} asks for {wanted} calibration tokens (calibration_samples x sequence_length), and the "
                f"training texts have {size} bytes, which cannot be as many"
            )


def _quantizers(recipe: Recipe) -> Iterator[tuple[str, QuantizeWeights]]:
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, QuantizeWeights):
            yield f"recipe.stages[{index}]", stage


def _check_one_dtype(modules: Sequence[str], base: Facts, *, field: str) -> None:
    """The weights of these modules have one dtype, which their scales can take over."""
    first, *others = (f"{module}.weight" for module in modules)
    other = next((name for name in others if stored_dtype(name, base) != stored_dtype(first, base)), None)
    if other is not None:
        raise InvalidModel(
            f"inputs.base: tensor {other!r} has dtype {stored_dtype(other, base)}, and {first!r} has "
            f"{stored_dtype(first, base)}: save the model in one dtype, or, with an integer scheme, set "
            f"{field}.scale_dtype",
            reason="BAD_TENSORS",
            field=other,
        )


def _check_not_empty(dataset: Facts, column: str, field: str) -> None:
    if dataset["columns"][column]["text_bytes"] == 0:
        refuse_dataset(f"every text in column {column!r} is empty: name a column that has some", field)


def _check_kind(dataset: Facts, column: str, fault: str, *, expected: str, field: str) -> None:
    place, kind = dataset["columns"][column][fault]
    if place:
        refuse_dataset(f"{place}: column {column!r} holds {kind}, expected {expected}", field)


def _no_column(dataset: Facts, column: str, field: str) -> NoReturn:
    here = ", ".join(dataset["columns"])[:200]
    cure = "write `text_column: NAME` into the evaluation document (`--evaluation`)"
    raise InvalidDataset(f"{field}: no column {column!r}; columns here: {here}: {cure}", field=field)
