"""A policy is what people wrote, or one sentence that names the field."""

from __future__ import annotations

import pytest

from modelpress.errors import InvalidPolicy
from modelpress.policies import read_policy


def test_defaults_fill_what_is_left_out():
    policy = read_policy("gates: {accuracy_drop: {max: 0.01}, speed: {min_ratio: 3}}")
    assert policy.gates.accuracy_drop.confidence == 0.95
    assert (policy.gates.speed.batch_size, policy.gates.speed.sequence_length) == (1, 64)
    assert policy.gates.flips is None


def test_the_digest_names_the_meaning_not_the_spelling():
    one = read_policy("gates:\n  size: {max_ratio: 0.3}  # small\n")
    other = read_policy('{"gates": {"size": {"max_ratio": 0.30}}}')
    assert one.digest == other.digest != read_policy("gates: {size: {max_ratio: 0.31}}").digest


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("gates: {}", "gates", "at least one gate"),
        ("gates: {sise: {max_ratio: 0.3}}", "gates.sise", "did you mean 'size'"),
        ("gates: {size: {}}", "gates.size.max_ratio", "required"),
        ("gates: {size: {max_ratio: -1}}", "gates.size.max_ratio", "greater than 0"),
        ("gates: {flips: {max_share: 3}}", "gates.flips.max_share", "less than or equal to 1"),
        ("gates: {kl_mean: {max: .nan}}", "gates.kl_mean.max", "finite"),
        ("gates: {accuracy_drop: {max: 0.01, confidence: 95}}", "gates.accuracy_drop.confidence", "less than 1"),
        ("gates: {perplexity: {max_ratio: 0}}", "gates.perplexity.max_ratio", "greater than 0"),
        ("gates: {perplexity: {max: 1.1}}", "gates.perplexity.max", "max_ratio"),
        ("gates: {top1_agreement: {min_share: 80}}", "gates.top1_agreement.min_share", "less than or equal to 1"),
        ("gates: {merge_difference: {}}", "gates.merge_difference.max", "required"),
        ("gates: {merge_logits: {max: -0.1}}", "gates.merge_logits.max", "greater than or equal to 0"),
        ("gates: {merge_change: {max: .inf}}", "gates.merge_change.max", "finite"),
        ("gates: {size: {max_ratio: 0.3}, size: {max_ratio: 9}}", "", "twice"),
        ("- size", "", "mapping"),
        ("gates: [", "", "YAML"),
        ("", "", "mapping"),
    ],
)
def test_a_fault_is_one_sentence_that_names_the_field(text, field, words):
    with pytest.raises(InvalidPolicy) as caught:
        read_policy(text)
    assert caught.value.field == field
    assert words in caught.value.message
