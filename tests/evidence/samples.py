"""Reports with plausible figures, consistent with themselves: the four kinds of outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelpress.digests import Digest, digest_bytes
from modelpress.gates import decide
from modelpress.intervals import accuracy_drop, share_interval
from modelpress.merge_reports import LogitComparison, MergeReport
from modelpress.metrics import Footprint, Interval, Metric, PairedCounts, ParityReport
from modelpress.policies import read_policy
from modelpress.reports import (
    ClassQuality,
    CurvePoint,
    DriftExample,
    DriftReport,
    Environment,
    EvaluationReport,
    Histogram,
    Input,
    LatencyRow,
    Measured,
    QualityReport,
    Report,
    StageRecord,
)
from service.requests import AdapterRequest, ConversionRequest

RECIPE_YAML = """\
# Prompt guard: half the feed-forward neurons, then INT8.
stages:
  - method: merge_lora
  - {method: prune, targets: [ffn], ratio: 0.5}
  - {method: recover, steps: 150}
  - {method: quantize, scheme: int8_qat, steps: 60}
  - {method: export, format: onnx}
"""
POLICY_YAML = """\
gates:
  accuracy_drop: {max: 0.015}
  flips: {max_share: 0.03}
  kl_mean: {max: 0.05}
  size: {max_ratio: 0.30}
  speed: {min_ratio: 2.5, batch_size: 1, sequence_length: 64}
  parity: {max_logit_difference: 0.1}
"""
EVALUATION_YAML = "task: text-classification\nlabel_names: [benign, injection]\n"
CONVERSION = "7c1f0a5e2b9d4c36"
LABELS = ("benign", "injection")


@dataclass(frozen=True)
class Case:
    """What tells the sample reports apart."""

    confusion: tuple[tuple[int, int], tuple[int, int]] = ((1198, 51), (57, 795))
    lost: int = 17
    gained: int = 11
    flips: int = 28
    candidate_bytes: int = 23_412_776
    policy_yaml: str = POLICY_YAML
    recipe_yaml: str = RECIPE_YAML
    evaluation_yaml: str = EVALUATION_YAML
    reused_from: str | None = None

    def report(self, model: Digest) -> Report:
        return sample_report(self, model)

    def request(self) -> ConversionRequest:
        return ConversionRequest(
            base=digest_bytes(b"base"),
            evaluation_dataset=digest_bytes(b"evaluation"),
            train=digest_bytes(b"train"),
            validation=digest_bytes(b"validation"),
            adapters=(AdapterRequest("guard", digest_bytes(b"adapter guard"), 1.0),),
            recipe_yaml=self.recipe_yaml,
            policy_yaml=self.policy_yaml,
            evaluation_yaml=self.evaluation_yaml,
            labels={"project": "prompt-guard"},
            seed=7,
        )


APPROVED = Case()
REJECTED = Case(confusion=((1150, 99), (160, 692)), lost=180, gained=23, flips=203, candidate_bytes=33_100_000)
INCONCLUSIVE = Case(policy_yaml=POLICY_YAML.replace("max: 0.015", "max: 0.005"))
CACHED = Case(reused_from="11aa22bb33cc44dd")
CASES = {"approved": APPROVED, "rejected": REJECTED, "inconclusive": INCONCLUSIVE, "cached": CACHED}

N = 2101
ENVIRONMENT = Environment(
    versions={"modelpress": "0.1.0", "onnxruntime": "1.32.0", "python": "3.11.9", "torch": "2.13.0"},
    device="cpu",
    cpu_capability="AVX512",
    threads=2,
    isolation="none: the worker runs as the same user as the service and could read the signing key",
)


def sample_report(case: Case, model: Digest) -> Report:
    """The whole report of one case; `model` is the digest of the candidate's manifest."""
    measured = Measured(_merge(), _evaluation(case), _drift(case))
    policy = read_policy(case.policy_yaml)
    return Report(
        conversion=f"conversions/{CONVERSION}",
        created="2026-11-30T12:04:41+00:00",
        requested_by="local",
        labels={"project": "prompt-guard", "owner": "trust-and-safety", "environment": "demo"},
        inputs=_inputs(),
        model_digest=str(model),
        recipe_digest=str(digest_bytes(RECIPE_YAML.encode())),
        policy_digest=str(digest_bytes(case.policy_yaml.encode())),
        seed=7,
        stages=_stages(case),
        merge=measured.merge,
        evaluation=measured.evaluation,
        drift=measured.drift,
        decision=decide(policy, measured),
        environment=ENVIRONMENT,
        reused_from=case.reused_from,
        warnings=("no probes were given: drift was measured on the evaluation texts",),
        seconds=4.2 if case.reused_from else 283.4,
    )


