"""Adapters beside a base model, unmerged, as PEFT itself loads and combines them.

PEFT decides which module an adapter's tensor belongs to. On a model without memory (the meta device) its loading is
listened to: what it would put where is kept, nothing is put anywhere.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from peft import PeftConfig, PeftType, get_peft_model
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn

from evaluators.adapter_files import WEIGHTS, CheckedAdapter
from evaluators.stored_weights import NotComparable
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora

CANNOT = (
    *(ValueError, TypeError, RuntimeError, LookupError, AttributeError, ImportError, ArithmeticError, AssertionError),
    *(re.error, StrictDataclassError),
)
"""What PEFT and transformers raise for what they cannot do, and for settings of which they can make nothing."""

FROM_BASE = re.compile(r"pissa|olora")
"""Initialisations that take a part out of the base again whenever the adapter is loaded."""
FROM_TRAINING = re.compile(r"pissa_niter_\d+|corda|loftq|lora_ga|mica")
"""Initialisations that depend on chance or on training data."""


@dataclass(frozen=True)
class Adapter:
    """`label` is its name inside PEFT's modules, which allow fewer characters."""

    label: str
    folder: Path
    weight: float
    config: Any
    initialisation: str
    """`pissa` or `olora`, which change the base; else empty."""


def read_adapters(adapters: Sequence[CheckedAdapter]) -> list[Adapter]:
    """The adapters' settings. NotComparable for an initialisation that cannot be repeated."""
    return [_read(adapter, f"adapter{i}") for i, adapter in enumerate(adapters)]


def _read(adapter: CheckedAdapter, label: str) -> Adapter:
    if not (adapter.folder / WEIGHTS).is_file():
        raise InvalidModel(f"adapter {adapter.name!r} has no {WEIGHTS}: upload the folder that PEFT wrote")
    with quiet():
        config = PeftConfig.from_pretrained(str(adapter.folder))
    if hasattr(config, "megatron_config"):
        config.megatron_config = None  # PEFT would import the module that it names
    initialisation = str(getattr(config, "init_lora_weights", ""))
    if FROM_TRAINING.fullmatch(initialisation):
        raise NotComparable(f"adapter {adapter.name!r}: what {initialisation!r} did to the base cannot be repeated")
    kept = initialisation if FROM_BASE.fullmatch(initialisation) else ""
    return Adapter(label, adapter.folder, adapter.weight, config, kept)


def attach(model: Any, adapters: Sequence[Adapter]) -> Any:
    """The PeftModel of a model and all adapters, loaded, in eval mode; the model's modules are wrapped in place."""
    attached = _wrap(model, adapters, low_cpu_mem_usage=False)
    _load(attached, adapters, device=str(model.device), low_cpu_mem_usage=False)
    return attached


@dataclass(frozen=True)
class Brought:
    """A tensor of an adapter's file, in its stored dtype."""

    adapter: Adapter
    tensor: Tensor


@dataclass(frozen=True)
class EmptyReference:
    """PEFT's model on the meta device, and every adapter's tensors by the name that they have in it."""

    model: Any
    tensors: Mapping[str, Sequence[Brought]]


def attach_empty(model: Any, adapters: Sequence[Adapter]) -> EmptyReference:
    """The same for a model on the meta device: what PEFT would load is kept beside it, by PEFT's names."""
    loaded: list[dict[str, Tensor]] = []

    def listen(_module: Any, state: dict[str, Tensor], *_others: Any) -> None:
        loaded.append(dict(state))
        state.clear()

    for adapter in adapters:
        if adapter.initialisation:
            adapter.config.init_lora_weights = True
    attached = _wrap(model, adapters, low_cpu_mem_usage=True)
    attached.register_load_state_dict_pre_hook(listen)
    _load(attached, adapters, device="cpu", low_cpu_mem_usage=True)
    tensors: dict[str, list[Brought]] = {}
    for adapter, state in zip(adapters, loaded, strict=True):
        for name, tensor in state.items():
            tensors.setdefault(name, []).append(Brought(adapter, tensor))
    return EmptyReference(attached, tensors)


def _wrap(model: Any, adapters: Sequence[Adapter], *, low_cpu_mem_usage: bool) -> Any:
    """`low_cpu_mem_usage` is PEFT's: adapters are made on the meta device, and tensors are put there, not copied."""
    first, *others = adapters
    with quiet():
        attached = get_peft_model(
            model, first.config, first.label, autocast_adapter_dtype=False, low_cpu_mem_usage=low_cpu_mem_usage
        )
        for other in others:
            attached.add_adapter(
                other.label, other.config, autocast_adapter_dtype=False, low_cpu_mem_usage=low_cpu_mem_usage
            )
    return attached


