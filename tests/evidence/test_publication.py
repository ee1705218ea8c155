"""Publishing: exactly the documented files, nothing signed that was not gated, and safe to run again."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from modelpress.errors import InternalError
from modelpress.manifests import scan_folder
from modelpress.reports import Report, Verdict
from modelpress.verification import verify_folder
from service import publication
from service.publication import publish
from service.signing import load_or_create_signer
from tests.evidence import samples
from tests.evidence.conftest import FILES, Desk, Prepared, all_files, prepare

DOCUMENTED = {
    "report.json",
    "report.html",
    "policy.yaml",
    "recipe.yaml",
    "evaluation.yaml",
    "reproduction.json",
    "model.sig",
    "approval.dsse.json",
}


@pytest.fixture
def prepared(tmp_path: Path, signer) -> Prepared:
    return prepare(samples.APPROVED, tmp_path, signer)


def test_the_output_holds_exactly_the_documented_files(output):
    assert set(all_files(output)) == DOCUMENTED | {f"model/{name}" for name in FILES}


def test_the_model_and_the_texts_are_byte_for_byte_what_was_sent(output):
    for name, data in FILES.items():
        assert (output / "model" / name).read_bytes() == data
    assert (output / "recipe.yaml").read_text() == samples.RECIPE_YAML
    assert (output / "policy.yaml").read_text() == samples.POLICY_YAML
    assert (output / "evaluation.yaml").read_text() == samples.EVALUATION_YAML


def test_the_reproduction_names_inputs_seed_versions_stages_and_what_must_come_out(output):
    value = json.loads((output / "reproduction.json").read_bytes())
    report = Report.model_validate_json((output / "report.json").read_bytes())
    assert [entry["digest"] for entry in value["inputs"]] == [entry.digest for entry in report.inputs]
    assert value["seed"] == value["request"]["seed"] == 7
    assert value["request"]["recipe_yaml"] == samples.RECIPE_YAML
    assert value["environment"]["versions"]["torch"] == "2.13.0"
    assert value["environment"]["threads"] == 2
    assert [stage["arguments"]["method"] for stage in value["stages"]] == [stage.method for stage in report.stages]
    assert value["gives"]["model_digest"] == str(scan_folder(output / "model").digest)


@pytest.mark.parametrize("name", list(samples.CASES))
def test_the_publication_carries_the_verdict_and_where_its_figures_come_from(tmp_path, signer, name):
    made = prepare(samples.CASES[name], tmp_path, signer)
    publication = made.publish()
    assert publication.verdict is made.report.decision.verdict
    assert publication.reused_from == samples.CASES[name].reused_from


def test_a_decision_that_the_measurements_do_not_give_is_never_signed(tmp_path, signer):
    made = prepare(samples.REJECTED, tmp_path, signer)
    lie = made.report.model_copy(
        update={"decision": made.report.decision.model_copy(update={"verdict": Verdict.APPROVED})}
    )
    before = blobs(tmp_path)
    with pytest.raises(InternalError, match="not signed"):
        publish(lie, made.sources, made.desk)
    assert blobs(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [
        {"policy_yaml": samples.POLICY_YAML + "# laxer\n"},
        {"policy_yaml": samples.POLICY_YAML.replace("0.015", "0.9")},
        {"recipe_yaml": samples.RECIPE_YAML + "\n"},
    ],
)
def test_other_sources_than_the_report_names_are_never_signed(prepared, change):
    sources = dataclasses.replace(prepared.sources, **change)
    with pytest.raises(InternalError, match="not signed"):
        publish(prepared.report, sources, prepared.desk)


def test_publishing_again_gives_the_same_documents_and_fresh_signatures(prepared, tmp_path):
    one = prepared.download(prepared.publish(), tmp_path / "one")
    two = prepared.download(prepared.publish(), tmp_path / "two")
    differing = {name for name in all_files(one) if (one / name).read_bytes() != (two / name).read_bytes()}
    assert differing == {"model.sig", "approval.dsse.json"}
    assert scan_folder(one / "model") == scan_folder(two / "model")


def test_nothing_is_left_in_the_scratch_folder(prepared):
    prepared.publish()
    assert list(prepared.desk.scratch.glob("publication-*")) == []


def test_a_retry_that_publishes_while_the_cancelled_attempt_still_does_disturbs_neither(prepared, tmp_path):
    desk = prepared.desk
    retried = dataclasses.replace(
        prepared, desk=dataclasses.replace(desk, conversion=dataclasses.replace(desk.conversion, attempt=2))
    )
    outputs = []

    class Cancelled(Desk):
        def now(self) -> float:
            """Asked for while the output is signed: the retry publishes meanwhile."""
            outputs.append(retried.download(retried.publish(), tmp_path / "retried"))
            return super().now()

    cancelled = Cancelled(desk.conversion, desk.store, desk.signer, desk.scratch)
    outputs.append(prepared.download(dataclasses.replace(prepared, desk=cancelled).publish(), tmp_path / "cancelled"))
    one, two = map(scan_folder, outputs)
    assert [entry.path for entry in one.files] == [entry.path for entry in two.files]
    assert list(desk.scratch.glob("publication-*")) == []


KILLED = """
import sys
from pathlib import Path
from service.signing import load_or_create_signer
from tests.evidence import samples
from tests.evidence.conftest import prepare
root = Path(sys.argv[1])
prepare(samples.APPROVED, root, load_or_create_signer(root / "data", None)).publish()
"""


@pytest.mark.parametrize("point", ["publication.store.before", "publication.store.after"])
def test_a_killed_publication_is_published_cleanly_when_run_again(tmp_path, point):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run(command, env={**os.environ, "MODELPRESS_KILL_AT": point}, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    [scratch] = (tmp_path / "scratch").glob("publication-*")
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    signer = load_or_create_signer(tmp_path / "data", None)
    again = prepare(samples.APPROVED, tmp_path, signer)
    folder = again.download(again.publish(), tmp_path / "output")
    verified = verify_folder(folder, public_key_pem=signer.public_key_pem, allow_development_key=True)
    assert verified.model_digest == str(again.sources.model)
    assert list(again.desk.scratch.glob("publication-*")) == []


def blobs(root: Path) -> list[str]:
    return all_files(root / "store")


def test_the_outputs_manifest_is_that_of_its_files(prepared, tmp_path):
    published = prepared.publish()
    assert scan_folder(prepared.download(published, tmp_path / "output")).digest == published.output


def test_a_models_file_that_goes_from_the_store_meanwhile_is_put_back(prepared, tmp_path, monkeypatch):
    store, verify = prepared.desk.store, publication._verify
    lost = store.manifest(prepared.sources.model).files[0].digest

    def verify_and_lose(*arguments) -> None:
        verify(*arguments)
        store.delete(lost)

    monkeypatch.setattr(publication, "_verify", verify_and_lose)
    published = prepared.publish()
    assert scan_folder(prepared.download(published, tmp_path / "output")).digest == published.output
