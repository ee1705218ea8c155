"""Intake: an artifact's files are inspected when it is created, so that an artifact that exists is sound.

    facts = inspect_artifact(ArtifactKind.MODEL, manifest, store)      # JSON, stored beside the artifact

Nothing here loads a model or runs what it finds: headers, configs and rows are read as data, in flat memory, without
torch. The facts are all that `service.preflight` needs to judge whether artifacts fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelpress.errors import InvalidRequest
from modelpress.manifests import ArtifactKind, Manifest
from service.intake.adapters import inspect_adapter
from service.intake.datasets import inspect_dataset
from service.intake.folder import Folder
from service.intake.models import inspect_model
from service.storage.store import ContentStore

__all__ = ["INSPECTION", "INSPECTORS", "inspect_artifact"]

INSPECTION = 4
"""Raised whenever facts change what they hold: older ones are made anew when they are next needed."""

INSPECTORS: Mapping[ArtifactKind, Callable[[Folder], dict[str, Any]]] = {
    ArtifactKind.MODEL: inspect_model,
    ArtifactKind.ADAPTER: inspect_adapter,
    ArtifactKind.DATASET: inspect_dataset,
}


def inspect_artifact(kind: ArtifactKind, manifest: Manifest, store: ContentStore) -> dict[str, Any]:
    """The facts of an artifact; InvalidModel or InvalidDataset names the file, what is wrong and what helps.

    Every blob of the manifest must be in the store.
    """
    if kind not in INSPECTORS:
        known = ", ".join(known.name for known in INSPECTORS)
        raise InvalidRequest(f"kind {kind.name} is not made by callers: use one of {known}", field="kind")
    facts = INSPECTORS[kind](Folder(manifest, store))
    return {"kind": kind.value, "inspection": INSPECTION, "size_bytes": manifest.size_bytes, **facts}
