"""The published schema is the types', and every report that is written validates against it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from modelpress.digests import digest_bytes
from modelpress.reports import Report
from service.publication import report_json
from service.report.schema import report_schema
from tests.evidence import samples
from tests.evidence.conftest import CASES

SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"


def test_the_published_schema_is_what_the_types_say():
    assert SCHEMA.read_text() == report_schema(), "run: python -m service.report.schema docs/report.schema.json"


@pytest.mark.parametrize("name", list(CASES))
def test_every_written_report_validates_and_reads_back_equal(name):
    report = CASES[name].report(digest_bytes(b"model"))
    data = report_json(report)
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(data), schema)
    assert Report.model_validate_json(data) == report


def test_the_schema_refuses_what_the_types_refuse():
    schema = json.loads(SCHEMA.read_text())
    value = json.loads(report_json(samples.sample_report(samples.APPROVED, digest_bytes(b"model"))))
    for change in ({"unknown": 1}, {"seconds": -1}, {"seed": "seven"}, {"decision": {"verdict": "MAYBE"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**value, **change}, schema)


def test_fields_stand_in_their_declared_order():
    value = json.loads(report_json(samples.sample_report(samples.APPROVED, digest_bytes(b"model"))))
    assert list(value) == list(Report.model_fields)
