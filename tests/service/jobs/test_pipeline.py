"""The plan of a recipe that merges, the steps that it asks for, and what their cache keys hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from modelpress.digests import Digest, digest_bytes
from modelpress.reports import Environment
from modelpress.requests import Limits
from service.cache_look import CacheLook
from service.pipeline import make_candidate, merge
from service.plan import make_plan
from service.requests import AdapterRequest, ConversionRequest, ModelRequest
from service.state.steps import StepKey, Steps
from service.steps import Step, StepResult
from service.storage.store import ContentStore
from service.storage.stored_folders import StoreSink
from service.workers.probe import WorkerFacts
from service.workers.protocol import step_from_json, step_to_json

DIGESTS = {name: digest_bytes(name.encode()) for name in ("base", "rows", "a", "b", "c")}
MERGED = digest_bytes(b"merged")
EXPORT = "{method: export, format: safetensors}"
MERGE_LORA = "stages: [{method: merge_lora}, " + EXPORT + "]"
MERGE_MODELS = "stages: [{method: merge_models}, " + EXPORT + "]"
MERGE_AND_PRUNE = "stages: [{method: merge_lora}, {method: prune, ratio: 0.5, importance: magnitude}, {method: export}]"
MERGE_GATES = "gates: {merge_difference: {max: 0.01}}"
GATES = "gates: {size: {max_ratio: 1.0}}"
FACTS = WorkerFacts(
    Environment(versions={}, device="cpu", cpu_capability="any", threads=1, isolation="for a test"),
    "cpu",
    {"compress/merge_lora": 3, "merge_check": 1},
)


def merge_record(changes: Mapping[str, float]) -> dict[str, Any]:
    """The part of a merge's record that the report repeats."""
    return {"touched": list(changes), "details": {"relative_change": changes, "tensors_byte_identical": 3}}


RECORDS: Mapping[str, Mapping[str, Any]] = {
    "compress/merge_lora": merge_record({"w": 0.5}),
    "compress/merge_models": merge_record({"w": 0.25}),
    "merge_check": {"reference": "peft", "layers": 1, "layer_difference": 0.001, "layer": "w"},
}


@dataclass
class Noted:
    """A runner that notes every step and answers with a record like a worker's; what was merged is `written`."""

    written: Digest = MERGED
    memory_limit_bytes: int = 8 << 30
    steps: list[Step] = field(default_factory=list)

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        return self.result_of(step)

    def run_paired(self, step: Step) -> StepResult:
        return self.run(step)

    def result_of(self, step: Step) -> StepResult:
        digest = None if step.operation == "merge_check" else self.written
        return StepResult(digest, RECORDS[step.operation], 1.0, "c1")


def request(recipe: str = MERGE_LORA, *names: str, **fields: Any) -> ConversionRequest:
    adapters = tuple(AdapterRequest(name, DIGESTS[name], 0.5) for name in names or ("b", "a"))
    given = {"adapters": adapters, "policy_yaml": MERGE_GATES, **fields}
    return ConversionRequest(base=DIGESTS["base"], recipe_yaml=recipe, **given)


def models(*names: str) -> ConversionRequest:
    given = tuple(ModelRequest(name, DIGESTS[name], 0.5) for name in names)
    return request(MERGE_MODELS, adapters=(), models=given, policy_yaml="gates: {merge_change: {max: 1.0}}")


def merge_step(asked: ConversionRequest) -> Step:
    """The merge's step, whatever follows it."""
    noted = Noted()
    merge(make_plan(asked), noted)
    return noted.steps[0]


def test_a_recipe_that_only_merges_has_its_merge_and_its_check():
    assert make_plan(request()).step_names == ("compress/1-merge_lora", "evaluate/merge")


def test_merged_checkpoints_have_no_reference_and_so_no_check():
    assert make_plan(models("a")).step_names == ("compress/1-merge_models",)


def test_a_merge_before_other_stages_is_checked_before_they_run():
    plan = make_plan(request(MERGE_AND_PRUNE, evaluation_dataset=DIGESTS["rows"], policy_yaml=GATES))
    assert plan.step_names[:4] == ("compress/1-merge_lora", "evaluate/merge", "compress/2-prune", "export/baseline")


