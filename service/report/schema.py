"""Write the JSON Schema of `report.json`, made from the types.

python -m service.report.schema docs/report.schema.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from modelpress.reports import SCHEMA_VERSION, Report


def report_schema() -> str:
    """The schema as a JSON document. Descriptions come from the fields' docstrings."""
    schema = Report.model_json_schema(mode="serialization")
    named = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:modelpress:report:v{SCHEMA_VERSION}",
        **schema,
    }
    return json.dumps(named, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(report_schema(), encoding="utf-8")
