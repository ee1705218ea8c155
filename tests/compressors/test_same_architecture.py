"""What cannot be merged is refused before anything is written, with the model, the tensor or field, and both values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from compressors.same_architecture import compare_configs
from compressors.stages import NamedSource
from modelpress.errors import DataLoss, InvalidModel, InvalidRecipe
from tests.compressors.stored_models import (
    BASE,
    METHODS,
    A,
    B,
    Tensors,
    Workbench,
    random_tensors,
    same,
    settings,
    weights_of,
)


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def refuse(bench: Workbench, match: str, model: Tensors, *, base: Tensors = BASE, **config: object) -> None:
    with pytest.raises(InvalidModel, match=match):
        bench.run(bench.model(base), NamedSource("a", bench.model(model, **config), 0.5))


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def test_models_that_do_not_fit_are_refused_by_name(bench: Workbench) -> None:
    wider = A | {"layers.0.weight": torch.zeros(8, 13)}
    refuse(bench, r"'layers.0.weight' has shape \[8, 13\] in model 'a' and \[8, 12\] in the base", wider)
    refuse(bench, r"model 'a' lacks tensor 'layers.0.norm.weight' of shape \[8\]", without(A, "layers.0.norm.weight"))
    refuse(bench, r"model 'a' has tensor 'layers.1.weight' of shape \[2\]", A | {"layers.1.weight": torch.zeros(2)})
    refuse(bench, "model_type 'gpt2' where the base has 'llama'", A, model_type="gpt2")
    refuse(bench, "model 'a': the model is quantized", A, quantization_config={"quant_method": "gptq"})


def test_a_tied_model_is_not_merged_with_an_untied_one(bench: Workbench) -> None:
    cure = "save that model with tie_word_embeddings false first"
    refuse(bench, rf"model 'a' lacks tensor 'lm_head.weight' of shape \[20, 8\].*{cure}", without(A, "lm_head.weight"))
    refuse(bench, f"has tensor 'lm_head.weight'.*{cure}", A, base=without(BASE, "lm_head.weight"))


def test_buffers_of_integers_must_be_equal(bench: Workbench) -> None:
    refuse(
        bench, "'position_ids' of dtype int64 is another one in model 'a'", A | {"position_ids": torch.zeros(5).long()}
    )
    refuse(bench, "in model 'a', of dtype int32", A | {"position_ids": torch.arange(5).int()})


def test_weights_that_need_scales_are_refused(bench: Workbench) -> None:
    quantized = A | {"embed.weight": A["embed.weight"].to(torch.float8_e4m3fn)}
    refuse(bench, "'embed.weight' of model 'a' has the quantized dtype float8_e4m3fn", quantized)


@pytest.mark.parametrize("method", METHODS)
def test_nan_and_infinity_are_refused(bench: Workbench, method: str) -> None:
    bad = A | {"embed.weight": torch.full((20, 8), math.inf)}
    for base, model, of in ((BASE, bad, "model 'a'"), (bad, A, "the base")):
        with pytest.raises(InvalidModel, match=f"'embed.weight' of {of} holds NaN or infinite values") as error:
            bench.merge(base, (model, 0.5), **settings(method))
        assert error.value.reason == "NON_FINITE"


@pytest.mark.parametrize("method", METHODS)
def test_a_merge_that_changes_nothing_fails(bench: Workbench, method: str) -> None:
    for output_dtype in ("stored", "bfloat16"):
        with pytest.raises(InvalidModel, match="the merge changes nothing"):
            bench.merge(BASE, (BASE, 0.5), output_dtype=output_dtype, **settings(method))


def test_a_change_that_is_rounded_away_fails(bench: Workbench) -> None:
    base = random_tensors(0, dtype=torch.bfloat16)

    with pytest.raises(InvalidModel, match="the merge changes nothing"):
        bench.merge(base, (random_tensors(1, dtype=torch.bfloat16), 1e-9))


def test_models_that_the_method_cannot_use_are_refused(bench: Workbench) -> None:
    base, a = bench.model(BASE), bench.model(A)
    refused: list[tuple[tuple[NamedSource, ...], dict[str, object], str]] = [
        ((), {}, "needs a model"),
        ((NamedSource("a", a),), {"models": ("b",)}, "'b' is not in the request; known: a"),
        ((NamedSource("a", a), NamedSource("b", a)), {"merge_method": "slerp"}, "2 are given"),
        ((NamedSource("a", a, 1.5),), {"merge_method": "slerp"}, "weight 1.5"),
    ]
    for models, arguments, match in refused:
        with pytest.raises(InvalidRecipe, match=match):
            bench.run(base, *models, **arguments)


def test_the_recipe_names_models_and_their_order(bench: Workbench) -> None:
    a, b = NamedSource("a", bench.model(A), 1.0), NamedSource("b", bench.model(B), 1.0)

    _, output = bench.run(bench.model(BASE), a, b, models=("b",))

    assert same(weights_of(output), B)


def test_damaged_weights_are_never_merged(bench: Workbench) -> None:
    model = bench.model(A)
    blob = next((bench.folder / "store").rglob(model.files["model.safetensors"].digest.hex))
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")

    with pytest.raises(DataLoss, match=r"model\.safetensors"):
        bench.run(bench.model(BASE), NamedSource("a", model, 0.5))


@pytest.mark.parametrize(
    ("base", "other", "match"),
    [
        ({"architectures": ["A"]}, {"architectures": ["B"]}, r"architectures \['B'\] where the base has \['A'\]"),
        ({"hidden_size": 8}, {"hidden_size": 16}, "hidden_size 16 where the base has 8"),
        ({"n_head": 2}, {"n_head": 4}, "n_head 4 where the base has 2"),
        (
            {"text_config": {"num_key_value_heads": 2}},
            {"text_config": {"num_key_value_heads": 1}},
            "text_config.num_key",
        ),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, "save both tied, or both untied"),
        (
            {"id2label": {"0": "no", "1": "yes"}},
            {"id2label": {"0": "yes", "1": "no"}},
            "id2label.0 'yes' where .* 'no'",
        ),
    ],
)
def test_configs_that_do_not_fit_are_refused_with_both_values(base, other, match: str) -> None:
    with pytest.raises(InvalidModel, match=match):
        compare_configs(base, other, name="a")


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ({"transformers_version": "5.0"}, {"transformers_version": "4.0", "_name_or_path": "x"}),
        ({"torch_dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"hidden_size": 8}, {"hidden_size": 8, "rope_scaling": None, "pruned_heads": {}}),
        ({"hidden_size": 8}, {"hidden_size": 8, "id2label": {"0": "LABEL_0"}}),
    ],
)
def test_what_says_nothing_about_the_model_is_passed_over(base, other) -> None:
    assert compare_configs(base, other, name="a") == ()


def test_a_long_list_of_other_values_is_cut() -> None:
    (warning,) = compare_configs({f"field_{i}": 1 for i in range(7)}, {f"field_{i}": 2 for i in range(7)}, name="a")

    assert warning.endswith("field_4 (2 there, 1 here) and 2 more")
