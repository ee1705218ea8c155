"""From several adapters to one merged model: each parameter's change, and what it means for heads and embeddings."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors.adapters import Adapter
from compressors.base_layout import BaseLayout, is_outside_layers
from compressors.changes import Change, Rows, Unchanged
from compressors.classifier_heads import check_head, check_task
from compressors.combining import NamedEdit, combined
from compressors.edits import Chain, Edit, LowRank, Replacement, TokenRows, TransposedLowRank
from compressors.merged_model import MergedModel
from compressors.stages import NamedSource
from modelpress.errors import InvalidModel, InvalidRecipe
from modelpress.merge_recipes import MergeLora

Named = Sequence[tuple[NamedSource, Adapter]]


@dataclass(frozen=True)
class Rebased:
    """A change of the base values that an adapter brought along, not of the stored ones."""

    base: Replacement
    change: Change

    def begin(self, stored: Tensor) -> Rows:
        return self.change.begin(self.base.value())


def merged_model(layout: BaseLayout, adapters: Named, arguments: MergeLora, *, seed: int) -> MergedModel:
    """Everything that the adapters do together. InvalidModel where they exclude each other or do not fit the base."""
    shapes, bases = _shapes(adapters), _bases(adapters)
    edits = _by_parameter(adapters)
    _check_apart(edits)
    _check_replacements(layout, edits, shapes)
    changes = {name: combined(name, parts, arguments, seed=seed) for name, parts in edits.items()}
    for name, base in bases.items():
        changes[name] = Rebased(base, changes.get(name, Unchanged()))
    model = MergedModel(layout, changes, shapes, copy.deepcopy(dict(layout.config)))
    outside = {name for name in changes if is_outside_layers(name)}
    if arguments.labels:
        check_task(adapter for _, adapter in adapters)
    _add_head(model, sorted(name for name in outside if layout.find(name) is None), arguments)
    if outside - model.added.keys():
        _settle_ties(model, edits, bases)
        _settle_vocabulary(model)
    model.store_as(arguments.output_dtype)
    return model


def _by_parameter(adapters: Named) -> dict[str, list[NamedEdit]]:
    """Every parameter's edits, adapter after adapter."""
    edits: dict[str, list[NamedEdit]] = {}
    for source, adapter in adapters:
        for name, edit in adapter.edits.items():
            edits.setdefault(name, []).append(NamedEdit(source.name, edit, source.weight))
    return edits


def _check_apart(edits: Mapping[str, Sequence[NamedEdit]]) -> None:
    """No two adapters replace the same tensor: which one counts would be chance."""
    for name, parts in edits.items():
        owners = [part.adapter for part in parts if _replaces(part.edit)]
        if len(owners) > 1:
            raise InvalidModel(f"adapters {owners[0]!r} and {owners[1]!r} both replace {name!r}: merge one", field=name)


def _replaces(edit: Edit) -> bool:
    return isinstance(edit, Replacement | TokenRows) or (isinstance(edit, Chain) and _replaces(edit.first))


