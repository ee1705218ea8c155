"""Parity compares torch's stored logits with the export's own, row for row."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from evaluators.parity import compare_logits, measure_parity
from evaluators.runtimes import Resources
from modelpress.errors import DataLoss, InvalidModel


def _reference(folder, table, **changes):
    """Forty rows, the odd ones padded, with the logits of the table's mean."""
    ids = np.random.default_rng(3).integers(4, len(table), size=(40, 6))
    mask = np.ones_like(ids)
    mask[1::2, 3:] = 0
    logits = (table[ids] * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    tensors = {"input_ids": ids, "attention_mask": mask, "logits": logits.astype(np.float32), **changes}
    folder.mkdir()
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "parity.safetensors")
    return folder


def test_an_exact_export_has_no_difference(tmp_path, table, write_model):
    reference = _reference(tmp_path / "r", table)
    report = measure_parity(write_model(tmp_path / "m", table), reference=reference, resources=Resources())
    assert report.max_logit_difference < 1e-6
    assert (report.label_changes, report.n) == (0, 40)


def test_a_lost_attention_mask_shows(tmp_path, table, write_model):
    reference = _reference(tmp_path / "r", table, attention_mask=np.ones((40, 6), dtype=np.int64))
    report = measure_parity(write_model(tmp_path / "m", table), reference=reference, resources=Resources())
    assert report.max_logit_difference > 0.1


def test_differences_are_absolute_and_changes_are_rows():
    expected, found = np.float32([[0, 1], [2, 0], [0, 0.5]]), np.float32([[0, 1], [0, 1], [0, 1]])
    report = compare_logits(expected, found)
    assert (report.max_logit_difference, report.label_changes, report.n) == (2.0, 1, 3)
    assert report.mean_logit_difference == pytest.approx(3.5 / 6)


def test_logits_that_are_no_numbers_are_refused():
    with pytest.raises(InvalidModel, match="NaN"):
        compare_logits(np.float32([[0, 1]]), np.float32([[0, np.nan]]))


def test_logits_of_another_width_are_refused():
    with pytest.raises(InvalidModel, match="shape"):
        compare_logits(np.float32([[0, 1]]), np.float32([[0, 1, 2]]))


def test_a_reference_without_logits_or_file_is_data_loss(tmp_path, table, write_model):
    model = write_model(tmp_path / "m", table)
    with pytest.raises(DataLoss, match="logits"):
        measure_parity(model, reference=_reference(tmp_path / "r", table, logits=None), resources=Resources())
    with pytest.raises(DataLoss, match="cannot be read"):
        measure_parity(model, reference=tmp_path, resources=Resources())
