"""LoRA on convolutions, in a model that transformers does not know: merged as PEFT runs it, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.compressors.lora_merges import Bases, Bench, distance, factors, quiet_peft, randomise, save, write_adapter

CONVOLUTIONS = ["line", "wide", "image", "point", "oblong", "volume"]


class Net(nn.Module):
    """A convolution of every number of dimensions, with kernels of 1, of 3, and of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(4, 6, 3, padding=1)
        self.wide = nn.Conv1d(6, 4, 1)
        self.image = nn.Conv2d(4, 6, 3, padding=1)
        self.point = nn.Conv2d(6, 4, 1, bias=False)
        self.oblong = nn.Conv2d(4, 4, (1, 3), padding=(0, 1))
        self.volume = nn.Conv3d(4, 2, (3, 1, 2), padding=(1, 0, 0))
        self.grouped = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.deep = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wide(torch.tanh(self.line(x))) + self.grouped(x)
        square = x.unsqueeze(-1) * x.unsqueeze(-2)
        square = square + self.point(torch.tanh(self.image(square))) + self.oblong(square) + self.deep(square)
        return self.head(self.volume(square.unsqueeze(-1).expand(-1, -1, -1, -1, 4)).mean((2, 3, 4)))


def make_net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    save_file(make_net().state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "a_net", "architectures": ["Net"]}))
    return folder


def train_net(**fields: Any) -> nn.Module:
    from peft import LoraConfig, PeftModel

    settings = {"r": 2, "lora_alpha": 6, "target_modules": CONVOLUTIONS} | fields
    with quiet_peft():
        return randomise(PeftModel(make_net(), LoraConfig(**settings)), seed=1)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"use_dora": True, "target_modules": [*CONVOLUTIONS, "head"]},
        {"bias": "all", "modules_to_save": ["head"]},
        {"lora_bias": True, "target_modules": ["line", "image", "volume"]},
        {"rank_pattern": {"point": 3}, "alpha_pattern": {"image": 1}},
        *({"target_modules": [name]} for name in CONVOLUTIONS),
        *({"target_modules": [name], "use_dora": True} for name in CONVOLUTIONS),
    ],
    ids=lambda fields: " ".join(str(value) for value in fields.values()),
)
@torch.no_grad()
def test_the_merged_net_is_what_peft_runs(fields, base: Path, bench: Bench, tmp_path: Path) -> None:
    trained = train_net(**fields)
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(5))

    merged = make_net()
    merged.load_state_dict(bench.merge(base, save(trained, tmp_path / "adapter")).tensors)

    assert distance(merged(x), trained(x)) < 1e-5
    assert distance(make_net()(x), trained(x)) > 1e-4


@pytest.mark.parametrize("module", ["grouped", "deep"])
def test_a_convolution_in_groups_is_refused(module: str, base: Path, bench: Bench, tmp_path: Path) -> None:
    weight = make_net().get_parameter(f"{module}.weight")
    a, b = torch.ones(2, 4, *weight.shape[2:]), torch.ones(4, 2, *[1] * (weight.ndim - 2))
    name = f"base_model.model.{module}.lora_{{}}.weight"
    tensors = {name.format("A"): a, name.format("B"): b}
    adapter = write_adapter(tmp_path / "adapter", tensors, r=2, target_modules=[module])

    error = bench.refused(base, adapter)

    mentions = [name.format("A"), "groups", str(list(a.shape)), str(list(weight.shape)), "train the adapter without"]
    assert all(mention in error.message for mention in mentions), error.message


def test_the_depthwise_convolution_of_a_mamba_is_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    name = "base_model.model.backbone.layers.0.mixer.conv1d.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(4, 32, 4), name.format("B"): torch.ones(32, 4, 1)}
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=["conv1d"])

    message = bench.refused(bases.folder("mamba"), adapter).message

    assert all(mention in message for mention in ("mixer.conv1d", "[4, 32, 4]", "[32, 1, 4]", "groups")), message


def test_the_linear_layers_of_a_mamba_are_merged(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    module = "backbone.layers.0.mixer.out_proj"
    adapter = write_adapter(tmp_path / "adapter", factors(module, 16, 32), target_modules=["out_proj"])

    assert bench.merge(bases.folder("mamba"), adapter).record.touched == (f"{module}.weight",)
