"""Texts of the command line become values, or a sentence that names the option."""

import pytest

from modelpress.cli.values import (
    MergedOption,
    parse_adapter,
    parse_choices,
    parse_duration,
    parse_labels,
    parse_model,
    parse_size,
)
from modelpress.errors import InvalidRequest
from modelpress.reports import Verdict

ARTIFACT = "artifacts/sha256:" + "12" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("guard=adapters/guard", MergedOption("guard", "adapters/guard", 1.0)),
        ("guard=adapters/guard:0.5", MergedOption("guard", "adapters/guard", 0.5)),
        ("guard=adapters/v:2/final", MergedOption("guard", "adapters/v:2/final", 1.0)),
        ("guard=adapters/v:two", MergedOption("guard", "adapters/v:two", 1.0)),
        ("guard=a=b:-1e-1", MergedOption("guard", "a=b", -0.1)),
        (f"guard={ARTIFACT}", MergedOption("guard", ARTIFACT, 1.0)),
        (f"guard={ARTIFACT}:0.25", MergedOption("guard", ARTIFACT, 0.25)),
    ],
)
def test_an_adapter_has_a_name_a_source_and_perhaps_a_weight(text, expected):
    assert parse_adapter(text) == expected


@pytest.mark.parametrize(
    "text", ["guard", "=folder", "guard=", "guard=folder:0", "guard=folder:nan", "guard=folder:inf"]
)
def test_an_adapter_that_cannot_be_is_refused(text):
    with pytest.raises(InvalidRequest, match="--adapter"):
        parse_adapter(text)


def test_a_model_is_written_as_an_adapter_is_and_may_have_weight_0():
    assert parse_model("other=models/other:0") == MergedOption("other", "models/other", 0.0)
    with pytest.raises(InvalidRequest, match="--model 'other=': write NAME=FOLDER or NAME=FOLDER:WEIGHT"):
        parse_model("other=")
    with pytest.raises(InvalidRequest, match="--model 'other=x:inf': model 'other' has weight inf"):
        parse_model("other=x:inf")


@pytest.mark.parametrize(("text", "size"), [("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("42", 42)])
def test_sizes(text, size):
    assert parse_size("--memory-limit", text) == size


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5 h", 5400), ("2d", 172_800), ("3M", 180)])
def test_durations(text, seconds):
    assert parse_duration("--run-timeout", text) == seconds


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 GiBs", "nan", "1e9", "8 GiB 1 MiB"])
def test_a_size_that_cannot_be_names_option_and_units(text):
    with pytest.raises(InvalidRequest, match=r"--memory-limit .*kib, mib, gib"):
        parse_size("--memory-limit", text)


def test_labels_keep_everything_behind_the_first_sign():
    assert parse_labels(["owner=ml", "query=a=b", "empty="]) == {"owner": "ml", "query": "a=b", "empty": ""}


@pytest.mark.parametrize("texts", [["owner"], ["=ml"], ["a=1", "a=2"]])
def test_a_label_without_a_key_or_given_twice_is_refused(texts):
    with pytest.raises(InvalidRequest, match="--label"):
        parse_labels(texts)


def test_choices_are_read_whatever_their_case():
    assert parse_choices("--verdict", ["approved", "REJECTED"], list(Verdict)) == (Verdict.APPROVED, Verdict.REJECTED)


def test_an_unknown_choice_names_the_known_ones():
    with pytest.raises(InvalidRequest, match=r"--verdict 'fine': write one of APPROVED, REJECTED, INCONCLUSIVE"):
        parse_choices("--verdict", ["fine"], list(Verdict))
