"""An evaluation names two columns and the shapes that are timed, each once."""

from __future__ import annotations

import pytest

from modelpress.errors import InvalidRequest
from modelpress.evaluations import Evaluation, read_evaluation


def test_every_field_has_a_default() -> None:
    assert read_evaluation("{}") == Evaluation()
    assert Evaluation().latency.sequence_lengths == (16, 64)


@pytest.mark.parametrize(
    ("text", "field", "mentions"),
    [
        ("task: translation", "task", "text-classification"),
        ("text_column: ''", "text_column", "1 character"),
        ("{text_column: a, label_column: a}", "", "two columns"),
        ("latency: {batch_sizes: []}", "latency.batch_sizes", "1 or more"),
        ("latency: {batch_sizes: [0]}", "latency.batch_sizes[0]", "greater than or equal to 1"),
        ("latency: {batch_sizes: [yes]}", "latency.batch_sizes[0]", "integer"),
        ("latency: {sequence_lengths: [8, 8]}", "latency.sequence_lengths", "twice"),
        ("latency: {repeat: 3}", "latency.repeat", "did you mean 'repeats'?"),
        ("confidence: 0.5", "confidence", "greater than 0.5"),
        ("max_length: 1", "max_length", "2"),
    ],
)
def test_what_cannot_be_measured_is_refused(text: str, field: str, mentions: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_evaluation(text)
    assert caught.value.field == field
    assert mentions in caught.value.message
