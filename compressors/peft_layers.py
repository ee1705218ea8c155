"""One module of a base model as PEFT sees it: the adapter's layer around it, its tensors loaded, its weight merged.

The module stands alone at its real path in an otherwise empty model, so that PEFT's own code decides what the adapter
does to it, and memory is set by this one weight.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compressors.changes import wide
from modelpress.errors import InvalidModel

ADAPTER = "default"
CONVOLUTIONS: Mapping[int, type[nn.Module]] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
Layout = Literal["Linear", "Conv1D", "Embedding", "Conv", "Norm"]
"""How a module uses its weight: `Conv1D` is GPT-2's linear layer, stored [inputs, outputs]; `Conv` a convolution."""
PEFT_ERRORS = (
    *(RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError, IndexError),
    *(ImportError, ZeroDivisionError, OverflowError, re.error),
)
"""What PEFT raises for a configuration or tensors that it cannot use."""


@dataclass(frozen=True)
class BaseLayer:
    """A module of the base: its path, the shape of its weight, and how it uses it."""

    name: str
    layout: Layout
    shape: tuple[int, ...]
    has_bias: bool

    def module(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """The module itself. `weight` and `bias` become its parameters, not copies of them."""
        with torch.device("meta"):
            layer = self._empty()
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        return layer

    def blank(self, device: str) -> nn.Module:
        """The module with zeros, or on the device "meta" with shapes only."""
        return self.module(torch.zeros(self.shape, device=device), self.blank_bias(device))

    def blank_bias(self, device: str = "cpu") -> Tensor | None:
        return torch.zeros(self.num_outputs, device=device) if self.has_bias else None

    @property
    def num_outputs(self) -> int:
        return self.shape[1] if self.layout == "Conv1D" else self.shape[0]

    def _empty(self) -> nn.Module:
        if self.layout == "Conv":
            return CONVOLUTIONS[len(self.shape)](self.shape[1], self.shape[0], self.shape[2:], bias=self.has_bias)
        if self.layout == "Norm":
            return nn.LayerNorm(self.shape, bias=self.has_bias)
        if self.layout == "Embedding":
            return nn.Embedding(self.shape[0], self.shape[1])
        if self.layout == "Conv1D":
            from transformers.pytorch_utils import Conv1D

            conv1d: nn.Module = Conv1D(self.shape[1], self.shape[0])
            return conv1d
        return nn.Linear(self.shape[1], self.shape[0], bias=self.has_bias)


@dataclass(frozen=True)
class Expected:
    """One tensor that PEFT saves for a module."""

    shape: tuple[int, ...]
    is_floating_point: bool


def expected_tensors(config: Any, layer: BaseLayer, *, device: str) -> dict[str, Expected]:
    """What PEFT would save for this module alone, under the names in the adapter's file; shared tensors included.

    On the device "meta" nothing is computed. InvalidModel where PEFT cannot put such an adapter on the module.
    """
    from peft import get_peft_model_state_dict

    with _peft(config, layer):
        model = _adapted(config, layer.name, layer.blank(device))
        saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: Expected(tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in saved.items()}


def merged_module(
    config: Any, layer: BaseLayer, *, base: nn.Module, tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> nn.Module:
    """The module after PEFT's merge; it may be `base` itself, changed in place.

    `tensors` are the module's own under their names in the file, exactly those of `expected_tensors` without
    the shared ones; `shared` are by their name on PEFT's model, and may be wider than this module needs.
    """
    from peft import set_peft_model_state_dict

    with _peft(config, layer), torch.no_grad():
        model = _adapted(config, layer.name, base)
        for name, tensor in shared.items():
            getattr(model.base_model, name)[ADAPTER] = wide(tensor)
            # They are in place: without this PEFT would look for them among `tensors`, in the size for this module.
            model.peft_config[ADAPTER].save_projection = False
        result = set_peft_model_state_dict(model, dict(tensors), adapter_name=ADAPTER)
        if result.unexpected_keys:
            raise ValueError(f"it has no place for {result.unexpected_keys[0]}")
        merged: nn.Module = model.to(base.weight.dtype).merge_and_unload().get_submodule(layer.name)
        return merged


def _adapted(config: Any, name: str, module: nn.Module) -> Any:
    """PEFT's model around a model that has this module only, at its real path."""
    from peft import PeftModel

    own = copy.deepcopy(config)
    own.modules_to_save, own.task_type, own.inference_mode = None, None, True
    if getattr(own, "rank_pattern", None) and own.peft_type == "ADALORA":
        # AdaLoRA's pattern names tensors, and PEFT looks for the module of each.
        own.rank_pattern = {key: kept for key, kept in own.rank_pattern.items() if key.startswith(f"{name}.")}
    return PeftModel(_holder(name, module), own, adapter_name=ADAPTER).eval()


def _holder(name: str, module: nn.Module) -> nn.Module:
    *parents, last = name.split(".")
    root = parent = nn.Module()
    for part in parents:
        child = nn.Module()
        setattr(parent, part, child)
        parent = child
    setattr(parent, last, module)
    return root


@contextmanager
def _peft(config: Any, layer: BaseLayer) -> Iterator[None]:
    """PEFT at work: it draws no random numbers that others would miss, compiles nothing, and fails in one sentence."""
    from peft.tuners.boft import layer as boft

    compiled = boft._FBD_CUDA
    # BOFT else builds a CUDA extension when a layer is made; False stands for "there is none".
    boft._FBD_CUDA = False
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
            # SHiRA's positions come from the adapter's file: outside the weight they would write other memory.
            torch.sparse.check_sparse_tensor_invariants(),  # type: ignore[no-untyped-call]
        ):
            # Of names and shapes, which are checked here, of patterns for other modules, and of settings that the
            # module's layout overrules.
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    except PEFT_ERRORS as error:
        kind = getattr(config.peft_type, "value", config.peft_type)
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidModel(
            f"PEFT cannot put {kind} on {layer.layout} {layer.name!r} {list(layer.shape)} of the base: "
            f"{reason[0][:200]}; correct the adapter's configuration, or name the base that it was trained on",
            field=layer.name,
        ) from None
    finally:
        boft._FBD_CUDA = compiled
