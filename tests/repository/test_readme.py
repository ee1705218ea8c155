"""What README and docs tell a newcomer to type works, and what they point at is there."""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from modelpress.cli.app import build_app
from tests.servers import ROOT, RunningServer, launch

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
DEFAULT_ADDRESS = "127.0.0.1:8471"


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [block["text"] for block in found if block["language"] == language]


def commands(page: Path) -> list[list[str]]:
    """The words of every command that follows a `$` in a console block."""
    lines = "\n".join(blocks(page, "console")).replace("\\\n", " ").splitlines()
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ ")]


def named(pages: tuple[Path, ...]) -> list:
    """(page, words) of every command, each a test of its own."""
    return [
        pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}") for page in pages for words in commands(page)
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = launch(tmp_path_factory.mktemp("readme") / "data")
    yield running
    running.kill()


def test_the_readme_begins_with_the_two_commands() -> None:
    assert commands(ROOT / "README.md")[:2] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("words", named(PAGES))
def test_a_command_can_be_typed_as_it_stands(words: list[str]) -> None:
    program = Path(words[0]).name
    assert program in CHECKS, f"{program} is unknown to this test: add how to check it"
    CHECKS[program](words[1:])


def check_make(arguments: list[str]) -> None:
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    assert done.returncode == 0, done.stderr


def check_modelpress(arguments: list[str]) -> None:
    """Parse the whole line, options and required values, without running it."""
    group = typer.main.get_command(build_app())
    name, *rest = arguments
    assert name in group.commands, f"modelpress has no command {name!r}"
    group.commands[name].make_context(name, rest)


CHECKS = {"make": check_make, "modelpress": check_modelpress}


def test_the_pipeline_that_checks_everything_calls_targets_that_exist() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    targets = [line.split() for line in lines if line.startswith("make ")]
    assert [target[1] for target in targets] == ["check", "test", "test-slow", "demo", "demo-llm"]
    for _, *arguments in targets:
        check_make(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_points_at_a_file(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    assert missing == []


def test_every_folder_of_the_readme_s_table_exists() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    folders = [folder for row in rows for folder in re.findall(r"`([\w/]+/)`", row.split("|")[1])]
    assert len(folders) >= 8
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


@pytest.mark.parametrize("snippet", blocks(ROOT / "README.md", "python"))
def test_the_python_snippet_runs_against_a_server(snippet: str, server: RunningServer) -> None:
    assert DEFAULT_ADDRESS in snippet
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(snippet.replace(DEFAULT_ADDRESS, server.address), "README.md", "exec"), {})  # noqa: S102
    assert {"merge_lora", "prune", "recover", "quantize", "export"} <= set(re.findall(r"\w+", printed.getvalue()))
