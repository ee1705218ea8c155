"""A request is checked before anything is sent, and the server reads from the wire what the client meant."""

from pathlib import Path

import pytest

from modelpress import wire
from modelpress.digests import Digest
from modelpress.errors import InvalidPolicy, InvalidRecipe, InvalidRequest
from modelpress.requests import AdapterInput, ConversionRequest, Documents, Limits, ModelInput
from service.edge.conversion_requests import request_from_proto

POLICY = "gates:\n  size: {max_ratio: 0.3}\n"
EXPORT = "stages:\n  - method: export\n"
MERGE = "stages:\n  - method: merge_lora\n  - method: export\n"
ONLY_MERGE = "stages: [{method: merge_lora}, {method: export, format: safetensors}]"
MODELS = "stages: [{method: merge_models%s}, {method: export, format: safetensors}]"
SLERP = MODELS % ", merge_method: slerp"
CHANGE = "gates:\n  merge_change: {max: 0.5}\n"
GPTQ = "stages: [{method: quantize_weights}, {method: export, format: compressed-tensors}]"
RTN = GPTQ.replace("}", ", algorithm: rtn}", 1)
RECOVER = "stages:\n  - method: prune\n  - method: recover\n  - method: export\n"


def artifact(number):
    return f"artifacts/sha256:{number:064x}"


def request(recipe=EXPORT, **changes):
    values = {"base": artifact(1), "evaluation": artifact(2)} | changes
    return ConversionRequest(Documents(recipe=recipe, policy=POLICY), **values)


def decoder(recipe=GPTQ, written="", **changes):
    """A request for a language model; `written` is its evaluation document."""
    values = {"base": artifact(1), "evaluation": artifact(2)} | changes
    return ConversionRequest(Documents(recipe=recipe, policy=POLICY, evaluation=written), **values)


def merge_only(recipe=ONLY_MERGE, policy=CHANGE, written="", **changes):
    """A request that only merges; `written` is its evaluation document."""
    values = {"base": artifact(1), "adapters": ()} | changes
    if recipe == ONLY_MERGE:
        values["adapters"] = changes.get("adapters", (AdapterInput("a", artifact(3)),))
    return ConversionRequest(Documents(recipe=recipe, policy=policy, evaluation=written), **values)


def models(*weights):
    return tuple(
        ModelInput(name, artifact(10 + i), weight) for i, (name, weight) in enumerate(zip("abc", weights, strict=False))
    )


def test_every_field_reaches_the_server():
    sent = request(
        MERGE,
        adapters=(AdapterInput("a", artifact(3), 0.5), AdapterInput("b", artifact(4))),
        train=artifact(5),
        validation=artifact(6),
        probes=artifact(7),
        limits=Limits(queue_timeout_s=1.5, run_timeout_s=7200.0, memory_limit_bytes=1 << 30),
        labels={"owner": "ml"},
        seed=7,
        priority=-3,
    )
    read = request_from_proto(wire.request_to_wire(sent))
    assert [(a.name, str(a.artifact)[-1], a.weight) for a in read.adapters] == [("a", "3", 0.5), ("b", "4", 1.0)]
    names = (read.base, read.evaluation_dataset, read.train, read.validation, read.probes)
    assert names == tuple(Digest(f"sha256:{n:064x}") for n in (1, 2, 5, 6, 7))
    limits = read.limits
    assert (limits.queue_timeout_s, limits.run_timeout_s, limits.memory_limit_bytes) == (1.5, 7200.0, 1 << 30)
    assert (read.recipe_yaml, read.policy_yaml, read.evaluation_yaml) == (MERGE, POLICY, "")
    assert (read.labels, read.seed, read.priority) == ({"owner": "ml"}, 7, -3)


def test_an_empty_evaluation_is_of_the_task_that_the_recipe_is_for():
    read = request_from_proto(wire.request_to_wire(decoder(RTN)))
    assert (read.evaluation.task, request_from_proto(wire.request_to_wire(request())).evaluation.task) == (
        "text-generation",
        "text-classification",
    )
    assert decoder(EXPORT, written="{task: text-generation}").documents.parsed_evaluation.window == 512


def test_what_is_left_out_is_left_out_on_the_server_too():
    read = request_from_proto(wire.request_to_wire(request()))
    assert (read.train, read.validation, read.probes, read.adapters, dict(read.labels)) == (None, None, None, (), {})
    assert list(vars(read.limits).values()) == [None, None, None]


def test_models_reach_the_server_with_their_weights_a_weight_of_0_too():
    sent = merge_only(SLERP, models=models(0.0))
    read = request_from_proto(wire.request_to_wire(sent))
    assert [(m.name, str(m.artifact), m.weight) for m in read.models] == [("a", f"sha256:{10:064x}", 0.0)]
    message = wire.request_to_wire(sent)
    message.inputs.models[0].ClearField("weight")
    assert request_from_proto(message).models[0].weight == 1.0


def test_the_example_of_a_merge_is_a_recipe_that_only_merges():
    folder = Path(__file__).parents[2] / "examples/merge"
    documents = Documents(**{name: (folder / f"{name}.yaml").read_text() for name in ("recipe", "policy")})
    assert documents.parsed_recipe.is_merge_only


def test_a_recipe_that_only_merges_needs_a_base_and_an_adapter_and_nothing_else():
    read = request_from_proto(wire.request_to_wire(merge_only()))
    assert (read.evaluation_dataset, read.datasets, read.recipe.is_merge_only) == (None, {}, True)


