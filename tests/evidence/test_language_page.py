"""The page of a quantized language model: what it costs, what it writes, and what became of every linear layer."""

from __future__ import annotations

import re

import pytest

from modelpress.digests import digest_bytes
from modelpress.language_reports import Generation
from modelpress.quantization_reports import QuantizedLayer
from modelpress.reports import Report
from service.report.language_rows import continuations, visible
from service.report.layer_pictures import MAX_KINDS, layer_kinds, stage_picture
from service.report.layer_rows import error_summary, layer_summary
from service.report.page import SHOWN_CONTINUATIONS, render_page
from service.report.pictures import gate_picture
from tests.evidence import language_samples
from tests.evidence.language_samples import LanguageCase, quantized_layers
from tests.evidence.test_report_page import Reader

MODEL = digest_bytes(b"model")


def page(case: LanguageCase, report: Report | None = None) -> str:
    return render_page(report or case.report(MODEL), recipe_yaml=case.recipe_yaml, policy_yaml=case.policy_yaml)


def plain(source: str) -> str:
    return re.sub(r"\s+", " ", Reader(source).text)


def with_language(**changes: object) -> Report:
    report = language_samples.APPROVED.report(MODEL)
    return report.model_copy(update={"language": report.language.model_copy(update=changes)})


def layer(name: str, **changes: object) -> QuantizedLayer:
    facts = {"name": name, "algorithm": "gptq", "num_bits": 4, "group_size": 64, "error": 0.1, "rounding_error": 0.2}
    return QuantizedLayer(**{**facts, **changes})


@pytest.mark.parametrize("name", language_samples.CASES)
def test_its_sections_stand_in_order_and_the_verdict_first(name):
    source = page(language_samples.CASES[name])
    assert source.index("<h1>") < source.index('class="key"') < source.index("<h2>Gates")
    assert re.findall(r"<h2>(.*?)</h2>", source) == [
        "Gates",
        "Before and after",
        "Continuations",
        "Pictures",
        "What each stage did",
        "Run it again",
        "What this verdict means, and what it does not",
    ]


@pytest.mark.parametrize("name", language_samples.CASES)
def test_it_loads_nothing_runs_nothing_and_describes_its_pictures(name):
    case = language_samples.CASES[name]
    source = page(case)
    reader = Reader(source)
    assert not {tag for tag, _ in reader.elements} & {"script", "link", "img", "iframe", "object", "embed", "form"}
    assert not any(key.startswith("on") or key == "style" for _, given in reader.elements for key in given)
    assert "://" not in source
    pictures = [attributes for tag, attributes in reader.elements if tag == "svg"]
    assert len(pictures) == len(case.report(MODEL).decision.gates) + 3  # size, drift, layers
    assert all(len(attributes["aria-label"] or "") > 20 for attributes in pictures)
    assert source.count("<table") == source.count("<thead>")


def test_the_figures_that_matter_are_the_reports_own():
    top = plain(page(language_samples.APPROVED)).partition(" Gates ")[0]
    report = language_samples.APPROVED.report(MODEL)
    assert "Size 41.8 % of the baseline's bytes" in top
    assert f"Perplexity {report.language.perplexity_ratio.value:.3f}x 95 % interval 1.117 to 1.136" in top
    assert f"{report.drift.kl_mean.value:.3f} nats" in top
    assert "8,176 tokens" in top
    assert top.count(" passed ") == 5  # the verdict's sentence, and each of the four


def test_before_and_after_has_perplexity_questions_bytes_and_parameters():
    text = plain(page(language_samples.APPROVED))
    assert "Accuracy on 1,000 questions 53.20 % (50.10 to 56.27) 53.00 % (49.90 to 56.08) −0.20 points" in text
    assert "269.1 MB 112.4 MB 41.78 % of it" in text
    assert "Parameters 134,515,008 134,515,008 100.00 % of them" in text
    assert "in 16 windows of 512, a new one every 512" in text


def test_without_questions_the_page_says_so():
    text = plain(page(language_samples.WITHOUT_QUESTIONS))
    assert "The evaluation dataset has no questions, so no accuracy was measured." in text
    assert "Accuracy on" not in text


def test_continuations_stand_side_by_side_marked_from_the_first_difference():
    source = page(language_samples.APPROVED)
    assert source.count(" Paris. It is the largest city in <mark>") == 2
    assert "<mark>the country and lies on the Seine.</mark>" in source
    assert "<mark>Europe, and one of the oldest.</mark>" in source
    assert "8 of 16 tokens equal" in source
    assert source.count("<mark>") == 2  # equal continuations have none


def test_a_continuation_that_ends_earlier_is_marked_only_where_there_is_text():
    (row,) = continuations([Generation(index=0, prompt="p", baseline="a b", candidate="a", equal_tokens=1, tokens=2)])
    assert (row.shared, row.baseline, row.candidate) == ("a", " b", "")


def test_a_long_prompt_is_cut_at_its_front():
    prompt = "x" * 5000 + "the end"
    (row,) = continuations([Generation(index=0, prompt=prompt, baseline="", candidate="", equal_tokens=0, tokens=0)])
    assert len(row.prompt) == 600
    assert row.prompt.startswith("…")
    assert row.prompt.endswith("the end")


