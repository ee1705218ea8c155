"""The process: one line with the address, health, a graceful end, and a clear sentence where it cannot start."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from modelpress.errors import FailedPrecondition
from modelpress.v1 import artifacts_pb2 as pb
from modelpress.v1 import capabilities_pb2
from service.config import load_config
from service.foundation import lay_foundation
from service.threads import Threads
from tests.service.wire import Drip, chunk, chunks, wait_until

ROOT = Path(__file__).parents[2]
CODE = grpc.StatusCode


def start_and_fail(*arguments: str) -> str:
    """Run a server that cannot start; what it says."""
    command = [sys.executable, "-m", "service", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    return ended.stderr


def test_importing_the_application_does_not_import_torch() -> None:
    program = "import sys, service.app; print(sorted({'torch', 'transformers', 'onnxruntime'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_health_reflection_and_capabilities_answer(wire: Any) -> None:
    health = health_pb2_grpc.HealthStub(wire.channel)
    for service in ("", "modelpress.v1.Artifacts", "modelpress.v1.Reports"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(wire.channel)
    listed = next(stub.ServerReflectionInfo(iter([question])))
    names = {service.name for service in listed.list_services_response.service}
    assert {"modelpress.v1.Artifacts", "modelpress.v1.Capabilities", "grpc.health.v1.Health"} <= names
    able = wire.capabilities.GetCapabilities(capabilities_pb2.GetCapabilitiesRequest())
    assert {"merge_lora", "prune", "recover", "quantize", "quantize_weights", "export"} <= set(able.methods)
    assert list(able.formats) == ["onnx", "safetensors", "compressed-tensors", "gptq", "bitsandbytes"]
    assert list(able.tasks) == ["text-classification", "text-generation"]
    assert {"bert", "llama", "qwen3"} <= set(able.families)
    assert list(able.devices) == list(able.runtimes) == []  # this server has no workers that could tell
    assert "bert" in able.families and able.max_chunk_bytes == 2 << 20
    assert able.development_key and able.public_key_pem.startswith("-----BEGIN PUBLIC KEY-----")


def test_an_unknown_method_is_unimplemented(wire: Any) -> None:
    call = wire.channel.unary_unary("/modelpress.v1.Artifacts/Nothing")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"")
    assert caught.value.code() == CODE.UNIMPLEMENTED


def test_it_says_its_address_in_one_line_and_logs_json(server: Any) -> None:
    lines = server.log.read_text().splitlines()
    assert f"modelpress serves at {server.address}" in lines
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in logged)


def test_a_second_server_on_one_data_folder_is_refused(server: Any) -> None:
    said = start_and_fail("--data", str(server.data), "--port", "0")
    assert said.count("\n") == 1 and "another server" in said


def test_a_taken_port_and_a_bad_configuration_are_one_sentence(server: Any, tmp_path: Path) -> None:
    port = server.address.rpartition(":")[2]
    said = start_and_fail("--data", str(tmp_path / "data"), "--port", port)
    assert said.splitlines()[-1].startswith(f"modelpress: cannot listen on 127.0.0.1:{port}")
    (tmp_path / "c.toml").write_text("[server]\naddress = '0.0.0.0'\n")
    assert "reachable from other machines" in start_and_fail("--config", str(tmp_path / "c.toml"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", "{folder}/file/data"),
        ("database_url", "postgresql://modelpress:s3cret@127.0.0.1:9/modelpress"),
        ("store_url", "{folder}/file/store"),
    ],
)
def test_storage_that_cannot_be_used_is_one_sentence_without_the_password(
    tmp_path: Path, field: str, value: str
) -> None:
    (tmp_path / "file").write_text("")
    storage = {"data": tmp_path / "data", field: value.format(folder=tmp_path)}
    with pytest.raises(FailedPrecondition, match=rf"^storage\.{field} cannot be used: ") as caught:
        lay_foundation(load_config(None, {}, {"storage": storage}), Threads(1))
    assert "s3cret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_drained_server_ends_streams_as_unavailable_and_keeps_their_bytes(
    start_server: Any, call: Any, tmp_path: Path
) -> None:
    running = start_server(tmp_path / "data", "[server]\ngrace_s = 0.2\n")
    wire, data = call(running), random.Random(1).randbytes(3000)
    name = wire.create_upload(data).name
    drip = Drip()
    drip.send(chunk(name, 0, data[:1000]))
    writing = wire.artifacts.WriteUpload.future(iter(drip))
    wait_until(lambda: wire.artifacts.GetUpload(pb.GetUploadRequest(name=name)).received_bytes == 1000)
    assert running.stop() == 0
    drip.end()
    assert writing.exception().code() == CODE.UNAVAILABLE
    assert '"exception"' not in running.log.read_text()
    again = call(start_server(tmp_path / "data"))
    upload = again.create_upload(data)
    assert (upload.name, upload.received_bytes) == (name, 1000)
    assert again.artifacts.WriteUpload(chunks(name, data, start=1000)).complete
