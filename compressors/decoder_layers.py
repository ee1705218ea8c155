"""The decoder layers of a stored language model, one in memory at a time, in float32.

    decoder = DecoderLayers.open(files, config, device=torch.device("cpu"))
    hidden_BTH = decoder.embedding()(ids_BT)
    for number, arguments in enumerate(decoder.arguments(tokens)):
        hidden_BTH = decoder.load(number)(hidden_BTH, **arguments)

The classes are those of transformers, made on the meta device: nothing of the model is in memory before it is asked
for, and no code of the model folder is run.

Shapes: B windows, T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compressors.decoder_families import DECODERS, DecoderFamily
from compressors.folders import LOADING_ERRORS
from compressors.weight_files import WeightFiles
from modelpress.errors import InvalidModel

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes of weights that are quantized."""


def family_of(config: Mapping[str, Any]) -> DecoderFamily:
    """The family of a decoder's config.json; InvalidModel for another model, or one that is quantized already."""
    model_type = config.get("model_type")
    family = DECODERS.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(DECODERS)
        raise InvalidModel(
            f"model_type {model_type!r} is no decoder that is known: quantize one of {known}", field="model_type"
        )
    if config.get("quantization_config"):
        raise InvalidModel(
            "config.json has a quantization_config: the model is quantized already; submit the full-precision one",
            field="quantization_config",
        )
    return family


@dataclass(frozen=True, eq=False)
class DecoderLayers:
    """`model` is transformers' model on the meta device; its tensors lie in `files`."""

    files: WeightFiles
    family: DecoderFamily
    model: Any
    device: torch.device

    @staticmethod
    def open(files: WeightFiles, config: Mapping[str, Any], *, device: torch.device) -> DecoderLayers:
        """InvalidModel where the config makes no model, or the files lack a tensor of it or hold one of another shape
        or dtype.
        """
        family = family_of(config)
        decoder = DecoderLayers(files, family, _meta_model(config), device)
        decoder._check_tensors()
        return decoder

    def __len__(self) -> int:
        return len(self.model.get_submodule(self.family.layers))

    @property
    def positions(self) -> int:
        """Tokens that the model was made for."""
        return int(self.model.config.max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        return self.files.tensors[f"{self.family.embeddings}.weight"].shape[0]

    def load(self, number: int) -> nn.Module:
        """Decoder layer `number` in float32 on the device, in evaluation mode and without gradients."""
        return self.make(number, lambda name: self.files.load(f"{self.family.layer(number)}.{name}"))

    def make(self, number: int, tensor: Callable[[str], Tensor]) -> nn.Module:
        """As `load`, with other values: `tensor` gives each parameter by its name inside the layer."""
        layer: nn.Module = copy.deepcopy(self.model.get_submodule(self.family.layer(number)))
        values = {name: tensor(name).to(self.device, torch.float32) for name in layer.state_dict()}
        layer.load_state_dict(values, assign=True)
        return layer.requires_grad_(False).eval()

    def whole(self) -> Any:
        """The whole model in float32 on the device, in evaluation mode and without gradients: no longer one layer."""
        model = copy.deepcopy(self.model)
        values = {name: self.files.load(name).to(self.device, torch.float32) for name, _ in self._parameters()}
        model.load_state_dict(values, assign=True, strict=False)
        model.tie_weights()
        self._make_rotary(model.get_submodule(self._inner))
        return model.requires_grad_(False).eval()

    def stored_names(self, number: int) -> tuple[str, ...]:
        """Every stored tensor of decoder layer `number`, by its full name."""
        return tuple(name for name in self.files.tensors if name.startswith(f"{self.family.layer(number)}."))

    def embedding(self) -> Callable[[Tensor], Tensor]:
        """What makes the first layer's inputs [B, T, H] of tokens [B, T]. It holds the whole table, read once."""
        table_VH = self.files.load(f"{self.family.embeddings}.weight")
        return lambda ids_BT: table_VH[ids_BT.cpu()].to(self.device, torch.float32)

    def arguments(self, tokens: int) -> tuple[dict[str, Any], ...]:
        """Each layer's keyword arguments beside the hidden states, for any number of windows of so many tokens.

        Positions and masks are what the model's own forward pass hands to its layers.
        """
        inner = copy.deepcopy(self.model.get_submodule(self._inner))
        self._make_rotary(inner)
        catchers = [_Catcher() for _ in range(len(self))]
        setattr(inner, self.family.layers.rpartition(".")[2], nn.ModuleList(catchers))
        setattr(inner, self.family.norm.rpartition(".")[2], nn.Identity())
        with torch.inference_mode(False), torch.no_grad():
            inner(inputs_embeds=torch.zeros(1, tokens, inner.config.hidden_size, device=self.device), use_cache=False)
        return tuple(catcher.caught for catcher in catchers)

    @property
    def _inner(self) -> str:
        """The module that runs the layers."""
        return self.family.layers.rpartition(".")[0]

    def _make_rotary(self, inner: Any) -> None:
        """Rotary embeddings have no stored tensor: they are computed, and not on the meta device."""
        name = self.family.rotary.rpartition(".")[2]
        setattr(inner, name, type(getattr(inner, name))(config=inner.config).to(self.device))

    def _check_tensors(self) -> None:
        stored = self.files.tensors
        for name, parameter in self._parameters():
            if name not in stored:
                raise InvalidModel(f"tensor {name!r} is missing: save the whole model with save_pretrained", field=name)
            if stored[name].shape != tuple(parameter.shape):
                found, expected = list(stored[name].shape), list(parameter.shape)
                raise InvalidModel(f"tensor {name!r} is {found}, and config.json makes it {expected}", field=name)
            if stored[name].dtype not in FLOATS:
                dtype = str(stored[name].dtype).removeprefix("torch.")
                raise InvalidModel(
                    f"tensor {name!r} has dtype {dtype}: save the model in float32, bfloat16 or float16", field=name
                )

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What must be stored: every parameter, but the head where it is tied to the embeddings."""
        tied = f"{self.family.head}." if self.model.config.tie_word_embeddings else None
        return ((n, p) for n, p in self.model.state_dict().items() if tied is None or not n.startswith(tied))


class _Catcher(nn.Module):
    """Stands in a decoder layer's place, notes its keyword arguments and hands the hidden states on."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: dict[str, Any] = {}

    def forward(self, hidden_BTH: Tensor, **arguments: Any) -> Tensor:
        self.caught = arguments
        return hidden_BTH


def _meta_model(config: Mapping[str, Any]) -> Any:
    try:
        parsed = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, attn_implementation="sdpa")
    except LOADING_ERRORS as error:
        sentence = " ".join(str(error).split())[:300]
        raise InvalidModel(f"config.json makes no model: {sentence}", field="config.json") from None
    return model.eval()
