"""A request is checked before anything is sent, and the server reads from the wire what the client meant."""

import pytest

from modelpress import wire
from modelpress.digests import Digest
from modelpress.errors import InvalidPolicy, InvalidRecipe, InvalidRequest
from modelpress.requests import AdapterInput, ConversionRequest, Documents, Limits
from service.edge.conversion_requests import request_from_proto

POLICY = "gates:\n  size: {max_ratio: 0.3}\n"
EXPORT = "stages:\n  - method: export\n"
MERGE = "stages:\n  - method: merge_lora\n  - method: export\n"
RECOVER = "stages:\n  - method: prune\n  - method: recover\n  - method: export\n"


def artifact(number):
    return f"artifacts/sha256:{number:064x}"


def request(recipe=EXPORT, **changes):
    values = {"base": artifact(1), "evaluation": artifact(2)} | changes
    return ConversionRequest(Documents(recipe=recipe, policy=POLICY), **values)


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


def test_what_is_left_out_is_left_out_on_the_server_too():
    read = request_from_proto(wire.request_to_wire(request()))
    assert (read.train, read.validation, read.probes, read.adapters, dict(read.labels)) == (None, None, None, (), {})
    assert list(vars(read.limits).values()) == [None, None, None]


@pytest.mark.parametrize(
    ("documents", "kind"),
    [
        ({"recipe": "stages: []", "policy": POLICY}, InvalidRecipe),
        ({"recipe": "stages:\n  - method: exprot", "policy": POLICY}, InvalidRecipe),
        ({"recipe": EXPORT, "policy": "gates: {}"}, InvalidPolicy),
        ({"recipe": EXPORT, "policy": POLICY, "evaluation": "text_colum: x"}, InvalidRequest),
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
        (lambda: request(evaluation=""), "evaluation is ''"),
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
