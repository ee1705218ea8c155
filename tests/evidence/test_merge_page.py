"""The page of a conversion that only merges: what went in, how far each tensor moved, how far it is from PEFT."""

from __future__ import annotations

import re

import pytest

from modelpress.digests import digest_bytes
from modelpress.merge_changes import read_changes
from modelpress.reports import Report
from service.report.merge_rows import tensor_kinds
from service.report.page import render_page
from service.report.pictures import MAX_TENSOR_KINDS, TensorKind, change_picture
from tests.evidence import merge_samples, samples
from tests.evidence.merge_samples import MergeCase
from tests.evidence.test_report_page import Reader

MODEL = digest_bytes(b"model")


def page(case: MergeCase, report: Report | None = None) -> str:
    return render_page(report or case.report(MODEL), recipe_yaml=case.recipe_yaml, policy_yaml=case.policy_yaml)


@pytest.mark.parametrize("name", merge_samples.CASES)
def test_verdict_gates_and_merge_stand_first_and_no_other_section_is_empty(name):
    headings = re.findall(r"<h2>(.*?)</h2>", page(merge_samples.CASES[name]))
    assert headings == [
        "Gates",
        "What was merged",
        "What each stage did",
        "Run it again",
        "What this verdict means, and what it does not",
    ]


@pytest.mark.parametrize("name", merge_samples.CASES)
def test_it_loads_nothing_runs_nothing_and_describes_its_pictures(name):
    source = page(merge_samples.CASES[name])
    reader = Reader(source)
    assert not {tag for tag, _ in reader.elements} & {"script", "link", "img", "iframe", "object", "embed", "form"}
    assert "://" not in source
    pictures = [attributes for tag, attributes in reader.elements if tag == "svg"]
    assert len(pictures) == len(merge_samples.CASES[name].report(MODEL).decision.gates) + 1
    assert all(len(attributes["aria-label"] or "") > 20 for attributes in pictures)


def test_its_figures_are_the_reports_own():
    text = re.sub(r"\s+", " ", Reader(page(merge_samples.MERGED)).text)
    assert "155 tensors changed, 1 of them new; the other 47 are the base's, byte for byte." in text
    assert "largest of 154 layers, against peft 0.21.2" in text
    assert "0.112 at most, where the largest is 17.5; 3 of 256 positions have another largest logit" in text
    assert "Changed, and not compared: 1." in text
    assert "lm_head.weight : the base has no such tensor" in text
    assert "0.0895, model.layers.2.mlp.down_proj.weight" in text
    assert "combination type cat" in text
    assert "majority sign" not in text.partition("What was merged")[2].partition("What each stage did")[0]


def test_the_command_that_repeats_it_has_every_weight_unrounded_and_no_evaluation():
    command = page(merge_samples.MERGED).partition("<pre>")[2].partition("</pre>")[0]
    assert "--adapter=style=ADAPTER:0.7 --adapter=facts=ADAPTER:0.3333333333333333 " in command
    assert "--eval" not in command
    assert "--model=style=MODEL:0.7 " in page(merge_samples.CHECKPOINTS)


def test_what_has_no_reference_says_so_instead_of_a_figure():
    text = Reader(page(merge_samples.CHECKPOINTS)).text
    assert text.count("not measured") == 2
    assert "There is nothing to compare with: merged checkpoints have no independent reference." in text
    assert "run by" not in text
    assert "majority sign method total" in re.sub(r"\s+", " ", text)


def test_missing_logits_come_with_their_reason():
    why = merge_samples.WITHOUT_LOGITS.logits_missing
    top, _, rest = page(merge_samples.WITHOUT_LOGITS).partition('class="key"')
    assert f"cannot be judged: {why}." in top
    assert f"not compared: {why}" in rest


def test_names_and_reasons_of_a_merge_are_text_and_never_markup():
    attack = '"><script>alert(1)</script><svg onload=x>'
    case = MergeCase(not_compared=((attack, attack),), recipe_yaml=merge_samples.RECIPE_YAML + f"# {attack}\n")
    report = case.report(MODEL)
    details = {"adapters": [{"name": "style", attack: attack}], "tensors_added": [attack], "tensors_dropped": [attack]}
    stage = report.stages[0].model_copy(
        update={"details": {**report.stages[0].details, **details, "relative_change": {attack: 0.5}}}
    )
    merge = report.merge.model_copy(
        update={"layer": attack, "largest_change_tensor": attack, "reference": attack, "measured_by": attack}
    )
    source = page(case, report.model_copy(update={"stages": (stage,), "merge": merge}))
    assert "<script" not in source
    assert "<svg onload" not in source
    Reader(source)


def test_a_merge_that_only_adds_tensors_has_no_picture():
    report = merge_samples.MERGED.report(MODEL)
    stage = report.stages[0].model_copy(update={"details": {**report.stages[0].details, "relative_change": {}}})
    source = page(merge_samples.MERGED, report.model_copy(update={"stages": (stage,)}))
    assert "moved furthest" not in source


def test_a_merge_before_other_stages_has_its_section_beside_the_evaluation():
    source = render_page(
        samples.APPROVED.report(MODEL), recipe_yaml=samples.RECIPE_YAML, policy_yaml=samples.POLICY_YAML
    )
    assert source.index("<h2>Before and after") < source.index("<h2>What was merged") < source.index("<h2>What each")
    assert "--adapter=guard=ADAPTER:1.0" in source
    assert "--eval=EVALUATION --train=TRAIN --validation=VALIDATION" in source


def test_tensors_are_drawn_by_kind_the_furthest_first():
    stage = merge_samples.MERGED.stage
    kinds = tensor_kinds(read_changes(stage.touched, stage.details))
    assert [len(kind.changes) for kind in kinds] == [22] * 7
    furthest = [max(kind.changes) for kind in kinds]
    assert furthest == sorted(furthest, reverse=True)
    assert kinds[0].pattern == "model.layers.*.mlp.down_proj.weight"


def test_a_dot_lies_at_its_share_of_the_furthest_and_many_kinds_are_counted():
    drawn = str(change_picture([TensorKind("a", (0.5, 0.25)), TensorKind("b", (0.0,))]))
    assert re.findall(r'cx="([\d.]+)"', drawn) == ["153", "298", "8"]
    many = [TensorKind(f"kind {i}", (1 / (i + 1),)) for i in range(MAX_TENSOR_KINDS + 5)]
    assert "and 5 more kinds, 0.0769 at most" in str(change_picture(many))


def test_thousands_of_tensors_of_a_kind_are_a_few_hundred_dots():
    kind = TensorKind("model.layers.*.mlp.experts.*.up_proj.weight", tuple(i / 20_000 for i in range(20_000)))
    assert str(change_picture([kind])).count("<circle") < 700
