"""The merged model as files and config: which stored tensor becomes what, and what the config must say then.

A head that is tied to the embeddings is untied where the two would differ; an embedding may get another number of
tokens; a classifier may take the place of a language model's head. Each of these stands in the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compressors.base_layout import BaseLayout
from compressors.changes import Change, Unchanged
from compressors.classifier_heads import label_fields
from compressors.dequantized_base import DequantizedBase
from compressors.merged_folder import OUTPUT_DTYPES, with_dtype
from compressors.output_plan import OutputFile, OutputPlan, OutputTensor
from compressors.weight_files import StoredTensor, WeightFile
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora


@dataclass
class MergedModel:
    """Changes by the name of the parameter in the loaded model, and the shapes of those that get a new one.

    `add`, `untie` and `become_classifier` extend it; `plan` is what it comes to.
    """

    layout: BaseLayout
    changes: dict[str, Change]
    shapes: Mapping[str, tuple[int, ...]]
    config: dict[str, Any]
    added: dict[str, StoredTensor | None] = field(default_factory=dict)
    """New tensors, and the stored one that each begins with."""
    dropped: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    def untie(self, target: str, source: str) -> None:
        """Write both of a tied pair, each with its own change."""
        stored = self.layout.find(source)
        self.changes.setdefault(target, Unchanged())
        if target not in self.layout.tensors:
            self.added[target] = stored
        self.config["tie_word_embeddings"] = False
        self.notes.append(
            f"{target} was tied to {source} and is now a tensor of its own: tie_word_embeddings is false in the output"
        )

    def resize(self, rows: int) -> None:
        """The config's number of tokens."""
        text = self.config.get("text_config")
        owner = text if isinstance(text, dict) and "vocab_size" in text else self.config
        owner["vocab_size"] = rows
        self.notes.append(f"the vocabulary has {rows} tokens instead of {self.layout.vocabulary}")

    def become_classifier(self, labels: Sequence[str]) -> None:
        """Drop the base's own head and name the class, and the classes, of the new one."""
        kind = self.layout.classifier_class
        body = f"{kind.base_model_prefix}."
        if any(name.startswith(body) for name in self.layout.tensors):
            self.dropped = tuple(name for name in self.layout.tensors if not name.startswith(body))
        self.config["architectures"] = [kind.__name__]
        self.config |= label_fields(labels)
        without = f", without {', '.join(self.dropped)}" if self.dropped else ""
        self.notes.append(f"the model is now a {kind.__name__}{without}")

    def store_as(self, dtype: str) -> None:
        """The dtype that the stage names, and no quantization: what is dequantized stays so."""
        self.config = with_dtype(self.config, dtype)
        if isinstance(self.layout.files, DequantizedBase):
            self.config.pop("quantization_config", None)
            self.notes.append(f"{len(self.layout.files.weights)} weights were dequantized: the output is not quantized")

    def plan(self, arguments: MergeLora) -> OutputPlan:
        """The base's files with every change, without those that lose every tensor; new tensors are in the last one."""
        dtype = OUTPUT_DTYPES[arguments.output_dtype]
        by_stored = {self._stored_name(name): name for name in self.changes if name not in self.added}
        files = [file for origin in self.layout.files.files if (file := self._file(origin, by_stored, dtype)).tensors]
        last = files[-1]
        new = tuple(self._added(name, dtype) for name in self.added)
        plan = OutputPlan((*files[:-1], OutputFile(last.origin, (*last.tensors, *new))))
        return self.layout.files.decoded(plan) if isinstance(self.layout.files, DequantizedBase) else plan

    def _file(self, file: WeightFile, by_stored: Mapping[str, str], dtype: torch.dtype | None) -> OutputFile:
        tensors = []
        for stored in file.tensors:
            if stored.name in self.dropped:
                continue
            name = by_stored.get(stored.name, stored.name)
            change = self.changes.get(name)
            if change is not None:
                _check_full_precision(stored)
            kept = stored.dtype if change is None or dtype is None else dtype
            tensors.append(OutputTensor(stored.name, kept, self.shapes.get(name, stored.shape), stored, change))
        return OutputFile(file, tuple(tensors))

    def _added(self, name: str, dtype: torch.dtype | None) -> OutputTensor:
        stored = self.added[name]
        shape = self.shapes.get(name) or (stored.shape if stored else ())
        own = stored.dtype if stored else self._usual_dtype()
        return OutputTensor(name, dtype or own, shape, stored, self.changes[name])

    def _usual_dtype(self) -> torch.dtype:
        floating = Counter(t.dtype for t in self.layout.tensors.values() if t.dtype.is_floating_point)
        return floating.most_common(1)[0][0]

    def _stored_name(self, name: str) -> str:
        found = self.layout.find(name)
        if found is None:
            raise InvalidModel(f"the base has no tensor {name!r}", field=name)
        return found.name


def _check_full_precision(stored: StoredTensor) -> None:
    """InvalidModel for codes, whatever the config says of quantization: a change of weights is none of their codes."""
    if not stored.dtype.is_floating_point or stored.dtype.itemsize == 1:
        raise InvalidModel(
            f"tensor {stored.name!r} of the base, which an adapter changes, has the quantized dtype "
            f"{str(stored.dtype).removeprefix('torch.')}: name the full-precision base",
            reason="QUANTIZED_BASE",
            field=stored.name,
        )
