"""PEFT's other kinds: each module merged alone is what PEFT makes of the whole model, or is refused by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftModel, PeftType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compressors.peft_kind_table import KINDS, Kind, Unmergeable
from compressors.peft_kinds import OtherKind, read_other_kind
from modelpress.errors import InvalidModel

WIDTH, INNER, TOKENS = 8, 12, 16
LAYOUTS = {
    "embed": "Embedding",
    **{f"layers.{index}.{name}": "Conv1D" for index in range(2) for name in ("square", "wide")},
}


@pytest.fixture(autouse=True)
def quiet_peft() -> Iterator[None]:
    """PEFT's hints on what these tests do on purpose: tiny models, random tensors, Conv1D."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"peft\..*|torch\..*")
        warnings.filterwarnings("ignore", message=".*(CUDA extension|boft_n_butterfly|Failed to load).*")
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.square = Conv1D(WIDTH, WIDTH)
        self.wide = Conv1D(INNER, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.image = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.point = nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x))) + self.down(torch.tanh(self.wide(self.square(x))))
        square = x.mT.unsqueeze(-1) * x.mT.unsqueeze(-2)
        x = x + self.conv(x.mT).mT + self.point(self.image(square)).mean(-1).mT
        return self.norm(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class InMemory:
    tensors: dict[str, Tensor]

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


LINEAR = ["up", "down"]
CONV1D = [*LINEAR, "square", "wide"]
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ADALORA", {"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": CONV1D}),
    ("BEFT", {"target_modules": ["up"]}),
    ("BOFT", {"boft_block_size": 4, "target_modules": [*LINEAR, "image"]}),
    ("BOFT", {"boft_block_size": 4, "target_modules": ["up"], "bias": "boft_only"}),
    ("C3A", {"block_size": 4}),
    ("DEFT", {"r": 4, "target_modules": CONV1D}),
    ("DELORA", {"r": 4, "rank_pattern": {"layers.1.up": 2}}),
    ("FOURIERFT", {"n_frequency": 10, "target_modules": CONV1D}),
    ("FOURIERFT", {"n_frequency": 10, "n_frequency_pattern": {"layers.0.down": 7}}),
    ("GLORA", {"r": 2, "config_D_E": "vector"}),
    ("GRALORA", {"r": 4, "gralora_k": 2, "hybrid_r": 2}),
    ("HIRA", {"r": 4, "target_modules": [*CONV1D, "embed", "conv", "image"]}),
    ("HRA", {"r": 4, "target_modules": [*LINEAR, "image"]}),
    ("IA3", {"feedforward_modules": ["down"], "target_modules": [*CONV1D, "image"]}),
    ("IA3", {"feedforward_modules": ["square", "up"], "target_modules": ["up", "square"]}),
    ("LN_TUNING", {"target_modules": ["norm"]}),
    ("LOHA", {"r": 2, "alpha": 6, "target_modules": [*LINEAR, "conv", "image"], "use_effective_conv2d": True}),
    (
        "LOHA",
        {
            "r": 2,
            "rank_pattern": {"up": 3},
            "alpha_pattern": {"down": 5},
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
    ),
    ("LOKR", {"r": 2, "target_modules": [*LINEAR, "conv", "image"], "decompose_both": True}),
    ("LOKR", {"r": 2, "decompose_factor": 4, "alpha": 3}),
    ("MISS", {"r": 4}),
    ("MISS", {"r": 4, "init_weights": "bat"}),
    ("OFT", {"r": 0, "oft_block_size": 4, "target_modules": [*LINEAR, "point", "embed"]}),
    ("OFT", {"r": 2, "oft_block_size": 0, "target_modules": ["up"], "block_share": True, "use_cayley_neumann": False}),
    ("OSF", {"effective_rank": 3}),
    ("PEANUT", {"r": 4, "depth": 1, "act_fn": "relu"}),
    ("PVERA", {"r": 6, "target_modules": CONV1D}),
    ("RANDLORA", {"r": 4, "target_modules": CONV1D}),
    ("ROAD", {"group_size": 4}),
    ("ROAD", {"group_size": 4, "variant": "road_4"}),
    ("SHIRA", {"r": 2}),
    ("SUPERTUNING", {"sparsity": 0.8, "r": 2, "lora_alpha": 4}),
    ("TRAINABLE_TOKENS", {"token_indices": [1, 5], "target_modules": ["embed"]}),
    ("VBLORA", {"r": 2, "num_vectors": 8, "vector_length": 4, "target_modules": CONV1D}),
    ("VBLORA", {"r": 2, "num_vectors": 8, "vector_length": 4, "save_only_topk_weights": True}),
    ("VERA", {"r": 6, "target_modules": CONV1D}),
    ("WAVEFT", {"n_frequency": 10, "target_modules": CONV1D}),
)
MERGEABLE = sorted(name for name, kind in KINDS.items() if isinstance(kind, Kind))
UNMERGEABLE = sorted(name for name, kind in KINDS.items() if isinstance(kind, Unmergeable))


def make_net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


def save_adapter(folder: Path, peft_type: str, settings: dict[str, Any]) -> Path:
    """An adapter for `make_net()`, written by PEFT, with random values where training would have put some."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft_type](**{"target_modules": LINEAR, **settings})
    model = PeftModel(make_net(), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def read(folder: Path, base: dict[str, Tensor], config: dict[str, Any] | None = None) -> OtherKind:
    adapter = InMemory(load_file(folder / "adapter_model.safetensors"))
    return read_other_kind(config or config_of(folder), adapter, base=InMemory(base), layouts=LAYOUTS)


def merge(other: OtherKind, base: dict[str, Tensor]) -> dict[str, Tensor]:
    return base | {name: change.begin(base[name])(0, len(base[name])) for name, change in other.changes.items()}


@pytest.mark.parametrize(("peft_type", "settings"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
@torch.no_grad()
def test_each_module_alone_is_merged_as_peft_merges_the_whole_model(
    peft_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path, peft_type, settings)
    reference = PeftModel.from_pretrained(make_net(), folder).eval()
    ids = torch.arange(10).view(2, 5)
    unmerged = reference(ids)
    base = dict(make_net().state_dict())
    merged = merge(read(folder, base), base)
    expected = reference.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            merged[name], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert any(not torch.equal(merged[name], base[name]) for name in base)
    model = make_net()
    model.load_state_dict(merged)
    torch.testing.assert_close(model(ids), unmerged, rtol=2e-5, atol=2e-5)


def test_every_kind_of_this_peft_is_merged_in_a_test_or_refused_with_its_reason() -> None:
    assert {str(kind.value) for kind in PeftType} - {"LORA"} == KINDS.keys() - {"BONE"}
    assert sorted({name for name, _ in CASES}) == MERGEABLE


@pytest.mark.parametrize("peft_type", UNMERGEABLE)
def test_a_kind_that_no_file_of_weights_can_hold_is_refused_with_the_reason_and_the_cure(peft_type: str) -> None:
    with pytest.raises(InvalidModel, match=f"peft_type is '{peft_type}': .+; ") as refused:
        read_other_kind({"peft_type": peft_type}, InMemory({}), base=InMemory({}), layouts={})
    assert refused.value.field == "peft_type"


@pytest.mark.parametrize(
    ("peft_type", "settings", "module"),
    [
        ("OFT", {"r": 0, "oft_block_size": 4, "target_modules": ["image"]}, "layers.0.image"),
        ("TRAINABLE_TOKENS", {"token_indices": [1], "target_modules": ["head"]}, "head"),
    ],
)
@torch.no_grad()
def test_where_pefts_merge_is_another_model_than_peft_runs_the_module_is_refused(
    peft_type: str, settings: dict[str, Any], module: str, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path, peft_type, settings)
    reference = PeftModel.from_pretrained(make_net(), folder).eval()
    ids = torch.arange(10).view(2, 5)
    unmerged = reference(ids)
    assert not torch.allclose(reference.merge_and_unload()(ids), unmerged, atol=1e-2)
    with pytest.raises(InvalidModel, match=f"'{module}'.+another model") as refused:
        read(folder, dict(make_net().state_dict()))
    assert refused.value.reason == "UNMERGEABLE"


@pytest.fixture(scope="module")
def lokr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return save_adapter(tmp_path_factory.mktemp("lokr"), "LOKR", {"r": 2, "alpha": 3})


UP = "base_model.model.layers.1.up"


@pytest.mark.parametrize(
    ("settings", "mentions"),
    [
        ({"target_modules": ["gate_proj"]}, ["target_modules", "gate_proj", "no module"]),
        ({"target_modules": ["up", "down", "gate_proj"]}, ["target_modules", "'gate_proj'", "matches none"]),
        ({"target_modules": ["up", "down", "own"]}, ["target_modules", "'own'", "matches none"]),
        ({"target_modules": ["up", "down", "image"]}, ["layers.0.image", "no tensors", "incomplete"]),
        ({"target_modules": ["down"]}, ["layers.0.up.lokr_w1", "'layers.0.up'"]),
        ({"target_modules": "(up"}, ["target_modules", "(up", "regular expression"]),
        ({"target_modules": None}, ["target_modules", "name the modules"]),
        ({"target_modules": "all-linear"}, ["target_modules", "name the modules"]),
        ({"rank_pattern": {"q_proj": 3}}, ["rank_pattern", "q_proj"]),
        ({"decompose_factor": 2}, ["layers.0.up.lokr_w2_a", "missing", "configuration"]),
        ({"megatron_config": {"a": 1}}, ["megatron_config"]),
        ({"invented_setting": "x"}, ["invented_setting", "LOKR"]),
        ({"layers_pattern": "h"}, ["layers_to_transform", "LOKR"]),
        ({"r": "many"}, ["LOKR", "layers.0.up"]),
        ({"peft_type": "NEWKIND"}, ["NEWKIND", "LOKR", "IA3"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_does_not_fit_is_refused_by_the_name_of_its_setting(
    lokr: Path, settings: dict[str, Any], mentions: list[str]
) -> None:
    with pytest.raises(InvalidModel) as refused:
        read(lokr, dict(make_net().state_dict()), config_of(lokr) | settings)
    assert [mention for mention in mentions if mention not in refused.value.message] == []


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({f"{UP}.lokr_w1": None}, [f"{UP}.lokr_w1", "missing"]),
        ({f"{UP}.lokr_w3": torch.ones(2)}, [f"{UP}.lokr_w3", "none that PEFT saves"]),
        ({f"{UP}.lokr_w1": torch.ones(3, 5)}, [f"{UP}.lokr_w1", "[3, 5]", "[3, 2]", "[12, 8]"]),
        ({f"{UP}.lokr_w1": torch.empty(0)}, [f"{UP}.lokr_w1", "[0]", "[3, 2]"]),
        ({f"{UP}.lokr_w1": torch.full((3, 2), torch.nan)}, [f"{UP}.lokr_w1", "NaN"]),
        ({f"{UP}.lokr_w1": torch.ones(3, 2, dtype=torch.int32)}, [f"{UP}.lokr_w1", "int32", "floating point"]),
        ({"base_model.model.layers.2.up.lokr_w1": torch.ones(3, 2)}, ["layers.2.up.lokr_w1", "'layers.2.up'"]),
        ({"layers.1.up.lokr_w1": torch.ones(3, 2)}, ["'layers.1.up.lokr_w1'", "base_model.model."]),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    lokr: Path, change: dict[str, Tensor | None], mentions: list[str]
) -> None:
    tensors: dict[str, Tensor | None] = load_file(lokr / "adapter_model.safetensors") | change
    adapter = InMemory({name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(InvalidModel) as refused:
        read_other_kind(config_of(lokr), adapter, base=InMemory(dict(make_net().state_dict())), layouts=LAYOUTS)
    assert [mention for mention in mentions if mention not in refused.value.message] == []


def test_an_adapter_for_another_base_is_refused_with_the_module_that_is_not_there(lokr: Path) -> None:
    base = {name: tensor for name, tensor in make_net().state_dict().items() if not name.startswith("layers.1.")}
    with pytest.raises(InvalidModel, match=r"layers\.1\.\w+\.lokr_w1'.+'layers\.1\.\w+' of the base"):
        read(lokr, base)


@pytest.mark.parametrize(
    ("peft_type", "settings", "needed"),
    [
        ("VERA", {"r": 4, "save_projection": False}, "save_projection"),
        ("PVERA", {"r": 4, "save_projection": False}, "save_projection"),
        ("RANDLORA", {"r": 4, "save_projection": False}, "save_projection"),
        ("SUPERTUNING", {"sparsity": 0.5, "save_precomputed_indices": False}, "save_precomputed_indices"),
        ("PVERA", {"r": 4, "sample_at_inference": True}, "sample_at_inference"),
    ],
)
def test_an_adapter_whose_file_leaves_it_to_chance_is_refused_by_the_setting(
    peft_type: str, settings: dict[str, Any], needed: str, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path, peft_type, settings)
    with pytest.raises(InvalidModel, match=needed):
        read(folder, dict(make_net().state_dict()))


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({"base_model.randlora_B": None}, ["base_model.randlora_B", "missing"]),
        ({"base_model.randlora_A": torch.ones(4, 1, 7)}, ["base_model.randlora_A", "[4, 1, 7]", "[4, 1, 8]"]),
        ({"base_model.model.layers.0.up.randlora_A": torch.ones(4, 1, 8)}, ["layers.0.up.randlora_A", "copy"]),
    ],
)
def test_a_tensor_of_the_whole_adapter_is_there_reaches_far_enough_and_has_true_copies(
    change: dict[str, Tensor | None], mentions: list[str], tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path, "RANDLORA", {"r": 4})
    tensors: dict[str, Tensor | None] = load_file(folder / "adapter_model.safetensors") | change
    adapter = InMemory({name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(InvalidModel) as refused:
        read_other_kind(config_of(folder), adapter, base=InMemory(dict(make_net().state_dict())), layouts={})
    assert [mention for mention in mentions if mention not in refused.value.message] == []


def test_a_position_outside_the_weight_is_refused_where_it_is_merged(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, "SHIRA", {"r": 2})
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.layers.0.up.shira_indices"][0, 0] = INNER
    base = dict(make_net().state_dict())
    other = read_other_kind(config_of(folder), InMemory(tensors), base=InMemory(base), layouts={})
    with pytest.raises(InvalidModel, match=r"SHIRA on Linear 'layers\.0\.up'"):
        other.changes["layers.0.up.weight"].begin(base["layers.0.up.weight"])


def test_tensors_that_are_none_of_the_kinds_are_left_over_by_name(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, "BOFT", {"boft_block_size": 4, "bias": "all", "modules_to_save": ["head"]})
    base = dict(make_net().state_dict())
    other = read(folder, base)
    biases = {name for name in base if name.endswith(".bias") and not name.endswith("up.bias")}
    plain = {name.removeprefix("base_model.model.") for name in other.leftovers}
    assert plain >= (biases - {"head.bias"}) | {"head.weight"}
    assert {name for name in other.changes if name.endswith("bias")} == {"layers.0.up.bias", "layers.1.up.bias"}


def test_a_merge_computes_in_fp32_or_fp64_and_leaves_the_stored_tensor_the_random_state_and_peft_alone(
    lokr: Path,
) -> None:
    from peft.tuners.boft import layer as boft

    base = dict(make_net().state_dict())
    name = "layers.0.up.weight"
    change = read(lokr, base).changes[name]
    state, compiled = torch.get_rng_state(), boft._FBD_CUDA
    for dtype, computed in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        stored = base[name].to(dtype)
        before = stored.clone()
        merged = change.begin(stored)(2, 7)
        assert merged.dtype == computed
        assert merged.shape == (5, WIDTH)
        assert torch.equal(stored, before)
        torch.testing.assert_close(merged, merge_up(lokr, stored)[2:7].to(computed), rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert boft._FBD_CUDA is compiled


def merge_up(folder: Path, stored: Tensor) -> Tensor:
    """LoKr by its formula (Yeh et al. 2023): W + alpha / r * kron(w1, w2), in FP64."""
    tensors = load_file(folder / "adapter_model.safetensors")
    w1, w2 = (tensors[f"base_model.model.layers.0.up.lokr_{part}"].double() for part in ("w1", "w2"))
    return stored.double() + 3 / 2 * torch.kron(w1, w2)


def test_classes_that_a_configuration_names_are_never_imported(lokr: Path) -> None:
    mapping = {"base_model_class": "Missing", "parent_library": "a_module_that_is_not_there"}
    config = config_of(lokr) | {"auto_mapping": mapping, "megatron_core": "a_module_that_is_not_there"}
    assert read(lokr, dict(make_net().state_dict()), config).changes


@torch.no_grad()
def test_a_base_weight_that_peft_saved_along_is_the_one_that_is_merged_into(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, "HIRA", {"r": 2, "target_modules": ["embed"]})
    along = "base_model.model.embed.base_layer.weight"
    tensors = load_file(folder / "adapter_model.safetensors") | {along: torch.full((TOKENS, WIDTH), 0.5)}
    save_file(tensors, folder / "adapter_model.safetensors")
    base = dict(make_net().state_dict())
    expected = PeftModel.from_pretrained(make_net(), folder).merge_and_unload().state_dict()["embed.weight"]
    merged = read(folder, base).changes["embed.weight"].begin(base["embed.weight"])(0, TOKENS)
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)
    save_file(tensors | {along: torch.ones(TOKENS + 1, WIDTH)}, folder / "adapter_model.safetensors")
    with pytest.raises(InvalidModel, match=r"base_layer\.weight.+\[17, 8\].+\[16, 8\]"):
        read(folder, base)