def _inputs() -> tuple[Input, ...]:
    sizes = {"base": 91_338_512, "adapter guard": 1_327_104, "train": 1_604_882, "validation": 301_114}
    sizes |= {"evaluation": 298_405}
    weights = {"adapter guard": 1.0}
    return tuple(
        Input(role=role, digest=str(digest_bytes(role.encode())), size_bytes=size, weight=weights.get(role))
        for role, size in sizes.items()
    )


def _merge() -> MergeReport:
    """What the record of the first stage says, and its comparison."""
    return MergeReport(
        reference="peft 0.21.2",
        layers=12,
        layer_difference=3.1e-07,
        layer="encoder.layer.4.attention.self.query",
        logits=LogitComparison(max_difference=4.8e-07, max_logit=6.1, label_changes=0, n=64),
        changed=14,
        byte_identical=87,
        largest_change=0.0412,
        largest_change_tensor="encoder.layer.4.attention.self.query.weight",
        measured_by="00ff00ff00ff00ff",
    )


def _quality(confusion: tuple[tuple[int, ...], ...], measured_by: str) -> QualityReport:
    right = sum(confusion[i][i] for i in range(2))
    per_class = []
    for i, label in enumerate(LABELS):
        precision, recall = confusion[i][i] / sum(row[i] for row in confusion), confusion[i][i] / sum(confusion[i])
        f1 = 2 * precision * recall / (precision + recall)
        per_class.append(
            ClassQuality(label=label, precision=precision, recall=recall, f1=f1, support=sum(confusion[i]))
        )
    macro = sum(quality.f1 or 0 for quality in per_class) / 2
    interval = share_interval(right, N, confidence=0.95)
    return QualityReport(
        runtime="onnxruntime 1.32.0 CPUExecutionProvider",
        dataset=str(digest_bytes(b"evaluation")),
        accuracy=Metric(name="accuracy", value=right / N, unit="fraction", n=N, interval=interval),
        f1_macro=Metric(name="f1_macro", value=macro, unit="fraction", n=N),
        per_class=tuple(per_class),
        labels=LABELS,
        confusion=confusion,
        truncated=0,
        measured_by=measured_by,
    )


def _evaluation(case: Case) -> EvaluationReport:
    own = case.reused_from or CONVERSION
    right = case.confusion[0][0] + case.confusion[1][1]
    paired = PairedCounts(
        both_right=right - case.gained,
        only_baseline_right=case.lost,
        only_candidate_right=case.gained,
        both_wrong=N - right - case.lost,
    )
    baseline_right = paired.both_right + case.lost
    baseline = ((1249 - 49, 49), (852 - (baseline_right - 1200), baseline_right - 1200))
    return EvaluationReport(
        baseline=_quality(baseline, "00ff00ff00ff00ff"),
        candidate=_quality(case.confusion, own),
        paired=paired,
        accuracy_drop=accuracy_drop(paired, confidence=0.95),
        footprint=Footprint(
            baseline_bytes=90_917_203,
            candidate_bytes=case.candidate_bytes,
            baseline_parameters=22_713_986,
            candidate_parameters=19_180_802,
        ),
        latency=tuple(_latency(*row) for row in _SHAPES),
        latency_measured_by=own,
        parity=ParityReport(max_logit_difference=0.0412, mean_logit_difference=0.0031, label_changes=0, n=64),
    )


_SHAPES = ((1, 16, 3.61, 1.02), (1, 64, 9.84, 2.97), (8, 16, 17.9, 5.2), (8, 64, 75.4, 23.1))


def _latency(batch: int, length: int, baseline: float, candidate: float) -> LatencyRow:
    speedup = baseline / candidate
    return LatencyRow(
        batch_size=batch,
        sequence_length=length,
        repeats=40,
        threads=1,
        baseline_median_ms=baseline,
        baseline_p95_ms=baseline * 1.07,
        candidate_median_ms=candidate,
        candidate_p95_ms=candidate * 1.11,
        speedup=speedup,
        speedup_interval=Interval(
            low=speedup * 0.97, high=speedup * 1.02, confidence=0.96, method="order statistics of the median"
        ),
    )


