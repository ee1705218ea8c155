"""What a language model's conversion will need is the documented formulas."""

from __future__ import annotations

from typing import Any

import pytest

from modelpress.digests import digest_bytes
from modelpress.errors import OverLimit
from service.estimates import EVIDENCE_BYTES, RUNTIME_BYTES, candidate_size, memory_need, scratch_need, storage_need
from service.preflight import check_scratch
from service.requests import AdapterRequest, ConversionRequest

V, H, L, F = 100, 64, 2, 128
ATTENTION = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
FEED_FORWARD = {"gate_proj": (F, H), "up_proj": (F, H), "down_proj": (H, F)}
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * F * H + 2 * H
PARAMETERS = V * H + L * LAYER + H
MODEL = 4 * PARAMETERS
RTN = "{method: quantize_weights, algorithm: rtn, group_size: 32%s}"
COMPRESSED = "{method: export, format: compressed-tensors}"


def base(dtype: str = "F32") -> dict[str, Any]:
    tensors = {"model.embed_tokens.weight": [V, H], "model.norm.weight": [H]}
    for layer in (f"model.layers.{number}" for number in range(L)):
        tensors |= {f"{layer}.self_attn.{name}.weight": list(shape) for name, shape in ATTENTION.items()}
        tensors |= {f"{layer}.mlp.{name}.weight": list(shape) for name, shape in FEED_FORWARD.items()}
        tensors |= {f"{layer}.{norm}.weight": [H] for norm in ("input_layernorm", "post_attention_layernorm")}
    width = {"F32": 4, "BF16": 2}[dtype]
    sizes = {"hidden": H, "layers": L, "heads": 4, "head_dim": 16, "ffn": F, "vocabulary": V}
    facts = {"tensors": tensors, "dtype": dtype, "other_dtypes": {}, "model_type": "llama", "quantization": None}
    return {**facts, **sizes, "parameters": PARAMETERS, "weight_bytes": width * PARAMETERS}


def request(*stages: str, window: int = 16, **fields: Any) -> ConversionRequest:
    return ConversionRequest(
        base=digest_bytes(b"base"),
        evaluation_dataset=digest_bytes(b"rows"),
        recipe_yaml=f"stages: [{', '.join(stages)}]",
        policy_yaml="gates: {kl_mean: {max: 1}}",
        evaluation_yaml=f"{{task: text-generation, window: {window}, batch_size: 2}}",
        **fields,
    )


def plain(*stages: str) -> ConversionRequest:
    return request(*(stage.replace("%s", "") for stage in stages))


def test_two_models_are_open_while_they_are_compared_and_logits_come_on_top():
    stage = RTN.replace("%s", ", sequence_length: 16")
    need = memory_need(request(stage, COMPRESSED, window=8192), base() | {"parameters": 4 * PARAMETERS})
    logits = 2 * 2 * 8192 * V * 4 + 4 * 16 * V * 8
    assert need.certain_bytes == RUNTIME_BYTES + 2 * 4 * MODEL
    assert need.peak_bytes == RUNTIME_BYTES + 2 * 4 * MODEL + MODEL + logits
    assert "smaller window" in need.cure


def test_a_stage_holds_one_layer_however_many_there_are():
    wide = base() | {"parameters": 1}
    need = memory_need(request(RTN.replace("%s", ", sequence_length: 16"), COMPRESSED), wide)
    layer = 3 * 4 * LAYER + 2 * 4 * F * F
    assert need.certain_bytes == RUNTIME_BYTES + layer
    assert need.peak_bytes == RUNTIME_BYTES + layer + 4 * 4096 * (8 * H + 2 * F + 4 * 16)


def test_an_export_to_onnx_holds_the_model_three_times():
    assert memory_need(plain("{method: export}"), base()).certain_bytes == RUNTIME_BYTES + 3 * MODEL