def _check_replacements(
    layout: BaseLayout, edits: Mapping[str, Sequence[NamedEdit]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """A tensor that the base has in another shape, or not at all, can only be the adapter's own."""
    for name, parts in edits.items():
        found = layout.find(name)
        is_new = found is None or found.shape != shapes.get(name, found.shape)
        owner = next((part for part in parts if _replaces(part.edit)), None)
        if is_new and owner is not None and (owner.weight != 1 or len(parts) > 1):
            here = f"with shape {list(found.shape)}" if found else "not at all"
            raise InvalidModel(
                f"adapter {owner.adapter!r} brings {name!r} with shape {list(shapes[name])}, which the base has "
                f"{here}: nothing can be added to it or weighed against it, so merge it alone with weight 1 (it has "
                f"{owner.weight:g}, and {len(parts)} adapters change the tensor)",
                field=name,
            )


def _shapes(adapters: Named) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for source, adapter in adapters:
        for name, shape in adapter.shapes.items():
            if shapes.setdefault(name, shape) != shape:
                raise InvalidModel(
                    f"adapter {source.name!r} has {name!r} of shape {list(shape)}, another one {list(shapes[name])}: "
                    "adapters with different vocabularies cannot be merged together",
                    field=name,
                )
    return shapes


def _bases(adapters: Named) -> dict[str, Replacement]:
    bases: dict[str, Replacement] = {}
    for source, adapter in adapters:
        for name, base in adapter.bases.items():
            if name in bases and not torch.equal(bases[name].value(), base.value()):
                raise InvalidModel(
                    f"adapter {source.name!r} was trained on another {name!r} than the adapters before it: merge "
                    "adapters of one base",
                    field=name,
                )
            bases[name] = base
    return bases


def _add_head(model: MergedModel, missing: Sequence[str], arguments: MergeLora) -> None:
    """Tensors that the base does not have: the trained head of a classifier, once its labels are named."""
    if not missing:
        if arguments.labels:
            raise InvalidRecipe(
                "labels names classes, and no adapter brings a head that the base lacks", field="labels"
            )
        return
    if not arguments.labels:
        raise InvalidModel(
            f"the adapter brings {missing[0]!r}, which the base does not have: merge into a base with that head, or "
            "name the head's classes in the stage's `labels`",
            field=missing[0],
        )
    check_head({name: model.shapes[name] for name in missing}, model.layout, arguments.labels)
    model.added |= dict.fromkeys(missing)
    model.become_classifier(arguments.labels)


def _settle_ties(
    model: MergedModel, edits: Mapping[str, Sequence[NamedEdit]], bases: Mapping[str, Replacement]
) -> None:
    """Untie what would differ; what both sides of a tie change alike stays one tensor."""
    _refuse_unknown_ties(model)
    for target, source in model.layout.tied.items():
        if model.layout.find(source) is None or not {target, source} & model.changes.keys():
            continue
        if _stay_equal(edits.get(target, ()), edits.get(source, ())):
            model.changes.pop(target, None)
            continue
        _check_shared_rows(edits.get(target, ()), edits.get(source, ()), target)
        others = [name for name, its in model.layout.tied.items() if its == source and name != target]
        if others:
            raise InvalidModel(
                f"the adapter changes {target!r} or {source!r}, which are tied to {others[0]!r} as well, and a config "
                "unties all of them or none: train the adapter without that module",
                field=target,
            )
        base = bases.get(target) or bases.get(source)
        if base is not None:
            model.changes[target] = Rebased(base, _without_base(model.changes.get(target, Unchanged())))
            model.shapes = {**model.shapes, target: model.shapes[source if source in model.shapes else target]}
        model.untie(target, source)


def _check_shared_rows(head: Sequence[NamedEdit], embedding: Sequence[NamedEdit], name: str) -> None:
    """Trained rows of the embedding are the tied head's as well: another adapter's head would lose them."""
    trained = {part.adapter for part in embedding if isinstance(part.edit, TokenRows)}
    other = next((part.adapter for part in head if trained and part.adapter not in trained), None)
    if other is not None:
        raise InvalidModel(
            f"adapter {other!r} changes {name!r}, which is tied to an embedding with rows of adapter {min(trained)!r}: "
            "merge that one first, and the other into the result",
            field=name,
        )


def _refuse_unknown_ties(model: MergedModel) -> None:
    """A config that ties embeddings to a head which only a class of transformers could name."""
    layout = model.layout
    if layout.model_class is not None or not layout.ties_embeddings:
        return
    for name in sorted(filter(is_outside_layers, model.changes)):
        found = layout.find(name)
        if found is not None and len(found.shape) == 2 and found.shape[0] >= (layout.vocabulary or 1):
            raise InvalidModel(
                f"the adapter changes {name!r}, config.json says tie_word_embeddings, and transformers has no class "
                f"{layout.config.get('architectures')} of model_type {layout.model_type!r} that would say what is "
                "tied: store the head as a tensor of its own and set tie_word_embeddings to false",
                field=name,
            )


def _without_base(change: Change) -> Change:
    return change.change if isinstance(change, Rebased) else change


def _stay_equal(target: Sequence[NamedEdit], source: Sequence[NamedEdit]) -> bool:
    """Whether head and embedding change alike. Trained token rows of the embedding are the head's too, as in PEFT."""
    if not target:
        return all(isinstance(part.edit, TokenRows) for part in source)
    if len(target) != len(source):
        return False
    pairs = list(zip(target, source, strict=True))
    return all(a.adapter == b.adapter and _same_effect(a.edit, b.edit) for a, b in pairs)


def _same_effect(head: Edit, embedding: Edit) -> bool:
    """Equal replacements, or the same factors the other way round."""
    match head, embedding:
        case Replacement(a), Replacement(b):
            return _equal(a(), b())
        case TokenRows(a, i), TokenRows(b, j):
            return i == j and _equal(a(), b())
        case LowRank(), TransposedLowRank():
            same_scaling = head.scaling == embedding.scaling
            return same_scaling and _equal(head.a(), embedding.b().T) and _equal(head.b(), embedding.a().T)
    return False


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)


def _settle_vocabulary(model: MergedModel) -> None:
    """An embedding of another size is one for the whole model: config, embedding and head agree."""
    before = model.layout.vocabulary
    resized = {name: shape[0] for name, shape in _resized(model)}
    if not resized:
        return
    names = {name for pair in model.layout.may_be_tied.items() for name in pair} | resized.keys()
    for name in sorted(names):
        found = model.layout.tensors.get(name)
        if found is not None and name not in resized and found.shape[0] >= (before or 0):
            raise InvalidModel(
                f"the adapter makes {min(resized)!r} {resized[min(resized)]} tokens long, and {name!r} stays at "
                f"{list(found.shape)}: merge into the base as it was resized, or save the adapter with both "
                "(save_embedding_layers=True)",
                field=name,
            )
    if len(set(resized.values())) != 1:
        raise InvalidModel(f"the adapter's embeddings have different numbers of tokens: {resized}", field=min(resized))
    model.resize(resized[min(resized)])


def _resized(model: MergedModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in model.shapes.items():
        found = model.layout.find(name)
        if found is not None and found.shape != shape:
            yield name, shape
