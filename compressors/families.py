"""The model families that the compressors know: where each keeps its layers, and which tasks it is loaded for.

A new family is one row of `FAMILIES`. Task and architecture knowledge comes from optimum's `TasksManager`: the
architecture named in a config is only compared with what a known family and task load as; it never picks a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelpress.errors import InvalidModel


@dataclass(frozen=True)
class Family:
    """Module paths of one family. `{i}` stands for a layer's number, counted from 0."""

    model_type: str
    tasks: tuple[str, ...]
    """optimum's task names that this family is compressed for."""
    ffn_in: str
    """The linear layer whose outputs are a layer's FFN neurons; its weight is [neurons, hidden]."""
    ffn_out: str
    """The linear layer that reads them; its weight is [hidden, neurons]."""
    embeddings: tuple[str, ...]
    layers_field: str
    """Name in the config of the number of layers."""
    ffn_width_field: str
    """Name in the config of the FFN width, one for all layers."""

    def ffn_pairs(self, layers: int) -> tuple[tuple[str, str], ...]:
        """(`ffn_in`, `ffn_out`) of every layer, in order."""
        return tuple((self.ffn_in.format(i=i), self.ffn_out.format(i=i)) for i in range(layers))


FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        model_type="bert",
        tasks=("text-classification",),
        ffn_in="bert.encoder.layer.{i}.intermediate.dense",
        ffn_out="bert.encoder.layer.{i}.output.dense",
        embeddings=(
            "bert.embeddings.word_embeddings",
            "bert.embeddings.position_embeddings",
            "bert.embeddings.token_type_embeddings",
        ),
        layers_field="num_hidden_layers",
        ffn_width_field="intermediate_size",
    ),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json; InvalidModel names the type found and the known ones."""
    found = config.get("model_type")
    if not isinstance(found, str) or found not in FAMILIES:
        raise InvalidModel(
            f"config.json: model_type {found!r} is not supported; known: {', '.join(FAMILIES)}",
            reason="UNKNOWN_ARCHITECTURE",
            field="model_type",
        )
    return FAMILIES[found]


def architecture_of(config: Mapping[str, Any]) -> str:
    """The one class name under `architectures`; it decides nothing by itself."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise InvalidModel(
            f"config.json: architectures is {names!r}: name the one class that the weights belong to, "
            'e.g. ["BertForSequenceClassification"]',
            reason="UNKNOWN_ARCHITECTURE",
            field="architectures",
        )
    return names[0]


def task_of(config: Mapping[str, Any]) -> str:
    """The task that the model was saved for, e.g. `text-classification`."""
    family, architecture = family_of(config), architecture_of(config)
    classes = {_class_for(family, task).__name__: task for task in family.tasks}
    if architecture not in classes:
        raise InvalidModel(
            f"config.json: architecture {architecture!r} is not supported; known for {family.model_type}: "
            f"{', '.join(classes)}",
            reason="UNKNOWN_ARCHITECTURE",
            field="architectures",
        )
    return classes[architecture]


def model_class_of(config: Mapping[str, Any]) -> Any:
    """The transformers class that loads the model: chosen by family and task."""
    return _class_for(family_of(config), task_of(config))


def _class_for(family: Family, task: str) -> Any:
    from optimum.exporters.tasks import TasksManager
    from transformers import AutoConfig

    auto_class = TasksManager.get_model_class_for_task(task, framework="pt", model_type=family.model_type)
    return auto_class._model_mapping[type(AutoConfig.for_model(family.model_type))]
