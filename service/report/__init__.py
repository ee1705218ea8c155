"""The report: from step results to `report.json` and to the page for people."""
