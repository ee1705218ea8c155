"""A conversion that only merges is published and verified like any other, and none of its figures can be another."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpress.errors import VerificationFailed
from modelpress.reports import Verdict
from modelpress.verification import verify_folder
from tests.evidence import merge_samples
from tests.evidence.conftest import copy
from tests.evidence.test_statements import publish_again


@pytest.fixture
def merged(outputs, tmp_path: Path) -> Path:
    return copy(outputs("merged"), tmp_path / "output")


def verify(folder: Path, signer):
    return verify_folder(folder, public_key_pem=signer.public_key_pem, allow_development_key=True)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("merged", Verdict.APPROVED),
        ("drifted", Verdict.REJECTED),
        ("without_logits", Verdict.INCONCLUSIVE),
        ("checkpoints", Verdict.APPROVED),
    ],
)
def test_a_merge_alone_is_published_and_gives_its_verdict_again(outputs, signer, name, verdict):
    verification = verify(outputs(name), signer)
    assert verification.verdict is verdict
    assert (verification.report.evaluation, verification.report.drift) == (None, None)


def test_what_a_merge_was_not_given_is_an_empty_document(merged):
    assert (merged / "evaluation.yaml").read_bytes() == b""
    assert (merged / "recipe.yaml").read_text() == merge_samples.RECIPE_YAML


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["merge"].update(layer_difference=0.0001), "gate merge_difference otherwise"),
        (lambda r: r["merge"].update(layer_difference=0.01), "gives REJECTED"),
        (lambda r: r["merge"]["logits"].update(max_difference=0.0), "gate merge_logits otherwise"),
        (lambda r: r["merge"]["logits"].update(max_logit=1e9), "gate merge_logits otherwise"),
        (lambda r: r["merge"]["logits"].update(label_changes=999), "contradict each other"),
        (lambda r: r["merge"].update(largest_change=0.0001), "merge.largest_change is 0.0001 in the report"),
        (lambda r: r["merge"].update(largest_change_tensor="x"), "merge.largest_change_tensor is x"),
        (lambda r: r["merge"].update(changed=1), "merge.changed is 1"),
        (lambda r: r["merge"].update(byte_identical=900), "merge.byte_identical is 900"),
        (lambda r: r["merge"].update(reference=""), "a reference that it does not name"),
        (lambda r: r["merge"].update(layers=0), "comes from 0 layers"),
        (lambda r: r["merge"].update(over_memory_limit=1), "gives INCONCLUSIVE"),
        (lambda r: r["merge"].update(not_compared={f"layer {i}": "why" for i in range(155)}), "gives INCONCLUSIVE"),
        (lambda r: r.update(merge=None), "nothing was measured"),
        (lambda r: r["stages"].clear(), "no stage that merges"),
        (lambda r: r["stages"][0]["details"].update(tensors_byte_identical=-1), "record of merge_lora"),
        (lambda r: r["stages"][0]["details"]["relative_change"].clear(), "merge.largest_change is 0.0"),
        (lambda r: r["stages"][0]["touched"].pop(0), "merge.changed is 155"),
        (lambda r: r["decision"]["gates"][0].update(figure=0.0), "gate merge_difference otherwise"),
        (lambda r: r["decision"]["gates"][1].update(bound=9.0), "gate merge_logits otherwise"),
        (lambda r: r["decision"]["gates"][2].update(outcome="INCONCLUSIVE"), "gate merge_change otherwise"),
        (lambda r: r["decision"]["gates"].pop(0), "exactly the gates"),
    ],
)
def test_a_changed_figure_is_refused_even_where_the_genuine_key_signs_it(merged, signer, change, message):
    publish_again(merged, signer, change)
    with pytest.raises(VerificationFailed) as raised:
        verify(merged, signer)
    assert message in raised.value.message


def test_signing_a_merge_again_without_a_change_verifies(merged, signer):
    publish_again(merged, signer, lambda report: None)
    assert verify(merged, signer).verdict is Verdict.APPROVED


def test_an_evaluation_cannot_be_left_out_of_a_report_that_had_one(outputs, signer, tmp_path):
    folder = copy(outputs("approved"), tmp_path / "output")
    publish_again(folder, signer, lambda report: report.update(evaluation=None))
    with pytest.raises(VerificationFailed, match="one is missing"):
        verify(folder, signer)
    publish_again(folder, signer, lambda report: report.update(drift=None))
    with pytest.raises(VerificationFailed, match="gives INCONCLUSIVE"):
        verify(folder, signer)
