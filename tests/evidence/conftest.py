"""Published output folders: real signer, real content store, sample figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelpress.manifests import scan_folder
from service.publication import Publication, Sources, publish
from service.requests import ConversionRequest
from service.signing import Signer, load_or_create_signer
from service.storage.store import ContentStore
from tests.evidence import language_samples, merge_samples, samples

AnyCase = samples.Case | merge_samples.MergeCase | language_samples.LanguageCase
CASES: dict[str, AnyCase] = {**samples.CASES, **merge_samples.CASES, **language_samples.CASES}
FILES = {
    "config.json": b'{"model_type": "bert"}',
    "model.onnx": b"\x08\x0a" * 700,
    "tokenizer/vocab.txt": b"[PAD]\n[CLS]\n",
}


@dataclass(frozen=True)
class Conversion:
    id: str
    request: ConversionRequest
    attempt: int = 1


@dataclass(frozen=True)
class Desk:
    """What `publish` needs of the desk of an attempt."""

    conversion: Conversion
    store: ContentStore
    signer: Signer
    scratch: Path

    def now(self) -> float:
        return 1_796_040_300.0


@dataclass(frozen=True)
class Prepared:
    """Everything that `publish` is given for one case."""

    case: AnyCase
    desk: Desk
    sources: Sources

    @property
    def report(self):
        return self.case.report(self.sources.model)

    def publish(self) -> Publication:
        return publish(self.report, self.sources, self.desk)

    def download(self, publication: Publication, folder: Path) -> Path:
        self.desk.store.fetch_folder(self.desk.store.manifest(publication.output), folder)
        return folder


def prepare(case: AnyCase, root: Path, signer: Signer, files: dict[str, bytes] | None = None) -> Prepared:
    """Store the candidate's files and name the sources."""
    store = ContentStore(str(root / "store"), scratch=root / "scratch")
    model = root / "candidate"
    for name, data in (files or FILES).items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(data)
    digest = store.put_folder(model).digest
    assert digest == scan_folder(model).digest
    sources = Sources(digest, case.recipe_yaml, case.policy_yaml, case.evaluation_yaml)
    conversion = Conversion(samples.CONVERSION, case.request())
    return Prepared(case, Desk(conversion, store, signer, root / "scratch"), sources)


@pytest.fixture(scope="session")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return load_or_create_signer(tmp_path_factory.mktemp("data"), None)


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory, signer: Signer) -> Callable[[str], Path]:
    """One downloaded output per case, made once; tests copy it before they change it."""
    made: dict[str, Path] = {}

    def output(name: str) -> Path:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            prepared = prepare(CASES[name], root, signer)
            made[name] = prepared.download(prepared.publish(), root / "output")
        return made[name]

    return output


@pytest.fixture
def output(outputs: Callable[[str], Path], tmp_path: Path) -> Path:
    """A fresh copy of the approved output."""
    return copy(outputs("approved"), tmp_path / "output")


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def all_files(folder: Path) -> list[str]:
    return sorted(
        Path(root, name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names
    )
