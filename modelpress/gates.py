"""The gate: a policy and the stored measurements in, one verdict out.

    decision = decide(policy, Measured(merge, evaluation, drift, language))
    decision.verdict            # APPROVED, REJECTED or INCONCLUSIVE
    decision.gates[0].sentence  # for people

The service decides with this function and offline verification decides again with it: pure, deterministic, without
numpy, from raw counts wherever the report holds them. How each gate is judged: `modelpress.gate_judges`.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelpress.documents import Document
from modelpress.errors import InvalidPolicy
from modelpress.evaluations import AnyEvaluation, Evaluation, Latency
from modelpress.gate_judges import (
    JUDGES,
    NOT_MEASURED,
    ONLY_MERGED,
    SPEED_CONFIDENCE,
    judge,
    shape_text,
)
from modelpress.intervals import median_ranks
from modelpress.measurement_checks import check_consistent
from modelpress.policies import Policy, Speed
from modelpress.recipes import Recipe
from modelpress.reports import GateDecision, GateResult, Measured, Outcome, Verdict


def decide(policy: Policy, measured: Measured) -> GateDecision:
    """Apply every gate of the policy. One FAILED rejects; else one INCONCLUSIVE leaves it open; else approved.

    Raises VerificationFailed where the report's own figures contradict each other, FailedPrecondition where the speed
    gate names a shape that was not measured.
    """
    check_consistent(measured)
    applied = _applied(policy)
    results = tuple(judge(name, gate, measured) for name, gate in applied.items())
    left_out = tuple(name for name in JUDGES if name not in applied)
    return GateDecision(verdict=_verdict(results), gates=results, not_applied=left_out)


def check_measurable(policy: Policy, evaluation: AnyEvaluation, recipe: Recipe) -> None:
    """Raise InvalidPolicy where a gate asks for what will not be measured: found before anything runs."""
    unmeasured = _unmeasured(evaluation, recipe)
    for name in _applied(policy):
        if name in unmeasured:
            usable = ", ".join(known for known in JUDGES if known not in unmeasured)
            raise InvalidPolicy(
                f"gates.{name} cannot be judged: {unmeasured[name]}; gates that can be used here: {usable}",
                field=f"policy.gates.{name}",
            )
    if policy.gates.speed is not None and isinstance(evaluation, Evaluation):
        _check_speed(policy.gates.speed, evaluation.latency)


def _applied(policy: Policy) -> dict[str, Document]:
    """The policy's gates by name, in the order of `JUDGES`."""
    gates = {name: getattr(policy.gates, name) for name in JUDGES}
    return {name: gate for name, gate in gates.items() if gate is not None}


def _unmeasured(evaluation: AnyEvaluation, recipe: Recipe) -> Mapping[str, str]:
    """Gates that get no figure, and why. Whether a dataset has questions only measuring tells."""
    merge = recipe.merge
    compared = {"merge_difference": merge.without_reference, "merge_logits": merge.without_logits} if merge else {}
    missing = {name: why for name, why in compared.items() if why}
    absent = _absent(evaluation, recipe)
    return missing | {name: absent[row.part] for name, row in JUDGES.items() if row.part in absent}


def _absent(evaluation: AnyEvaluation, recipe: Recipe) -> Mapping[str, str]:
    """Parts of `Measured` that will be None, and why."""
    parts = [] if recipe.merge else ["merge"]
    if recipe.is_merge_only:
        return {row.part: ONLY_MERGED for row in JUDGES.values() if row.part != "merge"}
    if isinstance(evaluation, Evaluation):
        parts.append("language")
    else:
        parts += ["evaluation"] if recipe.export.format == "onnx" else ["evaluation", "parity"]
    return {part: NOT_MEASURED[part] for part in parts}


def _check_speed(speed: Speed, latency: Latency) -> None:
    if speed.batch_size not in latency.batch_sizes or speed.sequence_length not in latency.sequence_lengths:
        measured = ", ".join(shape_text(b, t) for b in latency.batch_sizes for t in latency.sequence_lengths)
        raise InvalidPolicy(
            f"gates.speed: shape {shape_text(speed.batch_size, speed.sequence_length)} will not be measured; choose "
            f"one of {measured} (batch size x tokens), or add it to the evaluation's `latency`",
            field="policy.gates.speed",
        )
    if median_ranks(latency.repeats, confidence=SPEED_CONFIDENCE)[1] < SPEED_CONFIDENCE:
        raise InvalidPolicy(
            f"gates.speed: {latency.repeats} repeats give no {SPEED_CONFIDENCE:.0%} interval of the median; set the "
            "evaluation's `latency.repeats` to at least 6",
            field="policy.gates.speed",
        )


def _verdict(results: tuple[GateResult, ...]) -> Verdict:
    outcomes = {result.outcome for result in results}
    if Outcome.FAILED in outcomes:
        return Verdict.REJECTED
    return Verdict.APPROVED if outcomes == {Outcome.PASSED} else Verdict.INCONCLUSIVE
