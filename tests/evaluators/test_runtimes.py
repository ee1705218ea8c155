"""A stored model runs with exactly the device, inputs and files that it should, or is refused."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from evaluators.onnx_files import external_files, read_onnx
from evaluators.runtimes import Resources, label_names, open_onnx
from modelpress.errors import FailedPrecondition, InvalidModel, InvalidRequest


def _feeds(ids, mask=None):
    ids_NT = np.array(ids, dtype=np.int64)
    mask_NT = np.ones_like(ids_NT) if mask is None else np.array(mask, dtype=np.int64)
    return {"input_ids": ids_NT, "attention_mask": mask_NT, "token_type_ids": np.zeros_like(ids_NT)}


@pytest.mark.parametrize("integer", [TensorProto.INT64, TensorProto.INT32])
def test_the_inputs_that_the_model_asks_for_are_fed_in_its_own_type(tmp_path, table, write_model, integer):
    model = open_onnx(write_model(tmp_path / "m", table, integer=integer), Resources())
    logits = model.logits(_feeds([[4, 5, 0], [6, 0, 0]], [[1, 1, 0], [1, 0, 0]]))
    np.testing.assert_allclose(logits, [(table[4] + table[5]) / 2, table[6]], rtol=1e-6)
    assert logits.dtype == np.float32


def test_the_runtime_names_library_version_and_provider(tmp_path, table, write_model):
    model = open_onnx(write_model(tmp_path / "m", table), Resources())
    assert model.runtime == f"onnxruntime {onnxruntime.__version__} CPUExecutionProvider"


def test_a_device_that_is_not_there_is_an_error_and_never_a_fallback(tmp_path, table, write_model):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(FailedPrecondition, match="no CUDAExecutionProvider"):
        open_onnx(write_model(tmp_path / "m", table), Resources(device="cuda"))


@pytest.mark.parametrize(("changes", "words"), [({"device": "tpu"}, "cpu, cuda"), ({"threads": 0}, "at least 1")])
def test_unknown_resources_are_refused(changes, words):
    with pytest.raises(InvalidRequest, match=words):
        Resources(**changes)


@pytest.mark.parametrize(
    "id2label", [None, {}, {"0": "a"}, {"0": "a", "1": "a"}, {"0": "a", "2": "b"}, {"0": "a", "1": 3}, ["a", "b"]]
)
def test_labels_without_a_name_of_their_own_are_refused(id2label):
    with pytest.raises(InvalidModel, match="id2label"):
        label_names({"id2label": id2label})


def test_labels_come_in_the_order_of_their_ids():
    assert label_names({"id2label": {"10": "k", **{str(i): str(i) for i in range(10)}}})[-1] == "k"


def test_a_folder_without_model_or_config_is_refused(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    (folder / "config.json").unlink()
    with pytest.raises(InvalidModel, match=r"config\.json"):
        open_onnx(folder, Resources())
    (folder / "model.onnx").unlink()
    with pytest.raises(InvalidModel, match="export it first"):
        open_onnx(folder, Resources())


@pytest.mark.parametrize("content", [b"\xff" * 64, b"<html>not found</html>", b""])
def test_a_file_that_is_no_onnx_is_refused_without_naming_its_place(tmp_path, table, write_model, content):
    folder = write_model(tmp_path / "m", table)
    (folder / "model.onnx").write_bytes(content)
    with pytest.raises(InvalidModel) as caught:
        open_onnx(folder, Resources())
    assert str(tmp_path) not in caught.value.message


def test_inputs_that_no_text_has_are_refused(tmp_path, table, write_model, save_onnx):
    folder = write_model(tmp_path / "m", table)
    pixels = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["N", 2])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2])
    save_onnx(
        helper.make_graph([helper.make_node("Identity", ["pixel_values"], ["logits"])], "g", [pixels], [logits]), folder
    )
    with pytest.raises(InvalidModel, match="pixel_values"):
        open_onnx(folder, Resources())


def test_a_frozen_dimension_is_named_by_the_shape_that_failed(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    proto = onnx.load(folder / "model.onnx")
    for value in proto.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 3
    onnx.save(proto, folder / "model.onnx")
    model = open_onnx(folder, Resources())
    assert model.logits(_feeds([[4, 5, 6]])).shape == (1, 2)
    with pytest.raises(InvalidModel, match="1 x 2 tokens"):
        model.logits(_feeds([[4, 5]]))


def _external(folder, table, facts: dict[str, str]):
    """Move the table's bytes out of model.onnx and say that they lie where `facts` says."""
    proto = onnx.load(folder / "model.onnx")
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == "table")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in facts.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder


