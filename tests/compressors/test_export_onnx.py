from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from safetensors.numpy import load_file

from compressors import export_onnx, quantize
from compressors.embedding_tables import quantize_rows
from compressors.folders import companion_files, load_model
from compressors.int8_quantizer import WEIGHT_CODE_MAX
from compressors.quantized_folder import FILES
from compressors.stages import Data, Job, SilentMonitor
from modelpress.recipes import Export, Quantize
from modelpress.reports import StageRecord

LINEARS = 14
POSITIONS = 24


@dataclass(frozen=True)
class Exported:
    source: Path
    folder: Path
    evidence: Path
    record: StageRecord
    session: Any

    @property
    def graph(self) -> onnx.GraphProto:
        return onnx.load(self.folder / "model.onnx").graph

    @property
    def constants(self) -> Mapping[str, np.ndarray]:
        return {tensor.name: numpy_helper.to_array(tensor) for tensor in self.graph.initializer}

    def logits(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (logits,) = self.session.run(None, feeds)
        return logits


def export(source: Path, root: Path, data: Data | None) -> Exported:
    job = Job(model=source, output=root / "exported", seed=3, evidence=root / "evidence", data=data)
    record = export_onnx.run(Export(), job, SilentMonitor())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(job.output / "model.onnx", options, providers=["CPUExecutionProvider"])
    return Exported(source, job.output, root / "evidence", record, session)


@pytest.fixture(scope="module")
def int8(bert: Path, data: Data, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    root = tmp_path_factory.mktemp("int8")
    job = Job(model=bert, output=root / "quantized", seed=3, data=data)
    quantize.run(Quantize(scheme="int8_ptq", calibration_examples=64), job, SilentMonitor())
    return export(job.output, root, data)


@pytest.fixture(scope="module")
def fp32(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(bert, tmp_path_factory.mktemp("fp32"), None)


def batch(rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(rows * 100 + tokens).integers(4, 44, (rows, tokens))
    mask = np.ones_like(ids)
    mask[-1, (tokens + 1) // 2 :] = 0
    return ids, mask


def test_every_quantized_layer_runs_in_one_integer_kernel(int8: Exported) -> None:
    assert int8.record.details["integer_operators"] == {"QGemm": LINEARS}
    assert int8.record.warnings == ()
    assert not [name for name in int8.record.kept_float if "Gemm" in name]


def test_what_stays_float_is_named_by_type(int8: Exported) -> None:
    kinds = {name.rsplit("(", 1)[1].rstrip(")") for name in int8.record.kept_float}
    assert {"LayerNormalization", "Softmax", "Tanh"} <= kinds
    assert not kinds & {"QGemm", "Reshape", "QuantizeLinear"}


def test_no_node_dequantizes_a_whole_table(int8: Exported) -> None:
    tables = {name for name, value in int8.constants.items() if name.endswith(".codes") and "embeddings" in name}
    readers = {name: {n.op_type for n in int8.graph.node if name in n.input} for name in tables}
    assert len(tables) == 3 and set(map(frozenset, readers.values())) == {frozenset({"Gather"})}
    assert all(int8.constants[name].dtype == np.int8 for name in tables)


def test_no_float_copy_of_a_table_or_weight_ships(int8: Exported) -> None:
    largest = max(value.size for value in int8.constants.values() if value.dtype == np.float32)
    assert largest <= 44  # the scales of the words' rows


def test_weight_codes_cannot_saturate_16_bits(int8: Exported) -> None:
    dequantized = {node.input[0] for node in int8.graph.node if node.op_type == "DequantizeLinear"}
    weights = [int8.constants[name] for name in dequantized if name in int8.constants]
    int8_weights = [value for value in weights if value.dtype == np.int8]
    assert len(int8_weights) == LINEARS
    assert all(np.abs(value.astype(int)).max() <= WEIGHT_CODE_MAX for value in int8_weights)


def test_only_standard_operators_are_used(int8: Exported, fp32: Exported) -> None:
    for exported in (int8, fp32):
        assert {node.domain for node in exported.graph.node} == {""}
        model = onnx.load(exported.folder / "model.onnx")
        assert {opset.domain: opset.version for opset in model.opset_import}[""] == 20


def test_looked_up_rows_are_those_of_the_table(int8: Exported) -> None:
    table = quantize_rows(load_model(int8.source).bert.embeddings.word_embeddings.weight.detach())
    name = next(name for name in int8.constants if "word_embeddings" in name and name.endswith(".codes"))
    assert np.array_equal(int8.constants[name], table.codes.numpy())


def test_the_runtime_gives_what_torch_gives(int8: Exported, fp32: Exported) -> None:
    for exported, bound in ((int8, 0.05), (fp32, 1e-5)):
        parity = load_file(exported.evidence / "parity.safetensors")
        found = exported.logits(parity["input_ids"], parity["attention_mask"])
        assert (parity["attention_mask"] == 0).any() and len(found) == exported.record.details["parity_rows"]
        assert np.abs(found - parity["logits"]).max() <= bound


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 5), (3, 8), (7, 1), (2, POSITIONS)])
def test_batch_and_length_are_free(fp32: Exported, rows: int, tokens: int) -> None:
    ids, mask = batch(rows, tokens)
    with torch.no_grad():
        expected = load_model(fp32.source)(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
    np.testing.assert_allclose(fp32.logits(ids, mask), expected.numpy(), atol=1e-5)


def test_one_token_too_many_is_an_error(int8: Exported, fp32: Exported) -> None:
    for exported in (int8, fp32):
        with pytest.raises(Exception, match=r"Add|broadcast"):
            exported.logits(*batch(1, POSITIONS + 1))


def test_masked_tokens_change_nothing(int8: Exported) -> None:
    ids, mask = batch(2, 8)
    other = np.where(mask == 0, 5, ids)
    np.testing.assert_allclose(int8.logits(other, mask)[-1], int8.logits(ids, mask)[-1], atol=1e-6)


def test_the_file_tells_nothing_of_the_machine(int8: Exported) -> None:
    content = (int8.folder / "model.onnx").read_bytes()
    assert b"/" + b"work" not in content and b"site-packages" not in content and b".py" not in content
    assert not int8.graph.doc_string and not any(n.doc_string or n.metadata_props for n in int8.graph.node)


def test_companions_ship_and_the_quantizer_state_does_not(int8: Exported) -> None:
    names = set(companion_files(int8.source)) - set(FILES)
    shipped = {file.relative_to(int8.folder).as_posix() for file in int8.folder.rglob("*") if file.is_file()}
    assert shipped == names | {"model.onnx", "config.json"}
    assert all(
        (int8.folder / name).read_bytes() == (int8.source / name).read_bytes() for name in shipped - {"model.onnx"}
    )


def test_large_weights_go_to_a_relative_file_beside_the_model(fp32: Exported, tmp_path: Path) -> None:
    file = export_onnx.save(ir.load(fp32.folder / "model.onnx"), tmp_path / "a", max_file_bytes=1000)
    locations = {
        entry.value
        for tensor in onnx.load(file, load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert locations == {"model.onnx.data"} and (tmp_path / "a/model.onnx.data").is_file()
    (tmp_path / "a").rename(tmp_path / "moved")
    onnxruntime.InferenceSession(tmp_path / "moved/model.onnx", providers=["CPUExecutionProvider"])
