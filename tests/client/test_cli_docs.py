"""docs/cli.md lists exactly the commands, options and exit codes that there are."""

import re
from pathlib import Path

import pytest
import typer

from modelpress.cli.app import build_app
from modelpress.cli.exits import Exit
from modelpress.settings import PREFIX, Settings

PAGE = (Path(__file__).parents[2] / "docs/cli.md").read_text()
COMMANDS = typer.main.get_command(build_app()).commands
FLAG = re.compile(r"`(--[a-z-]+)")
SERVER_FLAGS = {"--address", "--tls-ca", "--token-file"}
SHARED_FLAGS = SERVER_FLAGS | {"--json", "--help"}


def sections():
    """Command -> its part of the page."""
    parts = re.split(r"^### (\w+)$", PAGE.partition("## Commands")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def flags(command):
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")}


def test_every_command_has_a_section():
    assert list(sections()) == list(COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_section_names_exactly_the_command_s_own_options(name):
    assert set(FLAG.findall(sections()[name])) - SHARED_FLAGS == flags(COMMANDS[name]) - SHARED_FLAGS


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_option_has_help_and_every_command_says_what_it_does(name):
    assert COMMANDS[name].help
    assert all(parameter.help for parameter in COMMANDS[name].params)


def test_every_command_has_json_and_all_but_the_offline_ones_the_connection():
    assert all("--json" in flags(command) for command in COMMANDS.values())
    offline = {name for name, command in COMMANDS.items() if SERVER_FLAGS - flags(command)}
    assert offline == {"verify", "inspect"}
    shared = PAGE.partition("## Options of every command")[2].partition("## Commands")[0]
    assert set(FLAG.findall(shared)) == SHARED_FLAGS


def test_every_exit_code_is_in_the_table():
    rows = re.findall(r"^\| (\d+) \| (\w+) \| \S", PAGE, flags=re.MULTILINE)
    assert [(int(code), name) for code, name in rows] == [(code.value, code.name) for code in Exit]


def test_every_setting_is_in_the_table():
    rows = re.findall(r"`(MODELPRESS_\w+)` \| `(\w+)` \|$", PAGE, flags=re.MULTILINE)
    assert sorted(rows) == sorted((PREFIX + name.upper(), name) for name in Settings.model_fields)
