"""What a merge changed, from the record of its stage: for the service's report, and for verification again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from modelpress.documents import Document, read_value
from modelpress.errors import InvalidRequest, VerificationFailed
from modelpress.recipes import MERGES
from modelpress.reports import Report


class Changes(Document):
    """The facts of a merge stage's record that a MergeReport repeats, under the record's own names."""

    touched: tuple[str, ...]
    """Tensors whose bytes changed."""
    relative_change: dict[str, float]
    """|W' - W| / |W| (Frobenius; |W'| where |W| is 0) of those that the base has in their shape."""
    tensors_added: tuple[str, ...] = ()
    """Tensors that the base does not have."""
    tensors_byte_identical: int = Field(ge=0)

    def as_report(self) -> dict[str, Any]:
        """The fields of a MergeReport that come from here. Of equal changes the first name counts."""
        largest = max(sorted(self.relative_change), key=self.relative_change.__getitem__, default="")
        return {
            "changed": len({*self.touched, *self.tensors_added}),
            "byte_identical": self.tensors_byte_identical,
            "largest_change": self.relative_change.get(largest, 0.0),
            "largest_change_tensor": largest,
        }


def read_changes(touched: Sequence[str], details: Mapping[str, Any]) -> Changes:
    """Both are a StageRecord's. InvalidRequest names the fact that is missing or of another type."""
    noted = {name: details[name] for name in Changes.model_fields if name in details}
    return read_value(Changes, {**noted, "touched": touched}, InvalidRequest)


def check_changes(report: Report) -> None:
    """Raise VerificationFailed where the merge's figures are not those of the stage that merged."""
    if report.merge is None:
        return
    stage = next((stage for stage in report.stages if stage.method in MERGES), None)
    if stage is None:
        raise VerificationFailed("the report has figures of a merge and no stage that merges")
    try:
        noted = read_changes(stage.touched, stage.details).as_report()
    except InvalidRequest as fault:
        raise VerificationFailed(f"the record of {stage.method}: {fault.message}") from None
    for name, value in noted.items():
        reported = getattr(report.merge, name)
        if reported != value:
            raise VerificationFailed(
                f"merge.{name} is {reported} in the report, but the record of {stage.method} gives {value}",
                reason="CONTRADICTORY_REPORT",
            )
