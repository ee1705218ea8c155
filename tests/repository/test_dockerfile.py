"""The image: built only from files that are there, for a user that is not root, with a start and a health check that
exist. Building it needs an engine, which tests do not assume."""

import importlib.util
import json
import re

import tomllib

from tests.servers import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().split()


def instructions(name: str) -> list[str]:
    """What follows every instruction of that name, continued lines joined."""
    joined = TEXT.replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def copied() -> list[str]:
    """Sources of every COPY from the build context."""
    return [word for line in instructions("COPY") if not line.startswith("--from") for word in line.split()[:-1]]


def test_every_copied_file_is_in_the_build_context() -> None:
    assert [name for name in copied() if not (ROOT / name).exists() or name in IGNORED] == []


def test_every_package_that_the_service_needs_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["importlinter"]["root_packages"]) <= set(copied())


def test_what_is_started_exists() -> None:
    for name in ("ENTRYPOINT", "HEALTHCHECK"):
        (line,) = instructions(name)
        words = json.loads(line[line.index("[") :])
        assert words[:2] == ["python", "-m"]
        assert importlib.util.find_spec(words[2] if "." in words[2] else f"{words[2]}.__main__")


def test_it_runs_as_a_numbered_user_that_is_not_root() -> None:
    *_, user = instructions("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


def test_torch_has_the_version_of_the_constraints() -> None:
    pinned = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"torch==([\d.]+)", TEXT)) == set(pinned) and len(pinned) == 1
