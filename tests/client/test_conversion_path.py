"""From `submit` to `verify` with a worker that computes: the verdict decides exit code, label and folder."""

import json
import re
import shutil
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from modelpress.cli.app import run
from modelpress.cli.exits import Exit
from modelpress.client import Client
from modelpress.manifests import ArtifactKind, scan_folder
from modelpress.reports import Outcome, Verdict
from modelpress.requests import ConversionRequest, Documents
from modelpress.views import ConversionState, StateChanged, StepFinished
from tests.servers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STRICT = "gates:\n  size: {max_ratio: 0.01}\n"
TRAIN = """
stages:
  - {method: prune, importance: magnitude, ratio: 0.5}
  - {method: recover, steps: 1000, batch_size: 8, checkpoint_every: 50, max_length: 24}
  - method: export
"""
WORKER = {"MODELPRESS_WORKERS_SLOTS": "1", "MODELPRESS_WORKERS_THREADS": "1"}


@pytest.fixture(scope="module")
def address(tmp_path_factory, launch_server):
    return launch_server(tmp_path_factory.mktemp("path") / "data", **WORKER).address


@pytest.fixture
def cli(address, capsys, monkeypatch, tmp_path):
    """cli(*arguments) -> (exit code, stdout, stderr), run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELPRESS_ADDRESS", address)

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def submit(cli, inputs):
    def call(*more, policy=inputs / "policy.yaml"):
        files = ["--recipe", inputs / "recipe.yaml", "--evaluation", inputs / "evaluation.yaml", "--policy", policy]
        return cli("submit", inputs / "model", "--eval", inputs / "eval", *files, *more)

    return call


def test_approved_is_shown_downloaded_and_verified(submit, cli, tmp_path):
    code, out, err = submit("--output", "output", "--json")
    assert code == Exit.OK, err
    outcome = json.loads(out)
    assert (outcome["conversion"]["verdict"], outcome["folder"]) == ("APPROVED", "output")
    assert {gate["name"]: gate["outcome"] for gate in outcome["report"]["gates"]} == {
        "flips": "PASSED",
        "size": "PASSED",
    }
    assert "done export/candidate" in err
    assert "\x1b" not in err
    assert not (tmp_path / "output/.modelpress-partial").exists()

    assert cli("key", "--output", "key.pem")[0] == Exit.OK
    assert cli("verify", "output", "--key", "key.pem")[0] == Exit.VERIFICATION_FAILED
    code, out, _ = cli("verify", "output", "--key", "key.pem", "--allow-development-key")
    assert (code, "APPROVED" in out) == (Exit.OK, True)
    name = outcome["conversion"]["name"]
    _, out, err = cli("report", name, "--json", "--html", "page.html")
    assert json.loads(out) == json.loads((tmp_path / "output/report.json").read_text())
    assert err == "report.html is in page.html\n"
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "output/report.html").read_bytes()
    (tmp_path / "output/model/config.json").write_text("{}")
    assert cli("verify", "output", "--key", "key.pem", "--allow-development-key")[0] == Exit.VERIFICATION_FAILED


def test_rejected_is_labelled_everywhere(submit, cli, tmp_path):
    (tmp_path / "strict.yaml").write_text(STRICT)
    code, out, _ = submit(policy="strict.yaml")
    assert code == Exit.REJECTED
    assert "REJECTED" in out
    assert "size   FAILED" in out
    name = json.loads(cli("list", "--json", "--verdict", "rejected")[1])["conversions"][0]["name"]
    code, out, _ = cli("download", name)
    folder = name.removeprefix("conversions/") + "-REJECTED"
    assert (code, folder in out) == (Exit.REJECTED, True)
    cli("key", "--output", "key.pem")
    code, out, _ = cli("verify", folder, "--key", "key.pem", "--allow-development-key")
    assert (code, "REJECTED" in out) == (Exit.REJECTED, True)
    assert cli("report", name)[0] == Exit.OK


def test_the_client_sees_what_the_command_line_shows(address, inputs, tmp_path):
    texts = {name: (inputs / f"{name}.yaml").read_text() for name in ("recipe", "policy", "evaluation")}
    with Client(address) as client:
        base = client.upload_folder(inputs / "model", ArtifactKind.MODEL)
        evaluation = client.upload_folder(inputs / "eval", ArtifactKind.DATASET)
        made = client.create_conversion(ConversionRequest(Documents(**texts), base=base, evaluation=evaluation))
        done = client.wait(made.name, timeout_s=300)
        assert (done.state, done.verdict) == (ConversionState.SUCCEEDED, Verdict.APPROVED)
        assert {gate.outcome for gate in client.report(done.name).gates} == {Outcome.PASSED}
        client.download(done.output, tmp_path / "output")
        assert scan_folder(tmp_path / "output") == client.get_artifact(done.output).manifest
        steps = [event.body for event in client.watch(made.name) if isinstance(event.body, StepFinished)]
        assert {"export/candidate", "drift"} <= {step.step for step in steps}


def test_a_watch_sees_a_conversion_to_its_end_over_the_server_s_sudden_death(
    start_server, proxy, patient, inputs, tmp_path
):
    first = start_server(tmp_path / "server", **WORKER)
    between, killed = proxy(first), threading.Event()
    texts = {"policy": (inputs / "policy.yaml").read_text(), "evaluation": (inputs / "evaluation.yaml").read_text()}
    finished, states = [], []
    with Client(between.address, retry_policy=patient) as client:
        named = {role: client.upload_folder(inputs / role, ArtifactKind.DATASET) for role in ("eval", "train")}
        base = client.upload_folder(inputs / "model", ArtifactKind.MODEL)
        request = ConversionRequest(
            Documents(recipe=TRAIN, **texts), base=base, evaluation=named["eval"], train=named["train"]
        )
        made = client.create_conversion(request)
        for event in client.watch(made.name):
            if isinstance(event.body, StepFinished):
                finished.append(event.body.step)
            if isinstance(event.body, StateChanged):
                states.append(event.body.state)
            if len(finished) == 2 and not killed.is_set():
                killed.set()
                first.kill()
                between.target = start_server(tmp_path / "server", **WORKER).address
        done = client.get(made.name)
    assert killed.is_set()
    assert (states[-1], done.state, done.attempt) == (ConversionState.SUCCEEDED, ConversionState.SUCCEEDED, 2)
    assert len(finished) == len(set(finished))


def test_the_live_folder_of_one_output_takes_no_other(submit, cli, tmp_path):
    assert submit("--output", "output")[0] == Exit.OK
    before = scan_folder(tmp_path / "output")
    (tmp_path / "strict.yaml").write_text(STRICT)
    assert submit("--output", "output", policy="strict.yaml")[0] == Exit.WRONG_STATE
    assert scan_folder(tmp_path / "output") == before
    shutil.rmtree(tmp_path / "output")


def test_the_pipeline_of_the_documentation_ends_with_a_verified_folder(address, cli, inputs, tmp_path, capsys):
    for source, name in (("model", "model"), ("train", "train"), ("eval", "test")):
        shutil.copytree(inputs / source, tmp_path / name)
    for document in inputs.glob("*.yaml"):
        shutil.copy(document, tmp_path)
    cli("key", "--output", "public-key.pem")
    pipeline, use, _ = documented()
    exec(compile(pipeline.replace("127.0.0.1:8471", address), "python.md", "exec"), {})  # noqa: S102
    assert "APPROVED sha256:" in capsys.readouterr().out
    exec(compile(use, "python.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out in ("['benign']\n", "['injection']\n")


def test_the_merge_of_the_documentation_gives_the_weights_that_the_formula_does(
    address, merge_inputs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for source, name in (("base", "base"), ("lora-a", "lora")):
        shutil.copytree(merge_inputs / source, tmp_path / name)
    for source, name in (("recipe", "merge"), ("policy", "merge-policy")):
        shutil.copy(merge_inputs / f"{source}.yaml", tmp_path / f"{name}.yaml")
    _, _, merge = documented()
    exec(compile(merge.replace("127.0.0.1:8471", address), "python.md", "exec"), {})  # noqa: S102
    base, merged = (load_file(tmp_path / f"{folder}/model.safetensors") for folder in ("base", "merged/model"))
    lora = load_file(tmp_path / "lora/adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (lora[f"base_model.model.{name}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    wanted = base[f"{name}.weight"] + 0.7 * (1 / 2) * b @ a
    np.testing.assert_allclose(merged[f"{name}.weight"], wanted, rtol=0, atol=1e-7)
    assert all(np.array_equal(merged[other], base[other]) for other in base if other != f"{name}.weight")


def documented():
    """The programs of docs/python.md, in their order."""
    page = (ROOT / "docs/python.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