def _drift(case: Case) -> DriftReport:
    counts = [round(case.flips * 22 * math.exp(-0.5 * ((i - 10) / 5.5) ** 2)) for i in range(36)]
    counts[0] += 40
    share = share_interval(case.flips, N, confidence=0.95)
    kl = 0.0071 * case.flips / 28
    return DriftReport(
        probes=str(digest_bytes(b"evaluation")),
        n=N,
        flips=case.flips,
        flip_share=Metric(name="flip_share", value=case.flips / N, unit="fraction", n=N, interval=share),
        kl_mean=Metric(name="kl_mean", value=kl, unit="nats", n=N),
        kl_p99=Metric(name="kl_p99", value=kl * 17, unit="nats", n=N),
        kl_histogram=Histogram(edges=tuple(-8 + i / 4 for i in range(37)), counts=tuple(counts)),
        largest=tuple(
            DriftExample(index=i, baseline_label=LABELS[i % 2], candidate_label=LABELS[1 - i % 2], kl=1.9 - k / 5)
            for k, i in enumerate((1203, 88, 411, 1770, 5))
        ),
    )


def _stages(case: Case) -> tuple[StageRecord, ...]:
    own = case.reused_from or CONVERSION
    encoder = tuple(f"encoder.layer.{i}" for i in range(6))
    ffn = tuple(f"{layer}.{name}.dense" for layer in encoder for name in ("intermediate", "output"))
    attention = tuple(f"{layer}.attention.self.{name}" for layer in encoder for name in ("query", "value"))
    merged = (*(f"{name}.weight" for name in attention), "classifier.weight", "classifier.bias")
    change = dict.fromkeys(merged, 0.0203) | {"encoder.layer.4.attention.self.query.weight": 0.0412}
    return (
        StageRecord(
            method="merge_lora",
            arguments={"method": "merge_lora", "adapters": []},
            version=1,
            touched=merged,
            details={"relative_change": change, "tensors_added": [], "tensors_byte_identical": 87},
            seconds=2.1,
            peak_memory_bytes=610_000_000,
            measured_by="00ff00ff00ff00ff",
        ),
        StageRecord(
            method="prune",
            arguments={"method": "prune", "targets": ["ffn"], "ratio": 0.5, "importance": "taylor", "round_to": 8},
            version=1,
            touched=ffn,
            before={"accuracy": 0.953, "kl": 0.0, "flips": 0},
            after={"accuracy": 0.871, "kl": 0.214, "flips": 268},
            details={"parameters_before": 22_713_986, "parameters_after": 19_180_802, "intermediate_size": 768},
            seconds=14.9,
            peak_memory_bytes=812_000_000,
            measured_by=own,
        ),
        StageRecord(
            method="recover",
            arguments={"method": "recover", "steps": 150, "batch_size": 32, "learning_rate": 2e-4},
            version=1,
            touched=tuple(f"{name}.weight" for name in (*ffn, *attention)),
            before={"accuracy": 0.871, "kl": 0.214, "flips": 268},
            after={"accuracy": 0.951, "kl": 0.0082, "flips": 24},
            curve=_curve(150, 0.96, 0.07, 0.21),
            seconds=121.0,
            peak_memory_bytes=1_480_000_000,
            measured_by=own,
        ),
        StageRecord(
            method="quantize",
            arguments={"method": "quantize", "scheme": "int8_qat", "steps": 60, "embeddings": "int8"},
            version=1,
            touched=tuple(f"{name}.weight" for name in (*ffn, *attention, "embeddings.word_embeddings")),
            before={"accuracy": 0.951, "kl": 0.0082, "flips": 24},
            after={"accuracy": 0.950, "kl": 0.0089, "flips": 26},
            curve=_curve(60, 0.12, 0.05, 0.011),
            warnings=("3 training texts were longer than 128 tokens and were cut",),
            seconds=74.5,
            peak_memory_bytes=1_910_000_000,
            measured_by=own,
        ),
        StageRecord(
            method="export",
            arguments={"method": "export", "format": "onnx", "opset": 18},
            version=1,
            touched=("model.onnx",),
            kept_float=("LayerNormalization x 13", "Softmax x 6", "Gelu x 6", "MatMul x 12 (attention products)"),
            details={"nodes": 611, "opset": 18},
            seconds=21.7,
            peak_memory_bytes=1_650_000_000,
            measured_by=own,
        ),
    )


def _curve(steps: int, start: float, end: float, kl: float) -> tuple[CurvePoint, ...]:
    points = []
    for step in range(0, steps + 1, 5):
        loss = end + (start - end) * math.exp(-4 * step / steps) * (1 + 0.08 * math.sin(step * 1.7))
        looked = {"kl": 0.008 + kl * math.exp(-5 * step / steps), "accuracy": 0.951} if step % 25 == 0 else {}
        points.append(CurvePoint(step=step, loss=loss, held_out=looked))
    return tuple(points)
