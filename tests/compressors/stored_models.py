"""Models in a content store, and merges of them: what the tests of `merge_models` share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressors import merge_models
from compressors.stages import Monitor, NamedSource, SilentMonitor, StreamJob
from modelpress.merge_recipes import MergeModels
from modelpress.reports import StageRecord
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 20}
SHAPES = {
    "embed.weight": (20, 8),
    "layers.0.weight": (8, 12),
    "layers.0.conv.weight": (6, 4, 3),
    "layers.0.norm.weight": (8,),
    "logit_scale": (),
    "lm_head.weight": (20, 8),
}
Tensors = dict[str, Tensor]
METHODS = ("linear", "slerp", "ties", "dare_linear", "dare_ties")


def random_tensors(seed: int, *, like: Tensors | None = None, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random tensors, or those of `like` moved by a tenth, beside an integer buffer."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    moved = drawn if like is None else {name: like[name].float() + 0.1 * drawn[name] for name in drawn}
    return {**{name: tensor.to(dtype) for name, tensor in moved.items()}, "position_ids": torch.arange(5)}


class Workbench:
    """A content store, models in it, and merges of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = ContentStore(str(folder / "store"), scratch=folder / "scratch")

    def model(self, tensors: Tensors, *, shards: int = 1, files: dict[str, str] | None = None, **config: object):
        """Store a model; `files` are companions by path, `config` changes fields of CONFIG."""
        folder = Path(self.folder / "models" / str(len(list(self.folder.glob("models/*")))))
        folder.mkdir(parents=True)
        companions = {"tokenizer.json": '{"a": 1}', "README.md": "# card\r\n", "sub/labels.txt": "x"} | (files or {})
        for path, text in {"config.json": json.dumps({**CONFIG, **config}), **companions}.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, newline="")
        write_weights(tensors, folder, shards=shards)
        return StoredFolder(self.store.put_folder(folder), self.store)

    def run(
        self, base, *models: NamedSource, monitor: Monitor | None = None, seed: int = 0, **arguments: object
    ) -> tuple[StageRecord, Path]:
        sink = StoreSink(self.store)
        job = StreamJob(base=base, sink=sink, seed=seed, merged=models)
        record = merge_models.run(MergeModels(**arguments), job, monitor or SilentMonitor())
        output = self.folder / "output"
        shutil.rmtree(output, ignore_errors=True)
        self.store.fetch_folder(sink.finish(), output)
        return record, output

    def merge(self, base: Tensors, *models: tuple[Tensors, float], **arguments: object) -> tuple[StageRecord, Tensors]:
        """Merge models called a, b, ... of these tensors and weights."""
        named = [NamedSource("abc"[i], self.model(tensors), weight) for i, (tensors, weight) in enumerate(models)]
        record, output = self.run(self.model(base), *named, **arguments)
        return record, weights_of(output)


def write_weights(tensors: Tensors, folder: Path, *, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    paths = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weight_map = {name: paths[position % shards] for position, name in enumerate(sorted(tensors))}
    for path in paths:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == path}, folder / path, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def weights_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(left: Tensors, right: Tensors) -> bool:
    """Names, dtypes, shapes and bytes."""
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype
        and left[n].shape == right[n].shape
        and torch.equal(left[n].reshape(-1).view(torch.uint8), right[n].reshape(-1).view(torch.uint8))
        for n in left
    )


BASE = random_tensors(0)
A, B = random_tensors(1, like=BASE), random_tensors(2, like=BASE)


def settings(method: str) -> dict[str, object]:
    return {"merge_method": method} | ({} if method in ("linear", "slerp") else {"density": 0.5})
