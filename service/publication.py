"""Sign and publish: the last arrow of the main path.

    publication = publish(report, sources, desk)
    store.manifest(publication.output)         # the output folder of a finished conversion

The verdict is computed once more right before it is signed, from the report's own measurements, and the signed folder
is verified as any user would before it is stored: what its own verifier refuses is never published.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from modelpress import __version__
from modelpress.attestations import approval_statement
from modelpress.digests import Digest, digest_bytes, digest_file
from modelpress.errors import InternalError, VerificationFailed
from modelpress.gates import decide
from modelpress.manifests import FileEntry, Manifest
from modelpress.output import (
    APPROVAL,
    DOCUMENTS,
    EVALUATION,
    MODEL,
    MODEL_SIGNATURE,
    POLICY,
    RECIPE,
    REPORT,
    REPORT_PAGE,
    REPRODUCTION,
    SIGNED_STATEMENTS,
)
from modelpress.policies import read_policy
from modelpress.reports import Report, Verdict
from modelpress.verification import verify_folder
from service.desk import Desk
from service.faults import fault_point
from service.report.page import render_page


@dataclass(frozen=True)
class Sources:
    """What the output folder holds besides the report: the candidate's manifest digest, and three texts as sent."""

    model: Digest
    recipe_yaml: str
    policy_yaml: str
    evaluation_yaml: str


@dataclass(frozen=True)
class Publication:
    """A finished conversion. `output` is the manifest digest of the signed folder."""

    output: Digest
    verdict: Verdict
    reused_from: str | None


def publish(report: Report, sources: Sources, desk: Desk) -> Publication:
    """Lay out, sign, verify and store the output folder. Run again after a kill it does all of it anew.

    InternalError where the report does not follow from its measurements or names other sources: nothing is signed then.
    """
    _check(report, sources)
    with _private_folder(desk) as folder:
        _write_model(folder, sources, desk)
        _write_documents(folder, report, sources, desk)
        _sign(folder, report, sources, desk)
        _verify(folder, report, desk)
        fault_point("publication.store.before")
        output = _store(folder, sources, desk)
        fault_point("publication.store.after")
    return Publication(output, report.decision.verdict, report.reused_from)


def _store(folder: Path, sources: Sources, desk: Desk) -> Digest:
    """The manifest of the verified folder. The model's files are in the store already: they are not read again, unless
    one has gone from there.
    """
    model = desk.store.manifest(sources.model).files
    entries = [FileEntry(f"{MODEL}/{entry.path}", entry.size_bytes, entry.digest) for entry in model]
    for entry in entries:
        if not desk.store.holds(entry):
            desk.store.put_file(folder / entry.path)
    for file in sorted(folder.iterdir()):
        if file.name != MODEL:
            entries.append(FileEntry(file.name, file.stat().st_size, desk.store.put_file(file)))
    manifest = Manifest(tuple(entries))
    desk.store.put_bytes(manifest.to_json())
    return manifest.digest


def report_json(report: Report) -> bytes:
    """`report.json`: the fields in their declared order, two spaces deep, never NaN."""
    value = report.model_dump(mode="json")
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def reproduction(report: Report, sources: Sources, request: dict[str, Any]) -> dict[str, Any]:
    """What is needed to run the conversion again, and the digest that it must give on such a machine."""
    return {
        "schema_version": 1,
        "conversion": report.conversion,
        "modelpress": __version__,
        "inputs": [entry.model_dump(mode="json") for entry in report.inputs],
        "request": request,
        "seed": report.seed,
        "stages": [
            {"method": stage.method, "version": stage.version, "arguments": stage.arguments} for stage in report.stages
        ],
        "environment": report.environment.model_dump(mode="json"),
        "gives": {
            "model_digest": str(sources.model),
            "when": "the same inputs, seed, versions, device, CPU capability and thread count",
        },
    }


def _check(report: Report, sources: Sources) -> None:
    """Nothing ungated is signed: the decision must follow from the measurements and the policy that are published."""
    again = decide(read_policy(sources.policy_yaml), report.measured)
    if again != report.decision:
        raise InternalError("the report's decision is not what its measurements and policy give: it is not signed")
    named = (report.model_digest, report.recipe_digest, report.policy_digest)
    texts = (sources.recipe_yaml, sources.policy_yaml)
    if named != (str(sources.model), *(str(digest_bytes(text.encode())) for text in texts)):
        raise InternalError(
            "the report names another model, recipe or policy than is to be published: it is not signed"
        )


@contextmanager
def _private_folder(desk: Desk) -> Iterator[Path]:
    """An empty folder that only this process's user can read, named like the conversion.

    Each attempt has one of its own: a cancelled one may still be publishing when its retry does. What a killed server
    left is deleted at the next start.
    """
    scratch = desk.scratch / f"publication-{desk.conversion.id}-{desk.conversion.attempt}"
    shutil.rmtree(scratch, ignore_errors=True)
    folder = scratch / desk.conversion.id
    try:
        scratch.mkdir(mode=0o700, parents=True)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_model(folder: Path, sources: Sources, desk: Desk) -> None:
    desk.store.fetch_folder(desk.store.manifest(sources.model), folder / MODEL)


def _write_documents(folder: Path, report: Report, sources: Sources, desk: Desk) -> None:
    request = desk.conversion.request.to_json()
    rerun = reproduction(report, sources, request)
    texts = {
        RECIPE: sources.recipe_yaml.encode(),
        POLICY: sources.policy_yaml.encode(),
        EVALUATION: sources.evaluation_yaml.encode(),
        REPRODUCTION: json.dumps(rerun, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n",
        REPORT: report_json(report),
        REPORT_PAGE: render_page(report, recipe_yaml=sources.recipe_yaml, policy_yaml=sources.policy_yaml).encode(),
    }
    for name, data in texts.items():
        (folder / name).write_bytes(data)


def _sign(folder: Path, report: Report, sources: Sources, desk: Desk) -> None:
    """Both statements. They cover everything but each other."""
    subjects = {f"{MODEL}/": sources.model, **{name: digest_file(folder / name) for name in DOCUMENTS}}
    created = datetime.fromtimestamp(desk.now(), timezone.utc).isoformat(timespec="seconds")
    statement = approval_statement(report, subjects, key=desk.signer.identity, created=created)
    desk.signer.sign_folder(folder, folder / MODEL_SIGNATURE, SIGNED_STATEMENTS)
    (folder / APPROVAL).write_bytes(desk.signer.sign_statement(statement))


def _verify(folder: Path, report: Report, desk: Desk) -> None:
    key = desk.signer.public_key_pem
    try:
        verified = verify_folder(folder, public_key_pem=key, allow_development_key=desk.signer.development)
    except VerificationFailed as fault:
        raise InternalError(f"the signed output does not verify and is not published: {fault.message}") from fault
    if verified.verdict is not report.decision.verdict:
        raise InternalError("the signed output says another verdict than the report and is not published")
