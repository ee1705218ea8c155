"""Inputs by role: nothing is made before it is asked for."""

from __future__ import annotations

import pytest

from modelpress.digests import digest_bytes
from service.workers.inputs import Inputs

DIGESTS = {"model": digest_bytes(b"model"), "train": digest_bytes(b"train")}


def test_only_what_is_asked_for_is_made():
    made = []
    inputs = Inputs(DIGESTS, lambda digest: made.append(digest) or digest.hex)
    assert "model" in inputs and "teacher" not in inputs
    assert (list(inputs), len(inputs), inputs.get("teacher")) == (["model", "train"], 2, None)
    assert made == []
    assert inputs["model"] == digest_bytes(b"model").hex
    assert made == [digest_bytes(b"model")]
    with pytest.raises(KeyError):
        inputs["teacher"]