def test_external_data_beside_the_model_is_used(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    (folder / "weights.bin").write_bytes(table.tobytes())
    _external(folder, table, {"location": "weights.bin", "offset": "0", "length": str(table.nbytes)})
    assert external_files(folder, read_onnx(folder)) == (folder / "weights.bin",)
    np.testing.assert_allclose(open_onnx(folder, Resources()).logits(_feeds([[9]])), [table[9]])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"location": "../secret.bin"}, "leaves the model's folder"),
        ({"location": "sub/../../secret.bin"}, "leaves the model's folder"),
        ({"location": "/etc/hostname"}, "leaves the model's folder"),
        ({"location": ""}, "leaves the model's folder"),
        ({"location": "link.bin"}, "is a link"),
        ({"location": "linked/secret.bin"}, "is a link"),
        ({"location": "gone.bin"}, "is missing"),
        ({"location": "short.bin", "length": "999"}, "shorter"),
        ({"location": "short.bin", "offset": "1000000000000"}, "shorter"),
        ({"location": "short.bin", "offset": "-5"}, "shorter"),
        ({"location": "short.bin", "length": "all"}, "no number"),
    ],
)
def test_external_data_that_is_not_whole_and_inside_the_folder_is_refused(tmp_path, table, write_model, facts, words):
    (tmp_path / "secret.bin").write_bytes(b"SECRET" * 1000)
    folder = write_model(tmp_path / "m", table)
    (folder / "short.bin").write_bytes(b"12345")
    (folder / "link.bin").symlink_to("../secret.bin")
    (folder / "linked").symlink_to(tmp_path, target_is_directory=True)
    _external(folder, table, facts)
    with pytest.raises(InvalidModel, match=words) as caught:
        open_onnx(folder, Resources())
    assert "external data" in caught.value.message
    assert "SECRET" not in caught.value.message


def test_external_data_in_a_subgraph_is_checked_too(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    proto = onnx.load(folder / "model.onnx")
    outside = TensorProto(name="outside", data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL, dims=[1])
    outside.external_data.add(key="location", value="../secret.bin")
    inner = helper.make_graph([], "inner", [], [], [outside])
    proto.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InvalidModel, match="outside"):
        read_onnx(folder)


def test_external_data_in_a_constant_is_checked_too(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    proto = onnx.load(folder / "model.onnx")
    constant = numpy_helper.from_array(table, "constant")
    constant.ClearField("raw_data")
    constant.data_location = TensorProto.EXTERNAL
    constant.external_data.add(key="location", value="/etc/hostname")
    proto.graph.node.append(helper.make_node("Constant", [], ["c"], value=constant))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InvalidModel, match="/etc/hostname"):
        read_onnx(folder)


def test_two_logit_outputs_without_a_name_are_refused(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    proto = onnx.load(folder / "model.onnx")
    proto.graph.output[0].name = "sum"
    proto.graph.output.append(helper.make_tensor_value_info("count", TensorProto.FLOAT, None))
    onnx.save(proto, folder / "model.onnx")
    with pytest.raises(InvalidModel, match="named `logits`"):
        open_onnx(folder, Resources())


def test_config_that_is_no_object_is_refused(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    (folder / "config.json").write_text(json.dumps(["id2label"]))
    with pytest.raises(InvalidModel, match="no JSON object"):
        open_onnx(folder, Resources())


def test_segment_ids_are_fed_where_the_model_asks_for_them(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    proto = onnx.load(folder / "model.onnx")
    proto.graph.node[-1].output[0] = "mean"
    proto.graph.node.extend(
        [
            helper.make_node("Cast", ["token_type_ids"], ["types"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["types", "tokens"], ["second"], keepdims=1),
            helper.make_node("Add", ["mean", "second"], ["logits"]),
        ]
    )
    proto.graph.input.insert(0, helper.make_tensor_value_info("token_type_ids", TensorProto.INT64, ["N", "T"]))
    onnx.save(proto, folder / "model.onnx")
    feeds = {**_feeds([[4, 5]]), "token_type_ids": np.array([[0, 1]])}
    found = open_onnx(folder, Resources()).logits(feeds)
    np.testing.assert_allclose(found, [(table[4] + table[5]) / 2 + 1], rtol=1e-6)


@pytest.mark.gpu
def test_cuda_gives_the_logits_of_the_cpu(tmp_path, table, write_model):
    folder = write_model(tmp_path / "m", table)
    on_cuda, on_cpu = (open_onnx(folder, Resources(device=device)) for device in ("cuda", "cpu"))
    assert on_cuda.runtime.endswith("CUDAExecutionProvider")
    np.testing.assert_allclose(on_cuda.logits(_feeds([[4, 5]])), on_cpu.logits(_feeds([[4, 5]])), rtol=1e-5)
