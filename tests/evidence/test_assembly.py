"""The report repeats the records of the steps: whose figures they are, and what was not asked for is not there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modelpress.digests import Digest, digest_bytes
from modelpress.errors import InvalidRequest
from modelpress.gates import decide
from modelpress.reports import Environment, Measured
from service.report.evidence import assemble_merge, assemble_report
from service.requests import AdapterRequest, ConversionRequest
from service.steps import StepResult
from service.storage.store import ContentStore
from tests.evidence.merge_samples import CHECKPOINTS, MERGED, MergeCase
from tests.evidence.samples import ENVIRONMENT

MODEL = digest_bytes(b"model")


def merged_step(case: MergeCase, **details: Any) -> StepResult:
    record = case.stage.model_dump(mode="json", exclude={"measured_by"})
    return StepResult(MODEL, {**record, "details": {**record["details"], **details}}, 3.1, "aa11", cached=True)


def check_step(case: MergeCase) -> StepResult:
    fields = {"reference", "layers", "layer_difference", "layer", "not_compared", "logits", "logits_missing"}
    return StepResult(None, case.merge.model_dump(mode="json", include=fields), 9.0, "bb22")


def test_a_merge_is_what_its_stage_changed_and_what_its_check_compared():
    merge = assemble_merge(merged_step(MERGED), check_step(MERGED))
    assert merge == MERGED.merge.model_copy(update={"measured_by": "bb22"})


def test_without_a_check_there_is_no_reference_and_the_stage_measured_it():
    merge = assemble_merge(merged_step(CHECKPOINTS), None)
    assert merge == CHECKPOINTS.merge.model_copy(update={"measured_by": "aa11"})


def test_new_and_reshaped_tensors_count_as_changed_and_have_no_ratio():
    step = merged_step(MERGED, relative_change={"b": 0.5, "a": 0.5}, tensors_added=["head"])
    step = dataclasses.replace(step, record={**step.record, "touched": ["a", "b", "reshaped", "head"]})
    merge = assemble_merge(step, None)
    assert (merge.changed, merge.largest_change, merge.largest_change_tensor) == (4, 0.5, "a")
    only_new = assemble_merge(merged_step(MERGED, relative_change={}), None)
    assert (only_new.largest_change, only_new.largest_change_tensor) == (0.0, "")


def test_a_record_without_its_facts_is_refused():
    with pytest.raises(InvalidRequest, match="tensors_byte_identical"):
        assemble_merge(merged_step(MERGED, tensors_byte_identical="many"), None)


@dataclass(frozen=True)
class Conversion:
    request: ConversionRequest
    id: str = "7c1f0a5e2b9d4c36"
    requested_by: str = "local"
    started: float = 1_796_040_000.0


@dataclass(frozen=True)
class Desk:
    """What the report needs of the desk of an attempt."""

    conversion: Conversion
    store: ContentStore
    environment: Environment = ENVIRONMENT
    reused_from: str | None = None

    def now(self) -> float:
        return 1_796_040_009.0


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    store = ContentStore(str(tmp_path / "store"), scratch=tmp_path / "scratch")
    stored: list[Digest] = []
    for name in ("base", "style", "facts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
        stored.append(store.put_folder(tmp_path / name).digest)
    adapters = (AdapterRequest("style", stored[1], 0.7), AdapterRequest("facts", stored[2], 1 / 3))
    request = dataclasses.replace(MERGED.request(), base=stored[0], adapters=adapters)
    return Desk(Conversion(request), store)


def test_a_report_of_a_merge_alone_has_its_inputs_with_weights_and_no_warning_about_data(desk):
    measured = Measured(merge=MERGED.merge)
    policy = desk.conversion.request.policy
    report = assemble_report(desk, MODEL, [merged_step(MERGED)], measured, decide(policy, measured))
    assert [(entry.role, entry.weight, entry.size_bytes) for entry in report.inputs] == [
        ("base", None, 4),
        ("adapter style", 0.7, 5),
        ("adapter facts", 1 / 3, 5),
    ]
    assert (report.measured, report.warnings) == (measured, ())
    assert [stage.measured_by for stage in report.stages] == ["aa11"]
    assert report.seconds == 9.0
