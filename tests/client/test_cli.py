"""The command line against a real server without workers: what it sends, prints and returns."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from modelpress.cli.app import run
from modelpress.cli.exits import Exit

ROOT = Path(__file__).parents[2]
NOBODY = "127.0.0.1:1"


@pytest.fixture
def cli(server, capsys, monkeypatch, tmp_path):
    """cli(*arguments) -> (exit code, stdout, stderr), run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELPRESS_ADDRESS", server.address)
    monkeypatch.setenv("MODELPRESS_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def submit(cli, inputs):
    """submit(*more) -> as cli."""
    files = [f"--{name}={inputs / name}.yaml" for name in ("recipe", "policy", "evaluation")]

    def call(*more, command="submit", base=inputs / "model", evaluation=inputs / "eval"):
        return cli(command, base, *files, "--eval", evaluation, *more)

    return call


def test_a_detached_submission_prints_one_name(submit, cli):
    code, out, err = submit("--detach", "--label", "owner=ml", "--priority", "-3")
    assert code == Exit.OK
    (name,) = out.split()
    assert f"{name} is queued" in err
    code, out, _ = cli("get", name, "--json")
    conversion = json.loads(out)["conversion"]
    assert (conversion["name"], conversion["state"], conversion["priority"]) == (name, "QUEUED", -3)
    assert conversion["labels"] == {"owner": "ml"}
    assert cli("cancel", name)[0] == Exit.OK
    assert "CANCELLED" in cli("get", name)[1]
    assert cli("watch", name)[0] == Exit.CONVERSION_CANCELLED
    assert cli("retry", name, "--detach")[1].split() == [name]
    assert cli("retry", name, "--detach")[0] == Exit.WRONG_STATE
    assert cli("download", name)[0] == Exit.WRONG_STATE
    assert cli("report", name)[0] == Exit.WRONG_STATE
    assert cli("cancel", name)[0] == Exit.OK


def test_every_command_prints_one_json_document(submit, cli, inputs):
    _, out, _ = submit("--detach", "--json", "--label", "test=json")
    name = json.loads(out)["conversion"]["name"]
    assert json.loads(cli("list", "--json", "--label", "test=json")[1])["conversions"][0]["name"] == name
    assert json.loads(cli("cancel", name, "--json")[1])["conversion"]["state"] == "CANCELLED"
    assert json.loads(cli("watch", name, "--json")[1])["conversion"]["state"] == "CANCELLED"
    assert json.loads(submit("--json", command="estimate")[1])["estimate"]["steps"]
    assert json.loads(cli("inspect", inputs / "eval", "--json")[1])["facts"]["rows"] == 200
    assert json.loads(cli("key", "--output", "key.pem", "--json")[1])["development_key"] is True
    assert json.loads(cli("report", name, "--json")[1])["error"]["exit_code"] == Exit.WRONG_STATE


@pytest.fixture
def merge(cli, merge_inputs, monkeypatch):
    """merge(*more) -> as cli, in the folder of the inputs of a merge."""

    def call(*more, command="submit", recipe="recipe.yaml", policy="policy.yaml"):
        monkeypatch.chdir(merge_inputs)
        return cli(command, "base", *more, "--recipe", recipe, "--policy", policy)

    return call


def test_a_merge_is_submitted_with_weighted_adapters_and_no_dataset(merge, cli):
    code, out, err = merge("--adapter", "a=lora-a:0.5", "--adapter", "b=lora-b", "--detach")
    assert code == Exit.OK, err
    inputs = json.loads(cli("get", out.strip(), "--json")[1])["conversion"]["inputs"]
    assert (set(inputs["adapters"]), inputs["models"], inputs["evaluation"]) == ({"a", "b"}, {}, "")
    code, out, _ = merge("--adapter", "a=lora-a:0.5", "--json", command="estimate")
    estimate = json.loads(out)["estimate"]
    assert (code, estimate["steps"]) == (Exit.OK, ["compress/1-merge_lora", "evaluate/merge"])


def test_models_are_merged_the_same_way(merge, cli):
    code, out, err = merge("--model", "other=other:0.5", "--detach", recipe="models.yaml", policy="change.yaml")
    assert code == Exit.OK, err
    inputs = json.loads(cli("get", out.strip(), "--json")[1])["conversion"]["inputs"]
    assert set(inputs["models"]) == {"other"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--adapter", "a=lora-a", "--eval", "lora-a"], "inputs.evaluation is set, and nothing reads it"),
        ([], "inputs.adapters is empty, and recipe.stages[0] is 'merge_lora'"),
        (["--adapter", "a=lora-a:0"], "--adapter 'a=lora-a:0': adapter 'a' has weight 0.0"),
        (["--adapter", "a=base"], "--adapter a: 'base' is a folder of kind model, where adapter is needed"),
        (["--adapter", "a=lora-a", "--model", "m=other"], "no stage merges the models m"),
        (["--model", "M=other"], "--model 'M=other': model name 'M' is not 1 to 63 of a-z"),
    ],
)
def test_a_merge_that_cannot_be_is_refused_before_anything_is_sent(merge, options, sentence):
    code, out, err = merge(*options, "--address", NOBODY)
    assert (code, out, err.count("\n")) == (Exit.INVALID_REQUEST, "", 1)
    assert sentence in err


def test_the_same_request_id_is_the_same_conversion(submit, cli):
    first = submit("--detach", "--request-id", "cli-1")[1]
    assert submit("--detach", "--request-id", "cli-1")[1] == first
    code, _, err = submit("--detach", "--request-id", "cli-1", "--seed", "4")
    assert (code, err.count("\n")) == (Exit.WRONG_STATE, 1)
    cli("cancel", first.strip())


