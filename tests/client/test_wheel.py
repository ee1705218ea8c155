"""The wheel in training environments: oldest and newest Python, oldest and newest protobuf, no torch."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelpress.manifests import scan_folder

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "examples/prompt_guard/adapter"
ENVIRONMENTS = {
    "3.10": ("protobuf==6.31.1", "grpcio==1.76.0"),
    "3.13": ("protobuf>=7,<8",),
}

ROUND_TRIP = """
import sys, pathlib, modelpress
with modelpress.Client(sys.argv[1]) as client:
    assert client.capabilities().public_key_pem.startswith("-----BEGIN PUBLIC KEY")
    name = client.upload_folder(pathlib.Path(sys.argv[2]), modelpress.ArtifactKind.DATASET)
    client.download(name, pathlib.Path(sys.argv[3]))
assert "torch" not in sys.modules
"""


def python_of(version):
    """An interpreter of that version, or None. pyenv's shims exist for versions that do not run."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *versions.glob(f"{version}.*/bin/python")]
    for candidate in filter(None, found):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        answer = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return candidate
    return None


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds the wheel and what it asks for."""

    root: Path

    def run(self, *command, cwd=None):
        """Run a program of the environment, away from the checkout; its stdout."""
        program, *arguments = map(str, command)
        outside = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(
            [self.root / "bin" / program, *arguments],
            cwd=cwd or self.root,
            env=outside,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT], check=True, capture_output=True
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def environment(request, wheel, tmp_path_factory):
    interpreter = python_of(request.param)
    if interpreter is None:
        pytest.skip(f"no Python {request.param} on this machine")
    root = tmp_path_factory.mktemp(f"python-{request.param}")
    subprocess.run([interpreter, "-m", "venv", root], check=True)
    made = Environment(root)
    made.run("python", "-m", "pip", "install", "--quiet", *ENVIRONMENTS[request.param], wheel)
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_installs_without_conflict_and_without_frameworks(environment):
    environment.run("python", "-m", "pip", "check")
    names = {entry["name"].lower() for entry in json.loads(environment.run("pip", "list", "--format", "json"))}
    assert "modelpress" in names
    assert names.isdisjoint({"torch", "numpy", "transformers", "onnxruntime", "sqlalchemy"})
    installed = environment.run(
        "python", "-c", "import modelpress, pathlib; print(pathlib.Path(modelpress.__file__).parent)"
    )
    assert {path.name for path in Path(installed.strip()).parent.iterdir()}.isdisjoint({"service", "compressors"})
    assert (Path(installed.strip()) / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_public_name_imports_with_warnings_as_errors(environment):
    code = "import modelpress; print(len([getattr(modelpress, name) for name in modelpress.__all__]))"
    assert int(environment.run("python", "-W", "error", "-c", code)) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_line_works_offline(environment):
    assert "submit" in environment.run("modelpress", "--help")
    found = json.loads(environment.run("modelpress", "inspect", ADAPTER, "--json"))
    assert (found["kind"], found["name"]) == ("adapter", f"artifacts/{scan_folder(ADAPTER).digest}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_talks_to_a_server(environment, server, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/rows.jsonl").write_text('{"text": "x", "label": "a"}\n')
    environment.run("python", "-W", "error", "-c", ROUND_TRIP, server.address, tmp_path / "rows", tmp_path / "back")
    assert scan_folder(tmp_path / "back") == scan_folder(tmp_path / "rows")
    environment.run("modelpress", "key", "--output", tmp_path / "key.pem", "--address", server.address)
    assert (tmp_path / "key.pem").read_text().startswith("-----BEGIN PUBLIC KEY")
