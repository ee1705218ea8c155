"""Fold LoRA adapters into the base model: FP32 arithmetic, one rounding to the stored dtype (Hu et al. 2021).

    W' = round(W + sum over adapters of weight * scaling * B @ A)

Tensors that no adapter touches keep their bytes. The proof stands in the record: the merged model's logits against
those of base and adapter run by PEFT.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressors.families import family_of
from compressors.folders import check_finite, left_out_warnings, load_model, read_config, read_tensors, write_folder
from compressors.lora_adapters import Base, Edit, LoraAdapter, LowRank, Replacement, Shift, read_adapter
from compressors.measuring import Rows, largest_difference, probe_logits, quality, read_rows, reference_logits
from compressors.stages import Adapter, Job, Monitor, Progress
from modelpress.errors import InternalError, InvalidModel, InvalidRecipe
from modelpress.recipes import MergeLora
from modelpress.reports import StageRecord

VERSION = 2
MAX_LOGIT_DIFFERENCE = 1e-3
"""Between our FP32 merge and PEFT's unmerged forward pass: the same numbers, summed in another order."""

Weighted = Sequence[tuple[Edit, float]]


def run(arguments: MergeLora, job: Job, monitor: Monitor) -> StageRecord:
    """Merge the adapters that `arguments` names, all of them where it names none.

    Raises InvalidRecipe for an unknown adapter, InvalidModel for one that does not fit or changes nothing.
    """
    sources = choose(arguments, job.adapters)
    config, tensors = read_config(job.model), read_tensors(job.model)
    check_finite(tensors, of="the base model")
    family = family_of(config)
    base = Base.of(tensors, embeddings=family.embeddings, classifier=family.classifier)
    adapters = [read_adapter(source.folder, base, name=source.name) for source in sources]
    model = load_model(job.model, device=job.device)
    check_untied(model, {name for adapter in adapters for name in adapter.edits})
    rows = read_rows(job, model.config)

    proofs = []
    for step, (source, adapter) in enumerate(zip(sources, adapters, strict=True), 1):
        proofs.append(prove(source, adapter, job=job, rows=rows))
        monitor.progress(Progress(step=step, steps=len(sources) + 1))
    edits = collect([(adapter, source.weight) for source, adapter in zip(sources, adapters, strict=True)])
    merged = {name: merge_tensor(tensor, edits.get(name, ())) for name, tensor in tensors.items()}
    check_finite(merged, of="the merged model")
    write_folder(merged, config=config, source=job.model, output=job.output)
    changes = relative_changes(tensors, read_tensors(job.output), expected=edits.keys())
    monitor.progress(Progress(step=len(sources) + 1, steps=len(sources) + 1))

    result = load_model(job.output, device=job.device)
    reference = reference_logits(result, rows, device=job.device)
    return StageRecord(
        method="merge_lora",
        arguments=arguments.model_dump(mode="json"),
        version=VERSION,
        touched=tuple(changes),
        before=quality(model, rows, reference=reference, device=job.device),
        after=quality(result, rows, reference=reference, device=job.device),
        details={
            "adapters": proofs,
            "relative_change": changes,
            "tensors_byte_identical": len(tensors) - len(changes),
            "probe": f"{len(rows.probe)} rows: {rows.provenance}",
            "quality_against": "the merged model",
        },
        warnings=_warnings(job.model, edits.keys() - changes.keys()),
    )


def merge_tensor(stored: Tensor, edits: Weighted) -> Tensor:
    """`stored` with the weighted edits added in FP32 and rounded once to its dtype; the same bytes without edits.

    One replacement of weight 1 is the trained tensor itself.
    """
    if not edits:
        return stored
    (first, weight), *others = edits
    if isinstance(first, Replacement) and weight == 1 and not others:
        return first.value.to(stored.dtype)
    base = stored.float()
    return (base + sum_of(delta(base, edit) * weight for edit, weight in edits)).to(stored.dtype)


def delta(base: Tensor, edit: Edit) -> Tensor:
    """What one edit of weight 1 adds to `base`, in FP32."""
    match edit:
        case LowRank(a, b, scaling):
            return (b.float() @ a.float()) * scaling
        case Shift(value, scaling):
            return value.float() * scaling
        case Replacement(value):
            return value.float() - base


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """The sum in the order given; at least one tensor."""
    first, *others = tensors
    for tensor in others:
        first = first + tensor
    return first


