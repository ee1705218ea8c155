"""One adapter as the merge sees it, whatever its kind: what it does to which parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compressors.adapter_config import AdapterSettings
from compressors.edits import Edit, Replacement


@dataclass(frozen=True)
class Adapter:
    """`edits` by name of the parameter in the loaded model; parts of fused experts by their stored names."""

    settings: AdapterSettings
    edits: Mapping[str, Edit]
    bases: Mapping[str, Replacement] = field(default_factory=dict)
    """Base values that the adapter brings along and that differ from the base's: a resized embedding."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of parameters that are replaced as a whole, by `bases` or by an edit."""
