"""A decoder with degenerate weights, and a conversion that is cut, go through the whole service to a sound end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from modelpress.client import Client
from modelpress.errors import InvalidModel
from modelpress.manifests import ArtifactKind
from modelpress.output import MODEL
from modelpress.reports import Verdict
from modelpress.requests import ConversionRequest, Documents
from modelpress.views import ConversionState
from tests.compressors.decoders import trained_decoder
from tests.end_to_end.test_quantize_weights import EVALUATION, POLICY, RECIPE, THREADS, Service, running
from tests.service.jobs.served import RealServer

ROUNDED = RECIPE.replace("group_size: 32", "group_size: 32, algorithm: rtn")
KEYS = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("faults")) as service:
        yield service


def with_first_row(folder: Path, value: float) -> Path:
    """The trained decoder, the first row of one of its layers filled with `value`."""
    shutil.copytree(trained_decoder(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{KEYS}.weight"][0] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def request_of(service: Service, base: str) -> ConversionRequest:
    documents = Documents(recipe=ROUNDED, policy=POLICY, evaluation=EVALUATION)
    return ConversionRequest(documents, base=base, evaluation=service.evaluation)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(service, tmp_path, value):
    with pytest.raises(InvalidModel, match=rf"{KEYS}\.weight.*NaN or infinite"):
        service.client.upload_folder(with_first_row(tmp_path / "model", value), ArtifactKind.MODEL)


@pytest.mark.parametrize("value", [0.0, 1e-41])
def test_a_row_too_small_for_a_scale_ships_as_zeros(service, tmp_path, value):
    base = service.client.upload_folder(with_first_row(tmp_path / "model", value), ArtifactKind.MODEL)
    done = service.convert(request_of(service, base))
    assert done.verdict is Verdict.APPROVED
    service.client.download(done.output, tmp_path / "output")
    shipped = AutoModelForCausalLM.from_pretrained(tmp_path / "output" / MODEL)
    keys_BTO: list[torch.Tensor] = []
    shipped.get_submodule(KEYS).register_forward_hook(lambda module, inputs, output: keys_BTO.append(output))
    with torch.inference_mode():
        logits_BTV = shipped(torch.tensor([[5, 18, 40]])).logits
    assert torch.isfinite(logits_BTV).all()
    assert (keys_BTO[0][..., 0] == 0).all()


def test_what_was_quantized_is_not_quantized_again(service, tmp_path):
    done = service.convert(request_of(service, service.base))
    service.client.download(done.output, tmp_path / "output")
    base = service.client.upload_folder(tmp_path / "output" / MODEL, ArtifactKind.MODEL)
    with pytest.raises(InvalidModel, match="it would be rounded twice"):
        service.client.create_conversion(request_of(service, base))


def test_equal_requests_at_once_and_one_that_was_cancelled_ship_the_same_bytes(service):
    names = [service.client.create_conversion(service.request()).name for _ in range(3)]
    cancelled = service.client.wait(service.client.cancel(names[2]).name, timeout_s=60)
    assert cancelled.state is ConversionState.CANCELLED
    service.client.retry(names[2])
    for name in names:
        service.client.wait(name, timeout_s=120)
    assert len({service.report(name)["model_digest"] for name in names}) == 1


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_to_the_same_bytes(service, tmp_path):
    in_one_go = service.report(service.convert(service.request()).name)["model_digest"]
    server = RealServer(tmp_path / "data")
    try:
        with Client(server.start(**THREADS)) as client:
            cut = Service.with_artifacts(client, tmp_path / "artifacts")
            name = client.create_conversion(cut.request()).name
            server.kill()
            server.start(**THREADS)
            client.wait(name, timeout_s=240)
            assert cut.report(name)["model_digest"] == in_one_go
    finally:
        server.kill()
