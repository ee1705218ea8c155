"""Reports of quantized language models, consistent with themselves: the verdicts, few windows, no questions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from modelpress.digests import Digest, digest_bytes
from modelpress.gates import decide
from modelpress.intervals import accuracy_drop, share_interval
from modelpress.language_intervals import paired_ratio_interval
from modelpress.language_reports import ChoiceReport, Generation, LanguageReport, TokenWindow
from modelpress.metrics import Footprint, Interval, Metric, PairedCounts, ParityReport
from modelpress.policies import read_policy
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.quantization_reports import QuantizedLayer
from modelpress.reports import Cluster, DriftExample, DriftReport, Histogram, Input, Measured, Report, StageRecord
from service.requests import ConversionRequest
from tests.evidence.samples import CONVERSION, ENVIRONMENT

RECIPE_YAML = """\
stages:
  - {method: quantize_weights, algorithm: gptq, scheme: w4a16, group_size: 64, max_fallback_share: 0.05}
  - {method: export, format: compressed-tensors}
"""
POLICY_YAML = """\
gates:
  perplexity: {max_ratio: 1.2}
  top1_agreement: {min_share: 0.7}
  flips: {max_share: 0.3}
  kl_mean: {max: 0.3}
  accuracy_drop: {max: 0.05}
  size: {max_ratio: 0.45}