@pytest.mark.parametrize(
    ("documents", "kind"),
    [
        ({"recipe": "stages: []", "policy": POLICY}, InvalidRecipe),
        ({"recipe": "stages:\n  - method: exprot", "policy": POLICY}, InvalidRecipe),
        ({"recipe": EXPORT, "policy": "gates: {}"}, InvalidPolicy),
        ({"recipe": EXPORT, "policy": POLICY, "evaluation": "text_colum: x"}, InvalidRequest),
        ({"recipe": ONLY_MERGE, "policy": POLICY}, InvalidPolicy),
        ({"recipe": EXPORT, "policy": CHANGE}, InvalidPolicy),
    ],
)
def test_documents_are_valid_once_built(documents, kind):
    with pytest.raises(kind):
        Documents(**documents)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: request(RECOVER), "inputs.train is required: the recipe's prune, recover reads training data"),
        (lambda: request(validation=artifact(3)), "inputs.validation is set and inputs.train is not"),
        (lambda: request(MERGE), "inputs.adapters is empty, and recipe.stages.0. is 'merge_lora'"),
        (lambda: request(adapters=(AdapterInput("a", artifact(3)),)), "no stage merges the adapters a"),
        (lambda: request(MERGE, adapters=(AdapterInput("a", artifact(3)),) * 2), "two adapters are named 'a'"),
        (lambda: AdapterInput("A", artifact(3)), "adapter name 'A' is not 1 to 63 of a-z"),
        (lambda: AdapterInput("a", artifact(3), 0.0), "adapter 'a' has weight 0.0: use a finite number other than 0"),
        (lambda: request(labels={"Owner": "ml"}), "label key 'Owner' is not 1 to 63 of a-z"),
        (lambda: request(priority=101), "priority is 101: it must be -100 to 100"),
        (lambda: request(base="model"), "base is 'model'"),
        (lambda: request(evaluation="model"), "evaluation is 'model'"),
        (lambda: request(evaluation=""), "inputs.evaluation is required: name the labelled dataset"),
        (lambda: merge_only(evaluation=artifact(2)), "inputs.evaluation is set, and nothing reads it"),
        (lambda: merge_only(train=artifact(2)), "inputs.train is set, and nothing reads it"),
        (lambda: merge_only(probes=artifact(2)), "inputs.probes is set, and nothing reads it"),
        (lambda: merge_only(written="max_length: 8"), "evaluation is set, and nothing reads it"),
        (lambda: merge_only(adapters=()), "inputs.adapters is empty, and recipe.stages.0. is 'merge_lora'"),
        (lambda: merge_only(models=models(1)), "no stage merges the models a: put `- method: merge_models` first"),
        (lambda: merge_only(MODELS % "", adapters=(AdapterInput("a", artifact(3)),)), "no stage merges the adapters a"),
        (lambda: merge_only(MODELS % ""), "inputs.models is empty, and recipe.stages.0. is 'merge_models'"),
        (lambda: merge_only(MODELS % ", models: [b]", models=models(1)), "no model 'b' in the request; it has a"),
        (lambda: merge_only(MODELS % ", models: [b]", models=models(1, 1)), "no stage merges the model 'a'"),
        (lambda: merge_only(MODELS % "", models=models(1) * 2), "two models are named 'a'"),
        (lambda: merge_only(MODELS % "", models=models(0.0)), "model 'a' has weight 0.0: use a finite number other"),
        (lambda: merge_only(SLERP, models=models(1, 1)), "goes from the base to one model, and inputs.models has 2"),
        (lambda: merge_only(SLERP, models=models(1.5)), "model 'a' has weight 1.5: use 0 to 1"),
        (lambda: merge_only(SLERP, models=(ModelInput("a", "b"),)), "models.a is 'b'"),
        (lambda: ModelInput("A", artifact(3)), "model name 'A' is not 1 to 63 of a-z"),
        (lambda: ModelInput("a", artifact(3), float("inf")), "model 'a' has weight inf: use a finite number"),
        (decoder, "inputs.train is required: the recipe's quantize_weights reads training data"),
        (lambda: decoder(RTN, evaluation=""), "inputs.evaluation is required: name the dataset of texts"),
        (
            lambda: decoder(RTN, train=artifact(3), validation=artifact(4)),
            "inputs.validation is set, and nothing reads it: the stages of a language model",
        ),
        (
            lambda: decoder(RTN, written="task: text-classification"),
            "evaluation.task is 'text-classification', and the recipe's 'quantize_weights' is for models of the task "
            "'text-generation': write `task: text-generation`",
        ),
        (
            lambda: decoder(RECOVER, written="task: text-generation", train=artifact(3)),
            "evaluation.task is 'text-generation', and the recipe's 'prune' is for models of the task",
        ),
        (lambda: request(train="artifacts/sha256:12"), "train is"),
        (lambda: request(seed=-1), "seed is -1"),
        (lambda: request(limits=Limits(memory_limit_bytes=0)), "limits.memory_limit_bytes is 0"),
        (lambda: request(limits=Limits(run_timeout_s=0)), "limits.run_timeout is 0 s"),
    ],
)
def test_a_request_that_cannot_be_is_one_sentence(build, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        build()


def test_an_adapter_that_the_recipe_names_must_be_given():
    recipe = "stages:\n  - {method: merge_lora, adapters: [b]}\n  - method: export\n"
    with pytest.raises(InvalidRequest, match="no adapter 'b' in the request; it has a"):
        request(recipe, adapters=(AdapterInput("a", artifact(3)),))
