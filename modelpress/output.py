"""The output folder of a finished conversion: its file names, for the service that writes it and the verifier.

model/               the candidate in its target format
report.json          every figure that was measured
report.html          the same for people
recipe.yaml  policy.yaml  evaluation.yaml      as sent, byte for byte
reproduction.json    what is needed to run it again
model.sig            OpenSSF Model Signing bundle over the folder
approval.dsse.json   the verdict, an in-toto statement in a DSSE envelope
"""

from __future__ import annotations

MODEL = "model"
REPORT = "report.json"
REPORT_PAGE = "report.html"
RECIPE = "recipe.yaml"
POLICY = "policy.yaml"
EVALUATION = "evaluation.yaml"
REPRODUCTION = "reproduction.json"

MODEL_SIGNATURE = "model.sig"
APPROVAL = "approval.dsse.json"
PROVENANCE = "provenance.dsse.json"

DOCUMENTS = (REPORT, REPORT_PAGE, RECIPE, POLICY, EVALUATION, REPRODUCTION)
"""Files beside `model/` that the approval binds, each by its digest."""

SIGNED_STATEMENTS = (MODEL_SIGNATURE, APPROVAL, PROVENANCE)
"""Exactly what the model signature leaves out: each carries a signature of its own."""

APPROVAL_EXPLAINED = "docs/approval.md"
"""Where modelpress's own documentation says what APPROVED means and does not mean."""
