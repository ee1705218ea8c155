"""The plan: which steps a request asks for, in order. A pure function of the request; nothing is run here.

compress/1-merge_lora  compress/2-prune  ...   one per stage before `export`
export/baseline  export/candidate              the unpruned FP32 model and the compressed one
predict/baseline  predict/candidate            logits of every evaluation row, in the target runtime
probe/baseline  probe/candidate                the same for the probes, where the request names some
evaluate/quality  evaluate/parity  evaluate/latency  drift
"""

from __future__ import annotations

from dataclasses import dataclass

from modelpress.recipes import Export, MergeLora, Stage
from service.requests import ConversionRequest

MEASUREMENTS = ("evaluate/quality", "evaluate/parity", "evaluate/latency", "drift")


@dataclass(frozen=True)
class PlannedStage:
    """A recipe's stage with the name of its step."""

    name: str
    stage: Stage


@dataclass(frozen=True)
class Plan:
    request: ConversionRequest
    merge: PlannedStage | None
    """Lossless: what it gives is the baseline."""
    lossy: tuple[PlannedStage, ...]
    export: Export

    @property
    def has_probes(self) -> bool:
        return self.request.probes not in (None, self.request.evaluation_dataset)

    @property
    def step_names(self) -> tuple[str, ...]:
        """Every step in the order in which it runs."""
        compress = [planned.name for planned in (self.merge, *self.lossy) if planned]
        probes = ["probe/baseline", "probe/candidate"] if self.has_probes else []
        exports = ["export/baseline", "export/candidate"]
        return (*compress, *exports, "predict/baseline", "predict/candidate", *probes, *MEASUREMENTS)


def make_plan(request: ConversionRequest) -> Plan:
    """Order the request's stages. The recipe is valid already, so this cannot fail."""
    planned = [
        PlannedStage(f"compress/{number}-{stage.method}", stage)
        for number, stage in enumerate(request.recipe.stages, 1)
        if not isinstance(stage, Export)
    ]
    merge = next((p for p in planned if isinstance(p.stage, MergeLora)), None)
    export = next(stage for stage in request.recipe.stages if isinstance(stage, Export))
    return Plan(request, merge, tuple(p for p in planned if p is not merge), export)