def test_many_continuations_are_folded_and_none_is_left_out():
    many = tuple(language_samples.GENERATIONS[0].model_copy(update={"prompt": f"prompt {i}"}) for i in range(9))
    source = page(language_samples.APPROVED, with_language(generations=many))
    assert f"<summary>{9 - SHOWN_CONTINUATIONS} more</summary>" in source
    assert all(source.count(f">prompt {i}<") == 1 for i in range(9))


def test_what_the_models_wrote_is_text_and_never_markup():
    attack = '"><script>alert(1)</script><svg onload=x></mark>'
    generation = language_samples.GENERATIONS[0].model_copy(
        update={"prompt": attack, "baseline": attack + "a", "candidate": attack}
    )
    report = with_language(generations=(generation,), warnings=(attack,), candidate_runtime=attack)
    spoiled = report.stages[0].layers[0].model_copy(update={"name": attack, "fallback": attack})
    stage = report.stages[0].model_copy(update={"layers": (spoiled,)})
    example = report.drift.largest[0].model_copy(update={"baseline_label": attack, "candidate_label": attack})
    drift = report.drift.model_copy(update={"largest": (example,)})
    source = page(language_samples.APPROVED, report.model_copy(update={"stages": (stage,), "drift": drift}))
    assert "<script" not in source
    assert "<svg onload" not in source
    Reader(source)


def test_line_breaks_of_a_token_are_written_out():
    assert visible("a\n\tb\\") == "a\\n\\tb\\\\"


def test_layers_are_counted_and_what_fell_back_is_named_with_its_reason():
    text = plain(page(language_samples.APPROVED))
    assert "Linear layers of the decoder: 208 in 4 bits by gptq, 1 in 4 bits by rtn, 1 kept in 16 bits." in text
    assert "Not quantized as the recipe says: 1 of 210 linear layers." in text
    assert f"model.layers.1.mlp.down_proj : {language_samples.DEAD_COLUMNS}" in text
    assert "windows 64, tokens 32,768" in text


def test_every_linear_layer_has_its_line():
    source = page(language_samples.APPROVED)
    table = source.partition("every linear layer: bits")[2].partition("</table>")[0]
    assert table.count('<th scope="row">') == 210
    assert table.count("fell back") == 1
    assert "4 bits, groups of 64" in table
    assert "16 bits</td><td>–</td>" in table


def test_layers_without_errors_have_no_picture_and_the_page_says_why():
    layers = (layer("a", error=None, rounding_error=None), layer("b", error=None, rounding_error=None))
    assert stage_picture(layers) == ""
    assert error_summary(layers) == "No error of an output was measured: nothing was calibrated."
    assert layer_summary(layers) == "Linear layers of the decoder: 2 in 4 bits by gptq."


def test_an_error_lies_on_a_logarithmic_axis_beside_that_of_rounding():
    """0.01 and 1 are the ends of the axis, so 0.1 lies in the middle."""
    drawn = str(stage_picture([layer("a", error=0.01, rounding_error=1.0), layer("b", error=0.1, rounding_error=None)]))
    rows = re.findall(r'<circle cx="([\d.]+)" cy="(46|80)" r="3.5" class="(\w+)"', drawn)
    positions = {kind: float(x) for x, y, kind in rows if y == "80"}
    assert [float(x) for x, y, _ in rows if y == "46"] == [180.0]
    assert positions["change"] + positions["ring"] == pytest.approx(360.0)
    assert positions["change"] < 180 < positions["ring"]


def test_kinds_stand_with_the_largest_error_first_and_many_are_counted():
    kinds = layer_kinds(quantized_layers())
    assert [len(kind.layers) for kind in kinds] == [29, 30, 30, 30, 30, 30, 30]
    assert kinds[0].pattern == "model.layers.*.mlp.down_proj"
    many = [layer(f"kind {i}", error=1 / (i + 1)) for i in range(MAX_KINDS + 5)]
    assert "and 5 more kinds, 0.0769 at most" in str(stage_picture(many))


def test_a_fallback_has_a_mark_of_its_own():
    drawn = str(stage_picture([layer("a"), layer("b", fallback="why")]))
    assert drawn.count('class="fallback"') == 2  # the legend and the layer


def test_thousands_of_layers_of_a_kind_are_a_few_thousand_marks_at_most():
    many = [layer(f"model.layers.{i}.up_proj", error=(i + 1) / 20_000) for i in range(20_000)]
    assert str(stage_picture(many)).count("<circle") < 1500


def test_figures_that_lie_close_together_are_drawn_without_0_and_others_from_it():
    gates = {gate.name: str(gate_picture(gate, 1)) for gate in language_samples.APPROVED.report(MODEL).decision.gates}
    assert 'class="axis"' not in gates["perplexity"]  # 1.127 and a bound of 1.2
    assert 'class="axis"' in gates["accuracy_drop"]


def test_a_figure_that_was_not_computed_is_said_to_be_so():
    report = language_samples.APPROVED.report(MODEL)
    missing = report.language.perplexity_ratio.model_copy(update={"value": None, "interval": None})
    text = plain(page(language_samples.APPROVED, with_language(perplexity_ratio=missing)))
    assert "Perplexity not computed no interval" in text