def _load(attached: Any, adapters: Sequence[Adapter], *, device: str, low_cpu_mem_usage: bool) -> None:
    with quiet():
        for adapter in adapters:
            attached.load_adapter(
                str(adapter.folder),
                adapter.label,
                torch_device=device,
                autocast_adapter_dtype=False,
                low_cpu_mem_usage=low_cpu_mem_usage,
            )


def labels_of(layer: Any) -> set[str]:
    """The adapters that have a part in a layer of PEFT."""
    parts = [getattr(layer, name, None) for name in layer.adapter_layer_names]
    kinds = (nn.ModuleDict, nn.ParameterDict, BufferDict)
    return {str(label) for part in parts if isinstance(part, kinds) for label in part.keys()}  # noqa: SIM118


def combine(layer: Any, adapters: Sequence[Adapter], *, tuner: Any, arguments: MergeLora) -> None:
    """Let `layer`, which has its values, run the weighted combination of the adapters, unmerged, as PEFT combines.

    NotComparable where PEFT has no weighted sum. Equal to the single adapter for one of weight 1.
    """
    labels = labels_of(layer)
    present = [adapter for adapter in adapters if adapter.label in labels]
    layer.set_adapter([adapter.label for adapter in present])
    alone = len(present) == 1 and present[0].weight == 1
    if alone and arguments.combination_type in ("cat", "linear"):
        return
    for adapter in present:
        if not isinstance(layer, LoraLayer) or adapter.config.peft_type != PeftType.LORA:
            raise NotComparable(f"PEFT has no weighted sum of {adapter.config.peft_type.value} adapters")
        if adapter.label in layer.lora_variant:
            raise NotComparable("PEFT has no weighted sum of DoRA and other variants of LoRA: they are no sum")
    _COMBINATIONS[arguments.combination_type](layer, present, tuner, arguments)


def _cat(layer: Any, present: Sequence[Adapter], _tuner: Any, _arguments: MergeLora) -> None:
    for adapter in present:
        layer.scaling[adapter.label] *= adapter.weight


def _linear(layer: Any, present: Sequence[Adapter], tuner: Any, _arguments: MergeLora) -> None:
    _refuse_bias(layer, present)
    labels, weights = [adapter.label for adapter in present], [adapter.weight for adapter in present]
    a, b = tuner._generalized_task_arithmetic_weighted_adapter("linear", labels, weights, layer, None, None)
    _replace(layer, labels[0], a, b)


def _svd(layer: Any, present: Sequence[Adapter], tuner: Any, arguments: MergeLora) -> None:
    _refuse_bias(layer, present)
    if isinstance(layer, ParamWrapper):
        raise NotComparable("PEFT has no svd of adapters on fused parameters")
    labels, weights = [adapter.label for adapter in present], [adapter.weight for adapter in present]
    rank = arguments.svd_rank or 1
    a, b = _factors(layer, labels[0])
    a_RI = a.new_empty(rank, *a.shape[1:])
    b_OR = b.new_empty(b.shape[0], rank, *b.shape[2:])
    a, b = tuner._svd_generalized_task_arithmetic_weighted_adapter(
        "svd", labels, weights, rank, layer, a_RI, b_OR, None, None
    )
    _replace(layer, labels[0], a, b)


_COMBINATIONS: Mapping[str, Callable[[Any, Sequence[Adapter], Any, MergeLora], None]] = {
    "cat": _cat,
    "linear": _linear,
    "svd": _svd,
}
"""By combination_type. PEFT applies TIES and DARE to the factors instead of the changes: no reference for those."""


def _refuse_bias(layer: Any, present: Sequence[Adapter]) -> None:
    if any(layer.lora_bias.get(adapter.label) for adapter in present):
        raise NotComparable("PEFT drops lora_bias when it sums factors")


def _factors(layer: Any, label: str) -> tuple[Tensor, Tensor]:
    if label in layer.lora_embedding_A:
        return layer.lora_embedding_A[label], layer.lora_embedding_B[label]
    return layer.lora_A[label].weight, layer.lora_B[label].weight


def _replace(layer: Any, label: str, a: Tensor, b: Tensor) -> None:
    """Make `label` the only active adapter, with these factors unscaled."""
    old_a, old_b = _factors(layer, label)
    old_a.data, old_b.data = a, b
    layer.scaling[label] = 1.0
    layer.set_adapter([label])


def one_line(error: Exception) -> str:
    """A library's message as a reason in the report, without the paths of this machine."""
    text = re.sub(r"(?<!\w)(/[\w.-]+){2,}", "...", " ".join(str(error).split()))[:300]
    return text if isinstance(error, NotComparable) else f"{type(error).__name__}: {text}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without PEFT's and transformers' warnings on tied weights, their own deprecations and keys listened to above."""
    with warnings.catch_warnings():
        for module in (r"peft\.", r"transformers\."):
            warnings.filterwarnings("ignore", module=module)
        yield