"""
EVALUATION_YAML = "task: text-generation\n"
DATASET = str(digest_bytes(b"evaluation"))
TOKENS = 511
LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
DEAD_COLUMNS = "12 of 1,536 input channels are 0 in every calibration text"
GENERATIONS = (
    Generation(
        index=0,
        prompt="The capital of France is",
        baseline=" Paris. It is the largest city in the country and lies on the Seine.",
        candidate=" Paris. It is the largest city in Europe, and one of the oldest.",
        equal_tokens=8,
        tokens=16,
    ),
    Generation(
        index=3,
        prompt="def add(a, b):\n    return",
        baseline=" a + b\n\nprint(add(1, 2))",
        candidate=" a + b\n\nprint(add(1, 2))",
        equal_tokens=11,
        tokens=11,
    ),
)


@dataclass(frozen=True)
class LanguageCase:
    """What tells the sample reports apart. `loss`: nats that the candidate adds per token; `apart`: share of flips."""

    loss: float = 0.12
    apart: float = 0.24
    windows: int = 16
    paired: tuple[int, int, int, int] | None = (511, 21, 19, 449)
    parity: ParityReport | None = None
    recipe_yaml: str = RECIPE_YAML
    policy_yaml: str = POLICY_YAML
    evaluation_yaml: str = EVALUATION_YAML

    @property
    def measured(self) -> Measured:
        return Measured(language=_language(self), drift=_drift(self))

    def report(self, model: Digest) -> Report:
        measured = self.measured
        return Report(
            conversion=f"conversions/{CONVERSION}",
            created="2026-11-30T12:04:41+00:00",
            requested_by="local",
            labels={"project": "assistant"},
            inputs=_inputs(),
            model_digest=str(model),
            recipe_digest=str(digest_bytes(self.recipe_yaml.encode())),
            policy_digest=str(digest_bytes(self.policy_yaml.encode())),
            seed=7,
            stages=(_quantizing(), _export()),
            evaluation=None,
            language=measured.language,
            drift=measured.drift,
            decision=decide(read_policy(self.policy_yaml), measured),
            environment=ENVIRONMENT,
            warnings=("no probes were given: drift was measured on the evaluation texts",),
            seconds=644.0,
        )

    def request(self) -> ConversionRequest:
        return ConversionRequest(
            base=digest_bytes(b"base"),
            evaluation_dataset=digest_bytes(b"evaluation"),
            train=digest_bytes(b"train"),
            recipe_yaml=self.recipe_yaml,
            policy_yaml=self.policy_yaml,
            evaluation_yaml=self.evaluation_yaml,
            seed=7,
        )


APPROVED = LanguageCase()
REJECTED = LanguageCase(loss=0.37, apart=0.41, paired=(400, 132, 40, 428))
FEW_WINDOWS = LanguageCase(loss=0.17, windows=3)
WITHOUT_QUESTIONS = LanguageCase(paired=None)
CASES = {
    "language": APPROVED,
    "language_rejected": REJECTED,
    "language_few_windows": FEW_WINDOWS,
    "language_without_questions": WITHOUT_QUESTIONS,
}


def _windows(case: LanguageCase) -> tuple[TokenWindow, ...]:
    rng = random.Random(7)
    windows = []
    for _ in range(case.windows):
        baseline, kl = rng.gauss(3.0, 0.2), rng.gauss(0.22, 0.02)
        loss, apart = rng.gauss(case.loss, 0.02), rng.gauss(case.apart, 0.03)
        windows.append(
            TokenWindow(
                tokens=TOKENS,
                baseline_nats=TOKENS * baseline,
                candidate_nats=TOKENS * (baseline + loss),
                kl_nats=TOKENS * kl,
                agreements=TOKENS - round(TOKENS * apart),
            )
        )
    return tuple(windows)


def _language(case: LanguageCase) -> LanguageReport:
    windows = _windows(case)
    tokens = sum(window.tokens for window in windows)
    baseline, candidate, kl, agreed = (
        math.fsum(getattr(window, name) for window in windows) / tokens
        for name in ("baseline_nats", "candidate_nats", "kl_nats", "agreements")
    )
    ratio = paired_ratio_interval(windows, confidence=0.95)
    return LanguageReport(
        dataset=DATASET,
        baseline_runtime="transformers 5.24.0 cpu float32",
        candidate_runtime="transformers 5.24.0 with compressed-tensors 0.20.0 cpu float32",
        window=512,
        stride=512,
        baseline_perplexity=_metric("baseline_perplexity", math.exp(baseline), tokens, "ratio"),
        candidate_perplexity=_metric("candidate_perplexity", math.exp(candidate), tokens, "ratio"),
        perplexity_ratio=_metric("perplexity_ratio", math.exp(candidate - baseline), tokens, "ratio", ratio),
        token_kl=_metric("token_kl", kl, tokens, "nats"),
        top1_agreement=_metric("top1_agreement", agreed, tokens, "fraction"),
        windows=windows,
        choices=_choices(case.paired) if case.paired else None,
        generations=GENERATIONS,
        footprint=Footprint(
            baseline_bytes=269_060_552,
            candidate_bytes=112_400_384,
            baseline_parameters=134_515_008,
            candidate_parameters=134_515_008,
        ),
        parity=case.parity,
        measured_by=CONVERSION,
    )


def _metric(name: str, value: float, n: int, unit: str, interval: Interval | None = None) -> Metric:
    return Metric(name=name, value=value, unit=unit, n=n, interval=interval)


def _choices(counts: tuple[int, int, int, int]) -> ChoiceReport:
    both, baseline, candidate, neither = counts
    paired = PairedCounts(
        both_right=both, only_baseline_right=baseline, only_candidate_right=candidate, both_wrong=neither
    )
    accuracies = {
        f"{role}_accuracy": _metric(
            f"{role}_accuracy", right / paired.n, paired.n, "fraction", share_interval(right, paired.n, confidence=0.95)
        )
        for role, right in (("baseline", both + baseline), ("candidate", both + candidate))
    }
    return ChoiceReport(paired=paired, accuracy_drop=accuracy_drop(paired, confidence=0.95), **accuracies)


def _drift(case: LanguageCase) -> DriftReport:
    """On the evaluation texts: the windows of the language report."""
    windows = _windows(case)
    clusters = tuple(Cluster(n=window.tokens, flips=window.tokens - window.agreements) for window in windows)
    n, flips = sum(cluster.n for cluster in clusters), sum(cluster.flips for cluster in clusters)
    counts = [round(n / 12 * math.exp(-0.5 * ((i - 27) / 4.5) ** 2)) for i in range(36)]
    return DriftReport(
        probes=DATASET,
        n=n,
        flips=flips,
        flip_share=_metric("flip_share", flips / n, n, "fraction"),
        kl_mean=_metric("kl_mean", math.fsum(window.kl_nats for window in windows) / n, n, "nats"),
        kl_p99=_metric("kl_p99", 2.31, n, "nats"),
        kl_histogram=Histogram(edges=tuple(-8 + i / 4 for i in range(37)), counts=tuple(counts)),
        largest=tuple(
            DriftExample(index=i, baseline_label=" <b>Paris</b>", candidate_label="\n", kl=7.9 - k / 5)
            for k, i in enumerate((403, 88, 411))
        ),
        clusters=clusters,
    )


def _inputs() -> tuple[Input, ...]:
    sizes = {"base": 271_313_984, "train": 1_604_882, "evaluation": 98_405}
    return tuple(
        Input(role=role, digest=str(digest_bytes(role.encode())), size_bytes=size) for role, size in sizes.items()
    )


def quantized_layers() -> tuple[QuantizedLayer, ...]:
    """Thirty decoder layers; one linear layer fell back to rounding, one stayed float."""
    rng = random.Random(7)
    layers = []
    for i in range(30):
        for kind, name in enumerate(LINEARS):
            rounding = 0.05 + 0.015 * kind + 0.002 * i + 0.02 * rng.random()
            layers.append(
                QuantizedLayer(
                    name=f"model.layers.{i}.{name}",
                    algorithm="gptq",
                    num_bits=4,
                    group_size=64,
                    error=rounding * rng.uniform(0.5, 0.75),
                    rounding_error=rounding,
                    seconds=1.2 + 0.4 * kind,
                )
            )
    fallen = layers[13].model_copy(update={"algorithm": "rtn", "error": layers[13].rounding_error})
    layers[13] = fallen.model_copy(update={"fallback": DEAD_COLUMNS})
    layers[20] = layers[20].model_copy(
        update={"algorithm": "none", "num_bits": 16, "group_size": None, "error": None, "rounding_error": None}
    )
    return tuple(layers)


def _quantizing() -> StageRecord:
    arguments = QuantizeWeights(algorithm="gptq", scheme="w4a16", group_size=64, max_fallback_share=0.05)
    layers = quantized_layers()
    return StageRecord(
        method="quantize_weights",
        arguments=arguments.model_dump(mode="json"),
        version=1,
        touched=tuple(layer.name for layer in layers if layer.algorithm != "none"),
        layers=layers,
        details={
            "calibration": {"dataset": str(digest_bytes(b"train")), "windows": 64, "tokens": 32_768},
            "bits_per_weight": 4.25,
        },
        warnings=("2 of 400 calibration texts stand in the evaluation dataset too",),
        seconds=571.0,
        peak_memory_bytes=890_000_000,
        measured_by=CONVERSION,
    )


def _export() -> StageRecord:
    return StageRecord(
        method="export",
        arguments={"method": "export", "format": "compressed-tensors", "opset": 20},
        version=1,
        touched=("model.safetensors",),
        details={"tensors": 692},
        seconds=1.7,
        peak_memory_bytes=240_000_000,
        measured_by=CONVERSION,
    )
