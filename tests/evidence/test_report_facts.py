"""Every value that a stage noted is on its page, in words, whatever its shape."""

import pytest

from service.report.facts import fact_text, facts, operator_counts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        ([], "none"),
        (True, "True"),
        (9_999, "9999"),
        (22_713_602, "22,713,602"),
        ([616, 616, 616], "616 × 3"),
        ([616, 608], "616, 608"),
        ({"num_bits": 8, "symmetric": False}, "num bits 8, symmetric False"),
        ([[1, 1], [1, 512]], "1 × 2; 1, 512"),
        ([{"name": "guard", "ranks": [16]}], "name guard, ranks 16"),
    ],
)
def test_a_value_is_one_line(value, text):
    assert fact_text(value) == text


def test_a_long_mapping_is_folded_with_its_range_and_keeps_every_entry():
    change = {f"bert.encoder.layer.{i}.attention.self.query.weight": 0.25 + i for i in range(12)}
    (fact,) = facts({"relative_change": change})
    assert fact.name == "relative change"
    assert fact.text == "12 entries, 0.25 to 11.2"
    assert len(fact.more) == 12
    assert fact.more[0] == "bert.encoder.layer.0.attention.self.query.weight 0.25"


def test_operators_are_counted_with_the_most_frequent_first():
    assert operator_counts(["a (Add)", "b (Softmax)", "c/x (Add)", "odd"]) == "2 Add, 1 Softmax, 1 other"
