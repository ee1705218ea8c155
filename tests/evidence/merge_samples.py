"""Reports of conversions that only merge, consistent with themselves: adapters against PEFT, and checkpoints."""

from __future__ import annotations

import random
from dataclasses import dataclass

from modelpress.digests import Digest, digest_bytes
from modelpress.gates import decide
from modelpress.merge_changes import read_changes
from modelpress.merge_recipes import NO_REFERENCE
from modelpress.merge_reports import LogitComparison, MergeReport
from modelpress.policies import read_policy
from modelpress.recipes import read_recipe
from modelpress.reports import Input, Measured, Report, StageRecord
from service.requests import AdapterRequest, ConversionRequest
from tests.evidence.samples import CONVERSION, ENVIRONMENT

RECIPE_YAML = """\
stages:
  - method: merge_lora
  - {method: export, format: safetensors}
"""
MODELS_RECIPE_YAML = """\
stages:
  - {method: merge_models, merge_method: ties, density: 0.4}
  - {method: export, format: safetensors}
"""
POLICY_YAML = """\
gates:
  merge_difference: {max: 0.005}
  merge_logits: {max: 0.02}
  merge_change: {max: 0.5}
"""
LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
LOGITS = LogitComparison(max_difference=0.112, max_logit=17.5, label_changes=3, n=256)


@dataclass(frozen=True)
class MergeCase:
    """What tells the sample reports apart. Without logits, why there are none."""

    method: str = "merge_lora"
    layer_difference: float | None = 0.00169
    logits: LogitComparison | None = LOGITS
    logits_missing: str = ""
    not_compared: tuple[tuple[str, str], ...] = (("lm_head.weight", "the base has no such tensor"),)
    recipe_yaml: str = RECIPE_YAML
    policy_yaml: str = POLICY_YAML
    evaluation_yaml: str = ""

    @property
    def stage(self) -> StageRecord:
        return _stage(self)

    @property
    def merge(self) -> MergeReport:
        compared = self.layer_difference is not None
        return MergeReport(
            reference="peft 0.21.2" if compared else "",
            layers=154 if compared else 0,
            layer_difference=self.layer_difference,
            layer="model.layers.3.mlp.down_proj" if compared else "",
            not_compared=dict(self.not_compared),
            logits=self.logits,
            logits_missing=self.logits_missing,
            measured_by=CONVERSION,
            **read_changes(self.stage.touched, self.stage.details).as_report(),
        )

    def report(self, model: Digest) -> Report:
        policy, measured = read_policy(self.policy_yaml), Measured(merge=self.merge)
        return Report(
            conversion=f"conversions/{CONVERSION}",
            created="2026-11-30T12:04:41+00:00",
            requested_by="local",
            labels={"project": "assistant"},
            inputs=_inputs(self),
            model_digest=str(model),
            recipe_digest=str(digest_bytes(self.recipe_yaml.encode())),
            policy_digest=str(digest_bytes(self.policy_yaml.encode())),
            seed=7,
            stages=(self.stage,),
            merge=measured.merge,
            evaluation=None,
            drift=None,
            decision=decide(policy, measured),
            environment=ENVIRONMENT,
            seconds=9.1,
        )

    def request(self) -> ConversionRequest:
        return ConversionRequest(
            base=digest_bytes(b"base"),
            evaluation_dataset=None,
            adapters=tuple(AdapterRequest(name, digest_bytes(name.encode()), w) for name, w in WEIGHTS.items()),
            recipe_yaml=RECIPE_YAML,
            policy_yaml=self.policy_yaml,
            seed=7,
        )


WEIGHTS = {"style": 0.7, "facts": 1.0 / 3}
MERGED = MergeCase()
DRIFTED = MergeCase(layer_difference=0.0061)
WITHOUT_LOGITS = MergeCase(logits=None, logits_missing="the models need 9.1 GB, and the memory limit is 2 GB")
CHECKPOINTS = MergeCase(
    method="merge_models",
    layer_difference=None,
    logits=None,
    logits_missing=NO_REFERENCE,
    not_compared=(),
    recipe_yaml=MODELS_RECIPE_YAML,
    policy_yaml="gates: {merge_change: {max: 0.5}}\n",
)
CASES = {"merged": MERGED, "drifted": DRIFTED, "without_logits": WITHOUT_LOGITS, "checkpoints": CHECKPOINTS}


def _inputs(case: MergeCase) -> tuple[Input, ...]:
    kind = "adapter" if case.method == "merge_lora" else "model"
    base = Input(role="base", digest=str(digest_bytes(b"base")), size_bytes=2_200_119_864)
    merged = (
        Input(role=f"{kind} {name}", digest=str(digest_bytes(name.encode())), size_bytes=25_271_744, weight=weight)
        for name, weight in WEIGHTS.items()
    )
    return (base, *merged)


def _stage(case: MergeCase) -> StageRecord:
    rng = random.Random(7)
    changes = {
        f"model.layers.{i}.{LINEARS[kind]}.weight": round(0.01 + 0.01 * kind + 0.02 * rng.random(), 6)
        for i in range(22)
        for kind in range(len(LINEARS))
    }
    details = {"relative_change": changes, "tensors_added": ["lm_head.weight"], "tensors_byte_identical": 47}
    facts = {"ranks": [16], "scalings": [2.0], "linear_layers": 154}
    entries = [{"name": name, "weight": weight, **facts} for name, weight in WEIGHTS.items()]
    merge = read_recipe(case.recipe_yaml).stages[0]
    return StageRecord(
        method=case.method,
        arguments=merge.model_dump(mode="json"),
        version=3,
        touched=(*changes, "lm_head.weight"),
        details={"adapters" if case.method == "merge_lora" else "models": entries, **details},
        seconds=3.1,
        peak_memory_bytes=410_000_000,
        measured_by=CONVERSION,
    )
