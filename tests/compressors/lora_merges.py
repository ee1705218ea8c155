"""Tiny bases, adapters written by PEFT, merges of them from store to store: what the tests of `merge_lora` share."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressors import merge_lora
from compressors.stages import Monitor, NamedSource, SilentMonitor, StreamJob
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora
from modelpress.reports import StageRecord
from modelpress.stored_folders import Sink
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from tests.compressors.stored_models import Tensors, weights_of

TOKENS, WIDTH = 64, 32
PREFIX = "base_model.model."
ADAPTER = "adapter_model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj"
IDS = torch.randint(0, TOKENS, (1, 9), generator=torch.Generator().manual_seed(7))


def llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_decoder(**changes)))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_decoder(num_local_experts=4)))


def gpt_oss() -> nn.Module:
    """Hidden and intermediate width are equal, so that shapes do not tell how an expert is stored."""
    fields = _decoder(num_local_experts=4, head_dim=8, intermediate_size=WIDTH)
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**fields))


def gpt2() -> nn.Module:
    """Its square c_proj of the attention looks alike in either layout."""
    fields = {"vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields, bos_token_id=1, eos_token_id=2))


def mamba() -> nn.Module:
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2}
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=TOKENS, **fields))


def _decoder(**changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
    return sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1} | changes


BASES: Mapping[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "biased": lambda: llama(attention_bias=True),
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "gpt2": gpt2,
    "mamba": mamba,
}


class Bases:
    """Each base is made once: its model in FP32, and its folder as save_pretrained writes it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, nn.Module] = {}

    def model(self, kind: str) -> nn.Module:
        """A copy of its own for the caller."""
        if kind not in self._models:
            torch.manual_seed(0)
            model = BASES[kind]().eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(std=0.1)
            self._models[kind] = model
        return copy.deepcopy(self._models[kind])

    def folder(self, kind: str, *, dtype: torch.dtype = torch.float32, shards: str = "1GB") -> Path:
        """Read only. `shards` is the size at which save_pretrained begins a new one."""
        folder = self._root / f"{kind}-{str(dtype).removeprefix('torch.')}-{shards}"
        if not folder.exists():
            self.model(kind).to(dtype).save_pretrained(folder, max_shard_size=shards)
            (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
            (folder / "README.md").write_bytes(b"# a model card\r\n")
        return folder


@dataclass(frozen=True)
class Merged:
    record: StageRecord
    folder: Path

    @property
    def tensors(self) -> Tensors:
        return weights_of(self.folder)

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    def logits(self, model_class: Any, ids: Tensor = IDS) -> Tensor:
        return logits(model_class.from_pretrained(self.folder, dtype=torch.float32), ids)


class Bench:
    """A content store, and merges in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = ContentStore(str(root / "store"), scratch=root / "scratch")

    def source(self, folder: Path) -> StoredFolder:
        return StoredFolder(self.store.put_folder(folder), self.store)

    def named(self, *adapters: Path | tuple[Path, float]) -> tuple[NamedSource, ...]:
        """Adapters called one, two, three."""
        pairs = [adapter if isinstance(adapter, tuple) else (adapter, 1.0) for adapter in adapters]
        names = ("one", "two", "three")
        return tuple(NamedSource(names[i], self.source(folder), weight) for i, (folder, weight) in enumerate(pairs))

    def merge(self, base: Path, *adapters: Path | tuple[Path, float], seed: int = 0, **arguments: Any) -> Merged:
        sink = StoreSink(self.store)
        job = StreamJob(self.source(base), sink, seed=seed, merged=self.named(*adapters))
        return self.fetch(self.run(job, **arguments), sink)

    def run(self, job: StreamJob, *, monitor: Monitor | None = None, **arguments: Any) -> StageRecord:
        return merge_lora.run(MergeLora(**arguments), job, monitor or SilentMonitor())

    def fetch(self, record: StageRecord, sink: StoreSink) -> Merged:
        folder = self.root / f"merged-{len(list(self.root.glob('merged-*')))}"
        self.store.fetch_folder(sink.finish(), folder)
        return Merged(record, folder)

    def refused(self, base: Path, *adapters: Path | tuple[Path, float], **arguments: Any) -> InvalidModel:
        """The error that the merge ends with; nothing is written before it."""
        sink: Sink = StoreSink(self.store)
        job = StreamJob(self.source(base), sink, seed=0, merged=self.named(*adapters))
        with pytest.raises(InvalidModel) as error:
            self.run(job, **arguments)
        assert not sink.entries
        return error.value


def train(model: nn.Module, *, seed: int = 1, **fields: Any) -> nn.Module:
    """The model with a PEFT LoRA adapter as if trained: random, and so large that the logits tell."""
    from peft import LoraConfig, get_peft_model

    with quiet_peft():
        trained = get_peft_model(model, LoraConfig(**({"r": 4, "lora_alpha": 16} | fields)))
    return randomise(trained, seed=seed)


def randomise(trained: nn.Module, *, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            if parameter.requires_grad:
                parameter.copy_(parameter * (1 + noise) if "magnitude" in name else noise)
    return trained.eval()


def save(trained: Any, folder: Path, **how: Any) -> Path:
    with quiet_peft():
        trained.save_pretrained(folder, **how)
    return folder


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without PEFT's hints on what these tests do on purpose: tied layers, Conv1D, resized embeddings, biases.

    And without transformers' note on a name of its own that PEFT still uses.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing")
        warnings.filterwarnings("ignore", category=UserWarning, module=r"peft\..*")
        warnings.filterwarnings("ignore", message=".*invalid shape")
        # PEFT looks for such names among its modules only; on parameters it does use the pattern.
        warnings.filterwarnings("ignore", category=RuntimeWarning, message=".*(rank|alpha)_pattern.*(experts|gate_up)")
        yield


def factors(module: str, rows: int, columns: int, *, rank: int = 4, seed: int = 1) -> Tensors:
    """Random lora_A and lora_B of a linear layer [rows, columns], under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.randn(rank, columns, generator=generator) * 0.1,
        f"{PREFIX}{module}.lora_B.weight": torch.randn(rows, rank, generator=generator) * 0.1,
    }


def write_adapter(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    """An adapter's folder, written by hand: rank 4, alpha 8."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | fields))
    return folder


def delta(tensors: Tensors, module: str) -> Tensor:
    """B @ A."""
    return tensors[f"{PREFIX}{module}.lora_B.weight"] @ tensors[f"{PREFIX}{module}.lora_A.weight"]


def tensors_of(adapter: Path) -> Tensors:
    return load_file(adapter / ADAPTER)
