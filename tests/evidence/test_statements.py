"""A genuine key under a statement that cannot be: whatever was signed, the reader takes one form only."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from modelpress.attestations import PAYLOAD_TYPE, Statement
from modelpress.canonical import canonical_json
from modelpress.digests import digest_bytes, digest_file
from modelpress.errors import VerificationFailed
from modelpress.output import DOCUMENTS, SIGNED_STATEMENTS
from modelpress.verification import verify_folder
from service.publication import report_json
from tests.evidence import samples


def refused(folder: Path, signer) -> str:
    with pytest.raises(VerificationFailed) as raised:
        verify_folder(folder, public_key_pem=signer.public_key_pem, allow_development_key=True)
    return raised.value.message


def statement_of(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_bytes())
    return json.loads(base64.b64decode(value.get("dsseEnvelope", value)["payload"]))


def sign(signer, payload: bytes) -> bytes:
    """An envelope over any bytes, by the genuine key."""
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(signer._key))
    value = envelope.to_dict()
    value["signatures"][0]["keyid"] = signer.identity.id
    return canonical_json(value)


def approve_again(folder: Path, signer, change: Callable[[dict[str, Any]], object]) -> None:
    """Sign a changed approval with the genuine key."""
    statement = statement_of(folder / "approval.dsse.json")
    change(statement)
    (folder / "approval.dsse.json").write_bytes(signer.sign_statement(statement))


def sign_model_again(folder: Path, signer, change: Callable[[dict[str, Any]], object]) -> None:
    bundle = json.loads((folder / "model.sig").read_bytes())
    statement = statement_of(folder / "model.sig")
    change(statement)
    bundle["dsseEnvelope"] = json.loads(signer.sign_statement(statement))
    (folder / "model.sig").write_text(json.dumps(bundle, separators=(",", ":")))


def publish_again(folder: Path, signer, change: Callable[[dict[str, Any]], object]) -> None:
    """Change report.json and sign everything anew: what a service that lies would publish."""
    report = json.loads((folder / "report.json").read_bytes())
    change(report)
    (folder / "report.json").write_bytes(json.dumps(report, indent=2, ensure_ascii=False).encode())
    resign(folder, signer, report)


def resign(folder: Path, signer, report: dict[str, Any]) -> None:
    def follow(statement: dict[str, Any]) -> None:
        for subject in statement["subject"]:
            if subject["name"] in DOCUMENTS:
                subject["digest"]["sha256"] = digest_file(folder / subject["name"]).hex
        decision = report["decision"]
        statement["predicate"] |= {"verdict": decision["verdict"], "gates": decision["gates"]}
        statement["predicate"]["conversion"] = report["conversion"]

    approve_again(folder, signer, follow)
    named = folder.rename(folder.parent / report["conversion"].rpartition("/")[2])
    signer.sign_folder(named, named / "model.sig", SIGNED_STATEMENTS)
    named.rename(folder)


def test_signing_again_without_a_change_verifies(output, signer):
    publish_again(output, signer, lambda report: None)
    approve_again(output, signer, lambda statement: None)
    sign_model_again(output, signer, lambda statement: None)
    assert verify_folder(output, public_key_pem=signer.public_key_pem, allow_development_key=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(predicateType="urn:modelpress:approval:v2"), "statement of type"),
        (lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"), "statement type"),
        (lambda s: s.update(extra=1), "exactly the fields"),
        (lambda s: s.pop("predicate"), "exactly the fields"),
        (lambda s: s["subject"].pop(), "must name exactly"),
        (lambda s: s["subject"].append({"name": "x", "digest": {"sha256": "0" * 64}}), "must name exactly"),
        (lambda s: s["subject"].append(copy.deepcopy(s["subject"][0])), "names a subject twice"),
        (lambda s: s["subject"][0]["digest"].update(sha256="0" * 64), "another model/"),
        (lambda s: s["subject"][1]["digest"].update(sha256="0" * 64), "another report.json"),
        (lambda s: s["subject"][1]["digest"].update(md5="0" * 32), "exactly the fields sha256"),
        (lambda s: s["subject"][1]["digest"].update(sha256="A" * 64), "64 lower-case"),
        (lambda s: s["predicate"].update(verdict="ACCEPTED"), "verdict"),
        (lambda s: s["predicate"].update(verdict="REJECTED"), "verdict"),
        (lambda s: s["predicate"].update(note="x"), "unknown field"),
        (lambda s: s["predicate"].update(conversion="conversions/other"), "gives conversion"),
        (lambda s: s["predicate"]["gates"].pop(), "different gates"),
        (lambda s: s["predicate"]["gates"][0].update(bound=0.5), "different gates"),
        (lambda s: s["predicate"]["key"].update(id="0" * 64), "names another key"),
        (lambda s: s["predicate"]["key"].update(kind="trusted"), "kind"),
    ],
)
def test_an_approval_that_says_anything_else_is_refused(output, signer, change, message):
    approve_again(output, signer, change)
    assert message in refused(output, signer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["predicate"]["serialization"]["ignore_paths"].append("model/config.json"),
            "leaves out other files",
        ),
        (lambda s: s["predicate"]["serialization"]["ignore_paths"].append(".git"), "leaves out other files"),
        (lambda s: s["predicate"]["serialization"]["ignore_paths"].pop(), "leaves out other files"),
        (lambda s: s["predicate"]["serialization"].update(ignore_paths=None), "leaves out other files"),
        (lambda s: s["predicate"]["serialization"].update(method="shards"), "was not made with"),
        (lambda s: s["predicate"]["serialization"].update(hash_type="blake2b"), "was not made with"),
        (lambda s: s["predicate"]["serialization"].update(allow_symlinks=True), "was not made with"),
        (lambda s: s["predicate"].update(resources={}), "has no list of files"),
        (lambda s: s["predicate"]["resources"].pop(), "contradicts itself"),
        (lambda s: s["predicate"]["resources"].reverse(), "contradicts itself"),
        (lambda s: s["predicate"]["resources"][0].update(algorithm="md5"), "expected sha256"),
        (lambda s: s["predicate"]["resources"][0].update(digest="0"), "64 lower-case"),
        (lambda s: s["subject"][0].update(name="another"), "made for another conversion"),
        (lambda s: s.update(predicateType="https://model_signing/Digests/v0.1"), "statement of type"),
    ],
)
def test_a_model_signature_made_in_another_way_is_refused(output, signer, change, message):
    sign_model_again(output, signer, change)
    assert message in refused(output, signer)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.replace(b'"verdict":"APPROVED"', b'"verdict":"REJECTED","verdict":"APPROVED"'), "twice"),
        (lambda p: p.replace(b'"bound":0.015', b'"bound":NaN'), "NaN"),
        (lambda p: p.replace(b'"bound":0.015', b'"bound":1e999'), "too large"),
        (lambda p: b"[" * 100_000, "nested too deeply"),
        (lambda p: b"[]", "object is expected"),
        (lambda p: b"\xff" + p, "not UTF-8"),
        (lambda p: p[:-1], "not valid JSON"),
    ],
)
def test_a_signed_payload_that_is_not_strict_json_is_refused(output, signer, spoil, message):
    payload = canonical_json(statement_of(output / "approval.dsse.json"))
    (output / "approval.dsse.json").write_bytes(sign(signer, payload))
    verify_folder(output, public_key_pem=signer.public_key_pem, allow_development_key=True)
    assert spoil(payload) != payload
    (output / "approval.dsse.json").write_bytes(sign(signer, spoil(payload)))
    assert message in refused(output, signer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e["signatures"].append(copy.deepcopy(e["signatures"][0])), "exactly one signature"),
        (lambda e: e["signatures"].clear(), "exactly one signature"),
        (lambda e: e.update(signatures={}), "exactly one signature"),
        (lambda e: e["signatures"][0].update(keyid="another"), "another key"),
        (lambda e: e["signatures"][0].update(cert="x"), "exactly the fields"),
        (lambda e: e.update(payloadType="text/plain"), "expected application/vnd.in-toto+json"),
        (lambda e: e.update(comment="x"), "exactly the fields"),
        (lambda e: e.update(payload=e["payload"] + "\n"), "not base64"),
        (lambda e: e.update(payload=7), "not base64"),
        (lambda e: e["signatures"][0].update(sig=""), "signature of approval.dsse.json is wrong"),
    ],
)
def test_an_envelope_of_any_other_form_is_refused(output, signer, change, message):
    file = output / "approval.dsse.json"
    envelope = json.loads(file.read_bytes())
    change(envelope)
    file.write_bytes(canonical_json(envelope))
    assert message in refused(output, signer)


def test_the_two_statements_cannot_stand_in_for_each_other(output, signer):
    approval, bundle = output / "approval.dsse.json", json.loads((output / "model.sig").read_bytes())
    saved = approval.read_bytes()
    approval.write_bytes(canonical_json(bundle["dsseEnvelope"]))
    assert "statement of type" in refused(output, signer)
    bundle["dsseEnvelope"] = json.loads(saved)
    (output / "model.sig").write_text(json.dumps(bundle, separators=(",", ":")))
    assert "statement of type" in refused(output, signer)


def _approve_everything(report: dict[str, Any]) -> None:
    report["decision"]["verdict"] = "APPROVED"
    for gate in report["decision"]["gates"]:
        gate["outcome"] = "PASSED"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_approve_everything, "applied to its measurements gives REJECTED"),
        (lambda r: r["decision"]["gates"].pop(), "exactly the gates"),
        (lambda r: r["decision"]["gates"].reverse(), "exactly the gates"),
        (lambda r: r["decision"]["gates"][0].update(figure=0.0), "gate accuracy_drop otherwise"),
        (lambda r: r["decision"]["gates"][0].update(bound=0.9), "gate accuracy_drop otherwise"),
        (lambda r: r["decision"]["gates"][0]["interval"].update(low=0.0), "gate accuracy_drop otherwise"),
        (lambda r: r["decision"]["gates"][4].update(outcome="FAILED"), "gate speed otherwise"),
        (lambda r: r["evaluation"]["candidate"]["accuracy"].update(value=0.99), "contradict each other"),
        (lambda r: r["drift"].update(flips=0), "contradict each other"),
        (lambda r: r.update(schema_version=2), "schema version 2"),
        (lambda r: r.update(schema_version=None), "schema version None"),
        (lambda r: r.update(model_digest="sha256:" + "0" * 64), "gives model digest"),
        (lambda r: r.update(recipe_digest="sha256:" + "0" * 64), "gives recipe digest"),
        (lambda r: r.update(policy_digest="sha256:" + "0" * 64), "gives policy digest"),
        (lambda r: r.update(unknown=1), "unknown field"),
        (lambda r: r.pop("seed"), "seed"),
        (lambda r: r["evaluation"]["paired"].update(both_right="many"), "report.json: evaluation.paired.both_right"),
    ],
)
def test_a_verdict_that_does_not_follow_from_its_report_is_refused(outputs, signer, tmp_path, change, message):
    """Signed by the genuine key throughout: even the service's own word is recomputed."""
    from tests.evidence.conftest import copy as copy_folder

    folder = copy_folder(outputs("rejected"), tmp_path / "output")
    publish_again(folder, signer, change)
    assert message in refused(folder, signer)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (samples.POLICY_YAML.replace("max: 0.015", "max: 0.9"), "gives policy digest"),
        ("gates: {}", "gives policy digest"),
    ],
)
def test_another_policy_beside_the_same_report_is_refused(output, signer, policy, message):
    (output / "policy.yaml").write_text(policy)
    publish_again(output, signer, lambda report: None)
    assert message in refused(output, signer)
    digest = str(digest_bytes(policy.encode()))
    publish_again(output, signer, lambda report: report.update(policy_digest=digest))
    assert "policy.yaml" in refused(output, signer)


def test_a_statement_reads_back_as_it_was_written():
    statement = Statement("urn:x", {"a": digest_bytes(b"a"), "b": digest_bytes(b"b")}, {"key": [1, 2.5, None]})
    assert Statement.from_json(statement.to_json()) == statement


def test_a_report_with_a_figure_that_is_no_number_is_never_written():
    report = samples.sample_report(samples.APPROVED, digest_bytes(b""))
    broken = report.model_copy(update={"seconds": float("nan")})
    with pytest.raises(ValueError, match="Out of range float"):
        report_json(broken)
