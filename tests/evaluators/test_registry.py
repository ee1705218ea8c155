"""Every task that an evaluation may name has its evaluator."""

from __future__ import annotations

from typing import get_args

from evaluators.registry import TASKS
from modelpress.evaluations import Evaluation


def test_the_registry_knows_exactly_the_tasks_that_may_be_asked_for():
    assert set(TASKS) == set(get_args(Evaluation.model_fields["task"].annotation))
