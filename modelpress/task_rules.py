"""The two tasks that models are judged by, and which of them a recipe's stages are for."""

from __future__ import annotations

from collections.abc import Mapping

from modelpress.errors import InvalidRequest
from modelpress.recipes import ENCODER_STAGES, Recipe

CLASSIFIER_TASK = "text-classification"
LANGUAGE_TASK = "text-generation"
EVALUATION_DATA: Mapping[str, str] = {CLASSIFIER_TASK: "labelled dataset", LANGUAGE_TASK: "dataset of texts"}
"""What the verdict is measured on, by task."""


def check_task(recipe: Recipe, task: str) -> None:
    """The evaluation's task is the one that the recipe's stages are for; merging and exporting are for either."""
    method = next((stage.method for stage in recipe.stages if stage.method in ENCODER_STAGES), None)
    wanted = LANGUAGE_TASK if recipe.quantize_weights else CLASSIFIER_TASK if method else task
    if task != wanted:
        raise InvalidRequest(
            f"evaluation.task is {task!r}, and the recipe's {method or 'quantize_weights'!r} is for models of the task "
            f"{wanted!r}: write `task: {wanted}` into the evaluation document (`--evaluation`)",
            field="evaluation.task",
            reason="TASK_MISFIT",
        )
