"""A folder verifies only where every claim holds; one changed byte anywhere is refused, and the file is named."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import model_signing
import pytest

from modelpress.errors import VerificationFailed
from modelpress.output import DOCUMENTS, SIGNED_STATEMENTS
from modelpress.reports import Verdict
from modelpress.verification import Verification, verify_folder
from service.signing import load_or_create_signer
from tests.evidence import samples
from tests.evidence.conftest import FILES, all_files, copy, prepare

ALL_FILES = sorted(
    [f"model/{name}" for name in FILES] + [*DOCUMENTS, *(n for n in SIGNED_STATEMENTS if n != "provenance.dsse.json")]
)


def verify(folder: Path, signer) -> Verification:
    return verify_folder(folder, public_key_pem=signer.public_key_pem, allow_development_key=True)


def refused(folder: Path, signer) -> str:
    with pytest.raises(VerificationFailed) as raised:
        verify(folder, signer)
    return raised.value.message


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("approved", Verdict.APPROVED), ("rejected", Verdict.REJECTED), ("inconclusive", Verdict.INCONCLUSIVE)],
)
def test_an_untouched_folder_verifies_and_gives_its_own_verdict(outputs, signer, name, verdict):
    verification = verify(outputs(name), signer)
    assert verification.verdict is verdict
    assert verification.conversion == f"conversions/{samples.CONVERSION}"
    assert verification.key_id == signer.identity.id
    assert verification.report.decision.verdict is verdict
    assert len(verification.checked) == 4


def test_the_folder_may_be_moved_renamed_and_read_only(output, signer, tmp_path):
    moved = output.rename(tmp_path / "somewhere else")
    moved.chmod(0o500)
    try:
        assert verify(moved, signer).verdict is Verdict.APPROVED
    finally:
        moved.chmod(0o700)


def test_verifying_prints_nothing(output, signer, capfd):
    verify(output, signer)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ALL_FILES)
def test_one_changed_bit_anywhere_in_a_file_is_refused(output, signer, name):
    file = output / name
    original = file.read_bytes()
    for trial in range(12):
        data = bytearray(original)
        random.Random(f"{name} {trial}").choice([_flip, _flip, _cut, _append])(data, random.Random(trial))
        file.write_bytes(data)
        assert name in refused(output, signer)
    file.write_bytes(original)
    assert verify(output, signer)


def _flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _append(data: bytearray, rng: random.Random) -> None:
    data += rng.choice([b"\n", b" ", b"\0"])


@pytest.mark.parametrize("name", ["model.sig", "approval.dsse.json"])
def test_no_byte_of_a_statement_can_change(output, signer, name):
    file = output / name
    original = file.read_bytes()
    for position in range(0, len(original), max(1, len(original) // 150)):
        data = bytearray(original)
        data[position] ^= 1
        file.write_bytes(data)
        assert refused(output, signer)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_missing_file_is_named(output, signer, name):
    (output / name).unlink()
    assert name in refused(output, signer)


@pytest.mark.parametrize(
    "name",
    [
        "x",
        ".hidden",
        ".git/x",
        ".gitignore",
        ".gitattributes",
        ".github/workflow.yml",
        "model/.git/config",
        "model/pytorch_model.bin",
        "model/tokenizer/.x",
        "provenance.dsse.json",
        "model.sig.old",
        "Model/config.json",
        "model/mo\ndel.onnx",
        "model/\udcff",
    ],
)
def test_an_added_file_is_refused_hidden_and_git_files_too(output, signer, name):
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    (output / name).write_bytes(b"")
    assert "was added" in refused(output, signer)


def test_a_statement_replaced_by_a_folder_hides_nothing(output, signer):
    (output / "provenance.dsse.json").mkdir()
    (output / "provenance.dsse.json" / "payload").write_bytes(b"x")
    assert "was added" in refused(output, signer)


def test_a_renamed_file_is_refused(output, signer):
    (output / "model/model.onnx").rename(output / "model/Model.onnx")
    assert "'model/model.onnx' is missing" in refused(output, signer)


def test_two_files_of_the_model_cannot_trade_places(output, signer):
    one, other = output / "model/config.json", output / "model/tokenizer/vocab.txt"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert "was changed" in refused(output, signer)


@pytest.mark.parametrize("make", ["link", "link to nowhere", "link to folder", "pipe", "empty folder", "nested folder"])
def test_what_no_signature_can_cover_is_refused(output, signer, make, tmp_path):
    place = output / "model" / "extra"
    match make:
        case "link":
            place.symlink_to(output / "model/config.json")
        case "link to nowhere":
            place.symlink_to("/nonexistent")
        case "link to folder":
            place.symlink_to(output / "model/tokenizer")
        case "pipe":
            os.mkfifo(place)
        case "empty folder":
            place.mkdir()
        case "nested folder":
            (place / "a" / "b").mkdir(parents=True)
    assert "'model/extra" in refused(output, signer)


@pytest.mark.parametrize("name", ["model/model.onnx", "report.json", "model.sig", "approval.dsse.json"])
def test_a_link_to_the_right_bytes_is_still_a_link(output, signer, name, tmp_path):
    moved = (output / name).rename(tmp_path / "elsewhere")
    (output / name).symlink_to(moved)
    assert "is a link" in refused(output, signer)


@pytest.mark.parametrize(
    "name", ["report.json", "report.html", "policy.yaml", "reproduction.json", "model.sig", "approval.dsse.json"]
)
def test_a_file_of_another_conversion_is_refused(output, outputs, signer, name):
    shutil.copyfile(outputs("inconclusive") / name, output / name)
    assert refused(output, signer)


def test_every_mixture_of_two_conversions_statements_is_refused(outputs, signer, tmp_path):
    """A rejected candidate cannot borrow what an approved one earned: not statements, not documents, not both."""
    borrowed = ["model.sig", "approval.dsse.json", "report.json", "report.html", "policy.yaml", "reproduction.json"]
    for choice in range(1, 2 ** len(borrowed) - 1):
        mixed = copy(outputs("rejected"), tmp_path / str(choice))
        names = [name for i, name in enumerate(borrowed) if choice >> i & 1]
        for name in names:
            shutil.copyfile(outputs("approved") / name, mixed / name)
        same = all((mixed / n).read_bytes() == (outputs("rejected") / n).read_bytes() for n in all_files(mixed))
        whole = all((mixed / n).read_bytes() == (outputs("approved") / n).read_bytes() for n in all_files(mixed))
        if not same and not whole:
            assert refused(mixed, signer), names


def test_another_model_under_the_same_statements_is_refused(output, signer, tmp_path):
    other = prepare(samples.APPROVED, tmp_path / "other", signer, {**FILES, "model.onnx": b"backdoor"})
    theirs = other.download(other.publish(), tmp_path / "theirs")
    shutil.copyfile(theirs / "approval.dsse.json", output / "approval.dsse.json")
    assert "approval.dsse.json was given for another" in refused(output, signer)
    for name in ("model/model.onnx", "model.sig"):
        shutil.copyfile(theirs / name, output / name)
    assert refused(output, signer)


def test_a_folder_signed_by_another_key_is_refused(tmp_path, signer, output):
    stranger = load_or_create_signer(tmp_path / "stranger", None)
    assert "another key" in refused(output, stranger)
    forged = prepare(samples.APPROVED, tmp_path / "forged", stranger)
    theirs = forged.download(forged.publish(), tmp_path / "theirs")
    assert verify(theirs, stranger)
    for name in ("model.sig", "approval.dsse.json"):
        mixed = copy(output, tmp_path / f"mixed {name}")
        shutil.copyfile(theirs / name, mixed / name)
        assert f"{name} was signed with another key" in refused(mixed, signer)


@pytest.mark.parametrize("pem", ["", "no key", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_what_is_no_public_key_is_refused(output, pem):
    with pytest.raises(VerificationFailed, match="public key"):
        verify_folder(output, public_key_pem=pem)


def test_a_development_key_is_accepted_only_where_allowed(output, signer):
    with pytest.raises(VerificationFailed, match=r"development key.*--allow-development-key") as raised:
        verify_folder(output, public_key_pem=signer.public_key_pem)
    assert raised.value.reason == "DEVELOPMENT_KEY"
    assert verify(output, signer).development_key


def test_a_file_that_is_too_large_to_be_a_document_is_not_read(output, signer):
    for name in ("model.sig", "approval.dsse.json"):
        saved = (output / name).read_bytes()
        with (output / name).open("r+b") as file:
            file.truncate(1 << 40)
        assert "more than" in refused(output, signer)
        (output / name).write_bytes(saved)


def test_what_is_no_folder_is_refused(tmp_path, signer):
    assert "is not a folder" in refused(tmp_path / "nowhere", signer)
    (tmp_path / "empty").mkdir()
    assert "model.sig' is missing" in refused(tmp_path / "empty", signer)


def test_the_openssf_verifier_accepts_the_same_folder(output, signer, tmp_path):
    key = tmp_path / "key.pem"
    key.write_text(signer.public_key_pem)
    (output / "model/.gitignore").unlink(missing_ok=True)
    config = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key)
    config.verify(output, output / "model.sig")
    (output / "model/config.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match="Hash mismatch"):
        model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key).verify(output, output / "model.sig")


def test_git_files_of_the_model_are_signed_like_any_other(tmp_path, signer):
    prepared = prepare(samples.APPROVED, tmp_path, signer, {**FILES, ".gitattributes": b"*.onnx filter=lfs\n"})
    folder = prepared.download(prepared.publish(), tmp_path / "output")
    assert verify(folder, signer)
    (folder / "model/.gitattributes").write_bytes(b"")
    assert "'model/.gitattributes' was changed" in refused(folder, signer)
