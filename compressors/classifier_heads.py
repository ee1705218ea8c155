"""The head of a sequence classifier that an adapter brings to a base without one: complete, or refused.

What the classifier has is asked of its transformers class on the meta device: names and shapes, neither memory nor
values. A part that nobody brings would be random in the merged model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from compressors.adapters import Adapter
from compressors.base_layout import BaseLayout, is_outside_layers
from compressors.folders import LOADING_ERRORS
from modelpress.errors import InvalidModel

Shapes = Mapping[str, tuple[int, ...]]


def label_fields(labels: Sequence[str]) -> dict[str, dict[str, int] | dict[str, str]]:
    """`id2label` and `label2id` as config.json holds them."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def missing_parameters(layout: BaseLayout, labels: Sequence[str]) -> Shapes:
    """What the base's classifier of these labels has beside the base's own tensors, outside its layers.

    InvalidModel where transformers can make no model of the base's config.
    """
    kind = layout.classifier_class
    try:
        config = kind.config_class.from_dict({**layout.config, **label_fields(labels)})
        with torch.device("meta"):
            parameters = kind(config).state_dict()
    except (*LOADING_ERRORS, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidModel(
            f"no {kind.__name__} can be made of the base's config.json: {reason}; correct it", field="config.json"
        ) from None
    return {
        name: tuple(tensor.shape)
        for name, tensor in parameters.items()
        if is_outside_layers(name) and layout.find(name) is None
    }


def check_head(brought: Shapes, layout: BaseLayout, labels: Sequence[str]) -> None:
    """InvalidModel unless the adapter brings exactly the head of the base's classifier of these labels."""
    needed, kind = missing_parameters(layout, labels), layout.classifier_class.__name__
    for name in sorted({*brought, *needed}):
        if name not in needed:
            raise InvalidModel(f"the adapter brings {name!r}, which {kind} does not have: use another base", field=name)
        if name not in brought:
            raise InvalidModel(
                f"{kind} has {name!r}, which neither the base nor the adapter has: merge into a base that has it, or "
                "train with its module in modules_to_save",
                field=name,
            )
        if brought[name] != needed[name]:
            raise InvalidModel(
                f"the adapter's {name!r} has shape {list(brought[name])}, and {kind} of {len(labels)} labels has "
                f"{list(needed[name])}: name as many `labels` as the head has classes, in its order",
                field=name,
            )


def check_task(adapters: Iterable[Adapter]) -> None:
    """InvalidModel for a head of another task than the classification of whole sequences."""
    other = {adapter.settings.task_type for adapter in adapters} & {"TOKEN_CLS", "QUESTION_ANS"}
    if other:
        raise InvalidModel(
            f"task_type is {min(filter(None, other))!r}, and `labels` makes a classifier of whole sequences: merge "
            "into a base that has the adapter's head already",
            field="task_type",
        )