def test_an_artifact_that_was_sent_before_is_given_by_name(submit, cli, inputs):
    name = json.loads(cli("inspect", inputs / "model", "--json")[1])["name"]
    submit("--detach")
    code, out, err = submit("--detach", "--json", base=name)
    assert (code, json.loads(out)["conversion"]["inputs"]["base"]) == (Exit.OK, name)
    assert "uploading" not in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory-limit", "much"], "--memory-limit 'much'"),
        (["--run-timeout", "soon"], "--run-timeout 'soon'"),
        (["--run-timeout", "0s"], "limits.run_timeout is 0 s"),
        (["--label", "owner"], "--label 'owner'"),
        (["--adapter", "guard"], "--adapter 'guard'"),
        (["--label", "Owner=ml"], "label key 'Owner'"),
        (["--adapter", "guard=none"], "no stage merges the adapters guard"),
        (["--adapter", "Guard=none"], "adapter name 'Guard'"),
        (["--validation", "{inputs}/eval"], "inputs.train is not"),
        (["--priority", "101"], "priority is 101"),
        (["--seed", "-1"], "seed is -1"),
        (["--detach", "--output", "x"], "--detach does not wait"),
        (["--train", "{inputs}/model"], "kind model, where dataset is needed"),
        (["--train", "none"], "--train: 'none' is not a folder"),
        (["--eval", "none"], "--eval: 'none' is not a folder"),
        (["--recipe", "none.yaml"], "cannot read 'none.yaml'"),
        (["--recipe", "{inputs}/policy.yaml"], "policy.yaml: gates: unknown field"),
        (["--policy", "{inputs}/recipe.yaml"], "recipe.yaml: stages: unknown field"),
        (["--evaluation", "{inputs}/recipe.yaml"], "recipe.yaml: stages: unknown field"),
        (["--recipe", "{inputs}/model/model.safetensors"], "is not UTF-8 text"),
        (["--seed", "x"], "--seed"),
        (["--bogus"], "--bogus"),
    ],
)
def test_a_fault_is_found_before_anything_is_sent(submit, inputs, arguments, sentence):
    filled = [argument.format(inputs=inputs) for argument in arguments]
    code, out, err = submit(*filled, "--address", NOBODY)
    assert (code, out) == (Exit.INVALID_REQUEST, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_an_output_folder_with_other_files_is_found_before_anything_is_sent(submit, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("x")
    code, out, err = submit("--output", "mine", "--address", NOBODY)
    assert (code, out) == (Exit.WRONG_STATE, "")
    assert "'mine' holds other files" in err


def test_a_base_that_is_no_model_is_refused(submit, inputs):
    code, _, err = submit("--address", NOBODY, base=inputs / "eval")
    assert (code, "BASE" in err, err.count("\n")) == (Exit.INVALID_REQUEST, True, 1)


def test_what_the_server_refuses_is_one_sentence_too(submit, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/rows.jsonl").write_text('{"text": "w1", "label": "unheard of"}\n')
    code, out, err = submit(evaluation=tmp_path / "rows")
    assert (code, out) == (Exit.INVALID_REQUEST, "")
    assert "unheard of" in err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1


def test_no_server_is_one_sentence_with_the_address(cli):
    code, out, err = cli("list", "--address", NOBODY, "--json")
    assert (code, json.loads(out)["error"]["reason"]) == (Exit.UNAVAILABLE, "UNAVAILABLE")
    assert err.startswith(f"error: no server answers at {NOBODY}")
    assert err.count("\n") == 1


def test_what_is_not_there_has_a_code_of_its_own(cli, tmp_path):
    assert cli("get", "none")[0] == Exit.NOT_FOUND
    assert cli("list", "--state", "RUNING")[0] == Exit.INVALID_REQUEST
    assert cli("verify", tmp_path, "--key", "none.pem")[0] == Exit.INVALID_REQUEST
    assert cli("nonsense")[0] == Exit.INVALID_REQUEST
    assert cli()[0] == Exit.INVALID_REQUEST
    assert cli("--version")[0] == Exit.OK


def test_the_key_says_plainly_that_it_is_for_development(cli, tmp_path):
    code, _, err = cli("key", "--output", tmp_path / "keys/server.pem")
    assert code == Exit.OK
    assert "development key" in err
    assert (tmp_path / "keys/server.pem").read_text().startswith("-----BEGIN PUBLIC KEY-----")


def test_ctrl_c_while_waiting_detaches_and_says_how_to_come_back(server, inputs, cli):
    arguments = [f"--{name}={inputs / name}.yaml" for name in ("recipe", "policy", "evaluation")]
    command = [sys.executable, "-m", "modelpress", "submit", inputs / "model", "--eval", inputs / "eval", *arguments]
    environment = os.environ | {"MODELPRESS_ADDRESS": server.address, "PYTHONPATH": str(ROOT)}
    lines = []
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) as process:
        for line in process.stderr:
            lines.append(line)
            if line == "conversion queued\n":
                threading.Timer(0.3, process.send_signal, [signal.SIGINT]).start()
        out = process.stdout.read()
    assert process.returncode == Exit.INTERRUPTED
    name = lines[0].split()[0]
    assert out == ""
    assert lines[-1] == (
        f"error: detached, and {name} goes on: `modelpress watch {name}` comes back to it, "
        f"`modelpress cancel {name}` stops it\n"
    )
    assert "Traceback" not in "".join(lines)
    assert cli("cancel", name)[0] == Exit.OK


def test_a_fault_of_our_own_is_one_sentence(cli, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("modelpress.inspection.inspect_folder", fail)
    code, out, err = cli("inspect", ".")
    assert (code, out, err.count("\n")) == (Exit.INTERNAL, "", 1)
    assert "ZeroDivisionError: division by zero" in err
    monkeypatch.setenv("MODELPRESS_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli("inspect", ".")
