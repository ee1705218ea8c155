"""Targets and what is ignored of them, by the names of a two-layer Llama."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from compressors import decoder_targets
from compressors.decoder_families import DECODERS
from compressors.decoder_targets import Targets, choose_targets
from modelpress.errors import InvalidRecipe
from modelpress.quantization_recipes import QuantizeWeights

LLAMA = DECODERS["llama"]
LINEARS = tuple(
    f"model.layers.{number}.{name}"
    for number in (0, 1)
    for name in (
        *(f"self_attn.{each}_proj" for each in "qkvo"),
        *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
    )
)
MLP = tuple(name for name in LINEARS if ".mlp." in name)


def choose(**fields: object) -> Targets:
    return choose_targets(QuantizeWeights(algorithm="rtn", **fields), LLAMA, layers=2)


def test_every_linear_layer_of_the_decoder_layers_is_the_default():
    assert choose() == Targets(LINEARS)


def test_what_is_not_targeted_stays():
    assert choose(targets=("re:.*mlp",)) == Targets(MLP)


def test_names_keep_the_models_order_whatever_theirs():
    assert choose(targets=(MLP[4], MLP[0])).quantized == (MLP[0], MLP[4])


def test_what_is_ignored_stays():
    assert choose(ignore=("lm_head", MLP[2], "re:model.layers.1")).quantized == tuple(
        name for name in LINEARS if name.startswith("model.layers.0") and name != MLP[2]
    )


def test_an_expression_matches_from_the_names_start():
    with pytest.raises(InvalidRecipe, match=r"targets: 're:mlp' matches no module"):
        choose(targets=("re:mlp",))


@pytest.mark.parametrize("field", ["targets", "ignore"])
def test_a_name_that_matches_nothing_is_refused_with_the_nearest_names(field: str):
    with pytest.raises(InvalidRecipe, match=rf"{field}: 'model.layers.0.mlp.up_prj' matches no .*layers.0.mlp.up_proj"):
        choose(**{field: ("model.layers.0.mlp.up_prj",)})


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.norm", "model.layers.0.input_layernorm"])
def test_a_target_outside_the_linear_layers_is_refused(name: str):
    with pytest.raises(InvalidRecipe, match=f"targets: '{name}' is no linear layer of the decoder layers"):
        choose(targets=("Linear", name), ignore=())


def test_an_expression_over_everything_takes_the_linear_layers_where_the_rest_is_ignored():
    ignore = ("lm_head", "re:.*norm", "model.embed_tokens")
    assert choose(targets=("re:.*",), ignore=ignore) == Targets(LINEARS)


def test_nothing_left_is_refused():
    with pytest.raises(InvalidRecipe, match="ignore leaves none"):
        choose(ignore=("re:model.layers",))


def test_an_expression_that_backtracks_for_years_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder_targets, "MATCH_TIMEOUT_S", 0.05)
    with pytest.raises(InvalidRecipe, match=r"targets: 're:.*' takes too long: write a simpler one"):
        choose(targets=(r"re:(.*)(.*)(.*)(.*)(.*)(.*)(.*)\1\2\3\4\5\6\7[^\w.]",))


@pytest.mark.parametrize("count", [1, 3, 9])
def test_all_expressions_together_have_one_limit_of_time(monkeypatch: pytest.MonkeyPatch, count: int):
    """Each clock reading is a second later: three are there for whatever number of expressions."""
    seconds = itertools.count()
    monkeypatch.setattr(decoder_targets, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(decoder_targets, "MATCH_TIMEOUT_S", 3.0)
    with pytest.raises(InvalidRecipe, match=r"targets: 're:.*' takes too long"):
        choose(targets=tuple(f"re:model.{'.' * place}" for place in range(count)))
    assert next(seconds) == 4


@pytest.mark.parametrize("field", ["targets", "ignore"])
@pytest.mark.parametrize("names", [("n" * 257,), tuple(f"n{place}" for place in range(257))], ids=["long", "many"])
def test_lists_of_names_and_names_are_bounded(field: str, names: tuple[str, ...]):
    with pytest.raises(ValidationError, match="at most 256"):
        QuantizeWeights(**{field: names})