@pytest.mark.parametrize("asked", [request(), models("a", "b")], ids=["merge_lora", "merge_models"])
def test_the_steps_that_are_asked_for_are_the_plans(asked):
    plan, noted = make_plan(asked), Noted()
    candidate = make_candidate(plan, noted)
    assert tuple(step.name for step in noted.steps) == plan.step_names
    assert candidate.model == MERGED
    assert (candidate.measured.evaluation, candidate.measured.drift) == (None, None)
    assert candidate.measured.merge.changed == 1


def test_a_merge_reads_the_base_and_what_it_merges_and_its_check_reads_the_result_too():
    noted = Noted()
    make_candidate(make_plan(request()), noted)
    first, check = noted.steps
    adapters = {"adapter:a": DIGESTS["a"], "adapter:b": DIGESTS["b"]}
    assert first.inputs == {"model": DIGESTS["base"], **adapters}
    assert check.inputs == {"base": DIGESTS["base"], "merged": MERGED, **adapters}
    assert merge_step(models("c")).inputs == {"model": DIGESTS["base"], "model:c": DIGESTS["c"]}


def test_the_order_of_what_is_merged_is_the_recipes_and_survives_the_way_to_the_worker():
    recipe = "stages: [{method: merge_lora, adapters: [c, a]}, " + EXPORT + "]"
    step = merge_step(request(recipe, "a", "c"))
    sent = step_from_json(json.loads(json.dumps(step_to_json(step), sort_keys=True)))
    assert sent.arguments["stage"]["adapters"] == ["c", "a"]
    assert sent.arguments["weights"] == {"a": 0.5, "c": 0.5}


def test_the_order_of_the_request_counts_where_the_recipe_names_none():
    first, second = merge_step(request(MERGE_LORA, "a", "b")), merge_step(request(MERGE_LORA, "b", "a"))
    assert (first.arguments["stage"]["adapters"], second.arguments["stage"]["adapters"]) == (["a", "b"], ["b", "a"])
    assert first.key({}) != second.key({})


@pytest.mark.parametrize(
    "other",
    [
        request(limits=Limits(memory_limit_bytes=1 << 30)),
        request(policy_yaml="gates: {merge_change: {max: 0.5}}", labels={"team": "red"}, priority=3),
        request(
            MERGE_AND_PRUNE,
            evaluation_dataset=DIGESTS["rows"],
            evaluation_yaml="{max_length: 17}",
            policy_yaml=GATES,
        ),
    ],
    ids=["limits", "policy", "evaluation"],
)
def test_a_merge_is_shared_by_all_that_ask_for_it_whatever_follows(other):
    assert merge_step(other).key({}) == merge_step(request()).key({})


def test_a_check_under_another_memory_limit_is_another_check_whoever_set_it():
    def check(limit: int, **fields: Any) -> str:
        noted = Noted(memory_limit_bytes=limit)
        make_candidate(make_plan(request(**fields)), noted)
        return noted.steps[1].key({})

    assert check(1 << 30) != check(2 << 30)
    assert check(1 << 30) == check(1 << 30, limits=Limits(memory_limit_bytes=1 << 30))


def test_an_estimate_names_the_cached_steps_of_a_merge(journal, leases, queued, tmp_path):
    """First none, then the merge, then its check, too."""
    store, steps = ContentStore(str(tmp_path / "store"), scratch=tmp_path), Steps(journal)
    sink = StoreSink(store)
    with sink.write("model.safetensors") as write:
        write(b"merged")
    noted = Noted(written=sink.finish().digest)
    make_candidate(make_plan(request()), noted)
    lease, names = leases.claim()[0], make_plan(request()).step_names
    tools = {"steps": steps, "store": store, "facts": FACTS}
    for count, step in enumerate(noted.steps):
        look = CacheLook("default", **tools, memory_limit_bytes=noted.memory_limit_bytes)
        assert look.walk(request()) == names[:count]
        steps.finish(lease, StepKey(step.name, step.key(FACTS.key_environment(step))), noted.result_of(step))
    assert CacheLook("default", **tools, memory_limit_bytes=noted.memory_limit_bytes).walk(request()) == names
    assert CacheLook("default", **tools, memory_limit_bytes=1 << 30).walk(request()) == names[:1]
