"""One step of a conversion: what is asked of a worker, what comes back, and the key that names the result.

A step is a value: operation, canonical arguments and input digests decide the output. `key` therefore names the
result across conversions, and a result under the same key is a cache hit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelpress.canonical import canonical_json
from modelpress.digests import Digest, digest_bytes


@dataclass(frozen=True)
class Step:
    """`name` is unique in the conversion (`compress/2-prune`); `operation` a key of `workers.operations.OPERATIONS`.

    `inputs` maps roles (`model`, `teacher`, `train`, `adapter:NAME`, ...) to manifest digests.
    """

    name: str
    operation: str
    arguments: Mapping[str, Any]
    inputs: Mapping[str, Digest]
    seed: int

    def key(self, environment: Mapping[str, Any]) -> Digest:
        """`environment`: operation version, library versions, device, CPU capability, threads."""
        return digest_bytes(
            canonical_json(
                {
                    "operation": self.operation,
                    "arguments": dict(self.arguments),
                    "inputs": {role: str(digest) for role, digest in self.inputs.items()},
                    "seed": self.seed,
                    "environment": dict(environment),
                }
            )
        )


@dataclass(frozen=True)
class StepResult:
    """`digest` is the manifest of what the step wrote, None where it only measured; `record` its figures (JSON)."""

    digest: Digest | None
    record: Mapping[str, Any]
    seconds: float
    measured_by: str
    cached: bool = False
