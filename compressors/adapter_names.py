"""The tensors of an adapter under the names of the model's own parameters, without what PEFT and wrappers put around.

base_model.model.model.layers.0.q_proj.lora_A.weight  ->  model.layers.0.q_proj.lora_A.weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from compressors.adapter_tensor_names import PREFIX, model_name, plain_name
from compressors.weight_files import StoredTensor, WeightFiles
from modelpress.errors import InvalidModel
from modelpress.stored_folders import Source

STEM = "adapter_model"
LOADED = 4


@dataclass(frozen=True)
class AdapterTensors:
    """`plain` maps the name without prefix and wrappers to the stored tensor."""

    files: WeightFiles
    plain: Mapping[str, StoredTensor]

    @cached_property
    def load(self) -> Callable[[str], Tensor]:
        """One tensor by its stored name. The last few stay: each expert of a layer asks for the same ones."""
        return lru_cache(maxsize=LOADED)(self.files.load)

    def key(self, module: str) -> str:
        """A module's name as the adapter's own tensors have it."""
        return f"{PREFIX}{module}"


def read_adapter_tensors(source: Source, *, name: str, trained_biases: bool) -> AdapterTensors:
    """Locate and verify an adapter's tensors. InvalidModel for a foreign name, an empty or integer tensor, and for two
    tensors that stand for the same one.
    """
    files = WeightFiles.read(source, STEM)
    files.verify()
    plain: dict[str, StoredTensor] = {}
    for target, stored in _named(files, name, trained_biases):
        if target in plain and not torch.equal(files.load(plain[target].name), files.load(stored.name)):
            other = plain[target].name
            raise InvalidModel(
                f"adapter {name!r}: {stored.name!r} and {other!r} both stand for {target!r} and differ: "
                "save the adapter again",
                field=stored.name,
            )
        plain[target] = stored
    if not plain:
        raise InvalidModel(f"adapter {name!r} holds no tensors", field=STEM)
    return AdapterTensors(files, plain)


def refuse_non_finite(tensors: AdapterTensors, *, name: str) -> None:
    """Read every tensor once, one at a time."""
    for stored in tensors.plain.values():
        if not torch.isfinite(tensors.files.load(stored.name)).all():
            raise InvalidModel(
                f"adapter {name!r}: tensor {stored.name!r} holds NaN or infinite values: go back to an earlier "
                "checkpoint",
                reason="NON_FINITE",
                field=stored.name,
            )


def _named(files: WeightFiles, name: str, trained_biases: bool) -> Iterator[tuple[str, StoredTensor]]:
    for key, stored in files.tensors.items():
        named = model_name(key)
        if named is None:
            raise InvalidModel(
                f"adapter {name!r}: tensor {key!r} does not start with {PREFIX!r}: save it with PEFT", field=key
            )
        if not stored.elements:
            raise InvalidModel(
                f"adapter {name!r}: tensor {key!r} has shape {list(stored.shape)}, it is empty: ZeRO-3 saved its shard "
                "and not the whole; gather the weights when saving (stage3_gather_16bit_weights_on_model_save)",
                reason="EMPTY_TENSOR",
                field=key,
            )
        if not stored.dtype.is_floating_point:
            raise InvalidModel(
                f"adapter {name!r}: tensor {key!r} is {stored.dtype}: expected floating point", field=key
            )
        target = plain_name(named, trained_biases=trained_biases)
        if target is not None:
            yield target, stored