def test_qat_holds_two_models_what_it_trains_and_the_activations_of_every_layer():
    qat = RTN.replace("rtn", "qat").replace("%s", ", sequence_length: 32")
    trained = request(qat, COMPRESSED, train=digest_bytes(b"train"))
    need, weights = memory_need(trained, base()), L * (LAYER - 2 * H)
    held = 4 * (2 * PARAMETERS + 5 * weights)
    assert need.certain_bytes == RUNTIME_BYTES + held
    activations, logits = 4 * 32 * L * (8 * H + 2 * F + 4 * 32), 4 * 4 * 32 * V
    assert need.peak_bytes == RUNTIME_BYTES + held + 10 * weights + 2 * activations + logits


def test_a_trained_model_s_checkpoint_holds_its_weights_and_two_moments():
    rounded, trained = (
        request(RTN.replace("rtn", algorithm).replace("%s", ""), COMPRESSED, train=digest_bytes(b"train"))
        for algorithm in ("rtn", "qat")
    )
    assert storage_need(trained, [], base()) - storage_need(rounded, [], base()) == 3 * 4 * L * (LAYER - 2 * H)


@pytest.mark.parametrize(("algorithm", "files"), [("gptq", 2), ("signround", 3), ("rtn", 2)])
def test_what_lies_between_the_layers_is_on_disk_while_a_stage_is_calibrated(algorithm: str, files: int):
    stage = RTN.replace("rtn", algorithm).replace("%s", ", calibration_samples: 5, sequence_length: 16")
    asked = request(stage, COMPRESSED, train=digest_bytes(b"train"))
    assert scratch_need(asked, base()) == files * 5 * 16 * H * 4
    untrained = storage_need(plain(RTN, COMPRESSED), [], base())
    assert storage_need(asked, [], base()) == untrained + scratch_need(asked, base())
    assert scratch_need(request("{method: export}", train=digest_bytes(b"train")), base()) == 0


def test_activations_that_do_not_fit_on_the_disk_are_refused():
    stage = RTN.replace("rtn", "gptq").replace("%s", ", calibration_samples: 100000, sequence_length: 8192")
    asked = request(stage, COMPRESSED, train=digest_bytes(b"train"))
    need = scratch_need(asked, base())
    check_scratch(asked, base(), free_bytes=need)
    with pytest.raises(OverLimit, match=f"take {need} bytes of this server's disk, and {need - 1} are free: lower"):
        check_scratch(asked, base(), free_bytes=need - 1)


@pytest.mark.parametrize(("dtype", "width"), [("F32", 4), ("BF16", 2)])
def test_the_candidate_is_codes_scales_and_what_stays(dtype: str, width: int):
    weights = L * (LAYER - 2 * H)
    kept = width * (PARAMETERS - weights)
    size = candidate_size(plain(RTN, COMPRESSED), base(dtype))
    header = 110 * (3 * 7 * L + 2 + 2 * L)
    assert size == pytest.approx(kept + weights // 2 + width * weights // 32 + 16 * 7 * L + header, rel=0.03)


def test_formats_differ_by_what_they_store_beside_the_codes():
    float16 = RTN.replace("%s", ", scale_dtype: float16")
    packed = candidate_size(plain(float16, COMPRESSED), base())
    gptq = candidate_size(plain(float16, "{method: export, format: gptq}"), base())
    zeros, indices = L * (LAYER - 2 * H) // 32 // 2, 4 * L * (6 * H + F)
    assert gptq - packed == pytest.approx(zeros + indices, abs=120 * 7 * L)
    assert candidate_size(plain("{method: export}"), base("BF16")) >= MODEL


def test_the_store_holds_inputs_merge_quantized_model_and_candidate():
    quantized = candidate_size(plain(RTN, COMPRESSED), base())
    assert storage_need(plain(RTN, COMPRESSED), [7], base()) == 7 + 2 * quantized + EVIDENCE_BYTES
    merged = request(
        "{method: merge_lora}",
        RTN.replace("%s", ""),
        COMPRESSED,
        adapters=(AdapterRequest("a", digest_bytes(b"a")),),
    )
    assert storage_need(merged, [7], base()) == 7 + MODEL + 2 * quantized + EVIDENCE_BYTES