def collect(adapters: Sequence[tuple[LoraAdapter, float]]) -> dict[str, Weighted]:
    """Every tensor's edits, adapter after adapter."""
    names = dict.fromkeys(name for adapter, _ in adapters for name in adapter.edits)
    return {name: [(edit, weight) for a, weight in adapters for edit in a.edits.get(name, ())] for name in names}


def choose(arguments: MergeLora, adapters: Sequence[Adapter]) -> list[Adapter]:
    """The adapters to merge, in the recipe's order."""
    known = {adapter.name: adapter for adapter in adapters}
    if not known:
        raise InvalidRecipe(
            "merge_lora needs an adapter: add one to the request, or leave the stage out", field="adapters"
        )
    unknown = [name for name in arguments.adapters if name not in known]
    if unknown:
        raise InvalidRecipe(
            f"adapter {unknown[0]!r} is not in the request; known: {', '.join(known)}", field="adapters"
        )
    return [known[name] for name in dict.fromkeys(arguments.adapters or known)]


def check_untied(model: Any, touched: Iterable[str]) -> None:
    """Refuse an edit of a tensor that the model uses in two places: it would move both."""
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    tied = {name: names for names in users.values() if len(names) > 1 for name in names}
    for name in sorted(set(touched) & tied.keys()):
        raise InvalidModel(
            f"the adapter changes {name!r}, which is tied to {', '.join(n for n in tied[name] if n != name)}: "
            "save the base with tie_word_embeddings false first",
            field=name,
        )


def relative_changes(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, expected: Iterable[str]
) -> dict[str, float]:
    """|after - before| / |before| (Frobenius) of every tensor whose bytes changed; |after| where |before| is 0.

    Raises InternalError where a tensor outside `expected` changed, InvalidModel where none did.
    """
    if before.keys() != after.keys():
        raise InternalError("the merge changed the set of tensors")
    changed = [name for name in before if not same_bytes(before[name], after[name])]
    strays = sorted(set(changed) - set(expected))
    if strays:
        raise InternalError(f"the merge changed {strays[0]!r}, which no adapter touches")
    if not changed:
        raise InvalidModel("the adapters change no tensor: their lora_B are all zero, as before any training")
    return {name: _relative(before[name].float(), after[name].float()) for name in sorted(changed)}


def same_bytes(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def prove(source: Adapter, adapter: LoraAdapter, *, job: Job, rows: Rows) -> dict[str, Any]:
    """Merge this adapter alone at weight 1, in FP32, and compare its logits with base and adapter run by PEFT."""
    merged = load_model(job.model, device=job.device)
    edits = collect([(adapter, 1.0)])
    merged.load_state_dict({k: merge_tensor(t.cpu(), edits.get(k, ())) for k, t in merged.state_dict().items()})
    logits = probe_logits(merged, rows, device=job.device)
    if not torch.isfinite(logits).all():
        raise InvalidModel(
            f"adapter {source.name!r} makes the model answer with NaN or infinity: its weights or its lora_alpha are "
            "too large; go back to an earlier checkpoint",
            reason="NON_FINITE",
        )
    difference = largest_difference(probe_logits(_run_by_peft(source, adapter, job), rows, device=job.device), logits)
    if not difference <= MAX_LOGIT_DIFFERENCE * max(1.0, float(logits.abs().max())):
        raise InternalError(f"adapter {source.name!r}: the merged logits differ from PEFT's by {difference}")
    low_rank = [edit for edits in adapter.edits.values() for edit in edits if isinstance(edit, LowRank)]
    return {
        "name": source.name,
        "weight": source.weight,
        "linear_layers": len(low_rank),
        "ranks": sorted({edit.a.shape[0] for edit in low_rank}),
        "scalings": sorted({edit.scaling for edit in low_rank}),
        "max_abs_logit_difference": difference,
    }


def _run_by_peft(source: Adapter, adapter: LoraAdapter, job: Job) -> Any:
    from peft import PeftModel

    base, config = load_model(job.model, device=job.device), adapter.settings.peft_config
    with warnings.catch_warnings():
        # PEFT still reads the old name of a transformers property.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        return PeftModel.from_pretrained(base, source.folder, config=config, is_trainable=False).eval()


def _relative(before: Tensor, after: Tensor) -> float:
    norm = float(before.norm())
    return float((after - before).norm()) / (norm if norm else 1.0)


def _warnings(model: Path, unchanged: Iterable[str]) -> tuple[str, ...]:
    return (*(f"{name} was trained, and kept its bytes" for name in sorted(unchanged)), *left_out_warnings(model))
