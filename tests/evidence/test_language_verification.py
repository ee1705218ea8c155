"""A language model's conversion is verified offline: every gate again from its windows, no figure for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpress.errors import VerificationFailed
from modelpress.reports import Verdict
from modelpress.verification import verify_folder
from tests.evidence.conftest import copy
from tests.evidence.test_statements import publish_again


@pytest.fixture
def folder(outputs, tmp_path: Path) -> Path:
    return copy(outputs("language"), tmp_path / "output")


def verify(folder: Path, signer):
    return verify_folder(folder, public_key_pem=signer.public_key_pem, allow_development_key=True)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("language", Verdict.APPROVED),
        ("language_rejected", Verdict.REJECTED),
        ("language_few_windows", Verdict.INCONCLUSIVE),
        ("language_without_questions", Verdict.INCONCLUSIVE),
    ],
)
def test_it_is_published_and_gives_its_verdict_again(outputs, signer, name, verdict):
    verification = verify(outputs(name), signer)
    assert verification.verdict is verdict
    assert verification.report.language is not None


def _scale_candidate(report):
    """Windows, and figures that fit them, of a candidate that is as good as the baseline."""
    language = report["language"]
    for window in language["windows"]:
        window["candidate_nats"] = window["baseline_nats"]
    language["candidate_perplexity"] = dict(language["baseline_perplexity"], name="candidate_perplexity")
    language["perplexity_ratio"].update(value=1.0, interval=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_scale_candidate, "gate perplexity otherwise"),
        (lambda r: r["language"]["windows"].pop(), "language.baseline_perplexity comes from 8176 tokens"),
        (lambda r: r["language"]["perplexity_ratio"].update(value=1.0), "language.perplexity_ratio is 1.0"),
        (lambda r: r["language"]["windows"][0].update(agreements=511), "language.top1_agreement is"),
        (lambda r: r["language"].update(choices=None), "gives INCONCLUSIVE"),
        (lambda r: r["language"]["footprint"].update(candidate_bytes=1), "gate size otherwise"),
        (lambda r: r["language"]["footprint"].update(candidate_bytes=10**9), "gives REJECTED"),
        (lambda r: r["drift"].update(clusters=[]), "which windows its tokens stand in"),
        (lambda r: r["drift"]["kl_mean"].update(value=0.0), "kl_mean is 0.0"),
        (lambda r: r.update(language=None), "one is missing"),
        (lambda r: r.update(drift=None), "one is missing"),
        (lambda r: r.update(language=None, drift=None), "nothing was measured"),
        (lambda r: r["stages"][0]["layers"][0].update(num_bits=8), "has 8 bits, expected 4"),
        (lambda r: r["stages"][0]["layers"][13].update(fallback=""), "without a reason"),
        (lambda r: r["stages"][0]["layers"].clear(), "quantized no layer"),
        (lambda r: r["decision"]["gates"][4]["interval"].update(high=1.0), "gate perplexity otherwise"),
        (lambda r: r["decision"]["gates"].pop(4), "exactly the gates"),
    ],
)
def test_a_changed_figure_is_refused_even_where_the_genuine_key_signs_it(folder, signer, change, message):
    publish_again(folder, signer, change)
    with pytest.raises(VerificationFailed) as raised:
        verify(folder, signer)
    assert message in raised.value.message


def test_signing_it_again_without_a_change_verifies(folder, signer):
    publish_again(folder, signer, lambda report: None)
    assert verify(folder, signer).verdict is Verdict.APPROVED
