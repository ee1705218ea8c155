"""The page: self-contained, escaped, accessible, the same bytes for the same report, and honest about its verdict."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
import subprocess
import sys

import pytest

from modelpress.digests import digest_bytes
from modelpress.metrics import Metric
from modelpress.reports import CurvePoint, Report
from service.report.page import TEMPLATES, render_page
from service.report.pictures import confusion_picture, gate_picture, kl_picture
from service.report.rows import touched_groups
from service.report.svg import Axis, short
from tests.evidence import samples

VOID = {"meta", "br", "link", "img", "input", "hr"}


def sample(name: str) -> Report:
    return samples.sample_report(samples.CASES[name], digest_bytes(b"model"))


def page(report: Report, policy: str = samples.POLICY_YAML) -> str:
    return render_page(report, recipe_yaml=samples.RECIPE_YAML, policy_yaml=policy)


class Reader(html.parser.HTMLParser):
    """Every element in order, its attributes, and the visible text; unbalanced tags are an error."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", []
        self.feed(source)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.text += data + " "


@pytest.mark.parametrize("name", list(samples.CASES))
def test_the_page_loads_nothing_and_runs_nothing(name):
    source = page(sample(name))
    reader = Reader(source)
    tags = {tag for tag, _ in reader.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "foreignobject", "use"}
    for _, attributes in reader.elements:
        assert not any(key.startswith("on") or key in ("src", "srcset", "xlink:href", "style") for key in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "://" not in source
    assert "url(" not in source
    assert "@import" not in source


def test_its_own_policy_allows_its_own_style_sheet_and_nothing_else():
    reader = Reader(page(sample("approved")))
    [policy] = [a["content"] for tag, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy"]
    digest = hashlib.sha256((TEMPLATES / "style.css").read_bytes()).digest()
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


@pytest.mark.parametrize(
    ("name", "verdict", "sentence"),
    [
        ("approved", "APPROVED", "passed every gate"),
        ("rejected", "REJECTED", "Do not ship this model."),
        ("inconclusive", "INCONCLUSIVE", "Not approved."),
    ],
)
def test_the_verdict_comes_first_and_no_other_is_shown_large(name, verdict, sentence):
    source = page(sample(name), samples.CASES[name].policy_yaml)
    reader = Reader(source)
    headings = re.findall(r"<h1>(.*?)</h1>", source)
    assert headings == [verdict]
    assert f"<title>{verdict}: conversions/{samples.CONVERSION}</title>" in source
    assert sentence in reader.text
    assert source.index("<h1>") < source.index('class="key"') < source.index("<h2>Gates")


def test_a_missed_bound_is_said_on_top_by_how_much():
    report = sample("rejected")
    top = page(report).partition('class="key"')[0]
    missed = [gate for gate in report.decision.gates if gate.outcome.value == "FAILED"]
    assert len(missed) == 4
    for gate in missed:
        assert gate.sentence.replace("'", "&#39;") in top


def test_the_three_figures_that_matter_are_the_reports_own():
    text = Reader(page(sample("approved"))).text
    assert "25.8 %" in text  # 23,412,776 / 90,917,203 bytes
    assert "3.31x" in text  # 9.84 ms / 2.97 ms at batch 1, 64 tokens, the policy's shape
    assert "0.286 points" in text  # (17 - 11) / 2,101
    assert "n = 2,101" in text


def test_every_gate_stands_in_the_table_with_figure_bound_and_sentence():
    report = sample("inconclusive")
    source = page(report, samples.INCONCLUSIVE.policy_yaml)
    for gate in report.decision.gates:
        assert gate.sentence.replace("'", "&#39;") in source.partition("<h2>Gates")[2]
    left_out = "kl_p99, perplexity, top1_agreement, merge_difference, merge_logits, merge_change"
    assert f"Not in this policy, so not judged: {left_out}." in source


def test_a_reused_conversion_says_that_nothing_was_measured_anew():
    assert "Nothing was measured anew" in Reader(page(sample("cached"))).text
    assert "Nothing was measured anew" not in Reader(page(sample("approved"))).text


def test_what_came_from_a_request_is_text_and_never_markup():
    attack = '"><script>alert(1)</script><svg onload=x>'
    report = sample("approved").model_copy(
        update={"labels": {attack: attack}, "requested_by": attack, "warnings": (attack,), "conversion": attack}
    )
    stage = report.stages[0].model_copy(
        update={
            "touched": (attack,),
            "details": {**report.stages[0].details, attack: attack, "list": [attack]},
            "warnings": (attack,),
        }
    )
    quality = report.evaluation.candidate.model_copy(update={"labels": (attack, "b")})
    evaluation = report.evaluation.model_copy(update={"candidate": quality})
    spoiled = report.model_copy(update={"stages": (stage,), "evaluation": evaluation})
    source = render_page(spoiled, recipe_yaml=f"# {attack}", policy_yaml=samples.POLICY_YAML + f"# {attack}\n")
    assert "<script" not in source
    assert "<svg onload" not in source
    Reader(source)


def test_what_a_stage_warns_of_stands_on_top_too_with_its_name():
    report = sample("approved")
    stage = report.stages[0].model_copy(update={"warnings": ("too few tokens",)})
    text = Reader(page(report.model_copy(update={"stages": (stage, *report.stages[1:])}))).text
    assert text.index(f"{stage.method}: too few tokens") < text.index("finished")
    assert text.count("too few tokens") == 2


def test_equal_reports_give_equal_bytes():
    assert page(sample("approved")) == page(sample("approved"))


def test_every_picture_has_a_text_and_every_table_has_headers():
    source = page(sample("approved"))
    reader = Reader(source)
    pictures = [a for tag, a in reader.elements if tag == "svg"]
    assert len(pictures) == 6 + 5 + 1 + 2  # gates, pictures, the merge, training curves
    assert all(a["role"] == "img" and len(a["aria-label"] or "") > 20 for a in pictures)
    heads = [a for tag, a in reader.elements if tag == "th"]
    assert all(a.get("scope") in ("col", "row") for a in heads)
    assert ("html", {"lang": "en"}) in reader.elements
    assert source.count("<table") == source.count("<thead>")


def test_text_has_a_contrast_of_at_least_4_5():
    """WCAG 2.1, success criterion 1.4.3, for every text colour of the style sheet on the grounds it stands on."""
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", (TEMPLATES / "style.css").read_text()))
    grounds = {"ink": ("paper", "wash", "open-wash"), "soft": ("paper", "wash"), "candidate": ("paper",)}
    grounds |= {kind: ("paper", f"{kind}-wash") for kind in ("good", "bad", "open")}
    for colour, behind in grounds.items():
        assert min(contrast(colours[colour], colours[ground]) for ground in behind) >= 4.5, colour


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_needs_no_torch_and_no_numpy():
    program = (
        "import sys; import service.report.page, service.publication; "
        "print([m for m in ('torch', 'numpy', 'onnxruntime', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_figures_that_could_not_be_computed_are_shown_as_such():
    report = sample("approved")
    none = Metric(name="x", value=None, unit="nats", n=0)
    drift = report.drift.model_copy(update={"kl_mean": none, "kl_p99": none, "largest": ()})
    quality = report.evaluation.candidate.model_copy(update={"f1_macro": none})
    evaluation = report.evaluation.model_copy(update={"candidate": quality})
    gates = tuple(gate.model_copy(update={"figure": None, "interval": None}) for gate in report.decision.gates)
    decision = report.decision.model_copy(update={"gates": gates})
    source = page(report.model_copy(update={"drift": drift, "evaluation": evaluation, "decision": decision}))
    assert "mean KL none nats" in source
    assert "nan" not in source.lower().replace("nano", "")


def test_a_policy_without_the_three_gates_shows_the_figures_as_unjudged():
    policy = "gates:\n  kl_mean: {max: 0.05}\n"
    case = samples.Case(policy_yaml=policy)
    source = page(samples.sample_report(case, digest_bytes(b"")), policy)
    assert source.count("no gate in this policy") == 3


def test_many_classes_are_shown_by_shade_alone_and_long_labels_are_cut():
    quality = sample("approved").evaluation.candidate
    labels = tuple(f"a class with a long name {i}" for i in range(40))
    confusion = tuple(tuple(5 if i == j else 0 for j in range(40)) for i in range(40))
    many = quality.model_copy(update={"labels": labels, "confusion": confusion})
    assert str(confusion_picture(many, "candidate")).count("<text") == 2
    few = quality.model_copy(update={"labels": labels[:3], "confusion": tuple(row[:3] for row in confusion[:3])})
    assert "a class with …" in str(confusion_picture(few, "candidate"))


def test_an_empty_row_and_an_empty_histogram_have_pictures():
    quality = sample("approved").evaluation.candidate.model_copy(update={"confusion": ((0, 0), (0, 0))})
    assert "<svg" in confusion_picture(quality, "x")
    histogram = sample("approved").drift.kl_histogram
    assert "<svg" in kl_picture(histogram.model_copy(update={"counts": (0,) * len(histogram.counts)}))


def test_a_gates_dot_lies_on_the_allowed_side_exactly_where_it_passed():
    for name in ("approved", "rejected"):
        for gate in sample(name).decision.gates:
            drawn = str(gate_picture(gate, 1))
            dot = float(re.search(r'cx="([\d.]+)"', drawn)[1])
            start, width = map(
                float, re.search(r'<rect x="([\d.]+)" y="6" width="([\d.]+)"[^>]*"allowed"', drawn).groups()
            )
            assert (start - 0.01 <= dot <= start + width + 0.01) == (gate.outcome.value == "PASSED"), gate.name


def test_a_training_run_of_one_look_has_a_curve():
    report = sample("approved")
    stage = report.stages[2].model_copy(update={"curve": (CurvePoint(step=0, loss=0.0),)})
    assert "Loss of recover" in page(report.model_copy(update={"stages": (report.stages[0], stage)}))


def test_ticks_are_round_and_inside_the_axis():
    assert Axis(0, 0.96, 0, 1).ticks() == [0, 0.5]
    assert Axis(0, 1, 0, 1).ticks() == [0, 0.5, 1]
    assert Axis(0, 640, 0, 1).ticks() == [0, 200, 400, 600]
    assert Axis(-0.3, 1.7, 0, 1).ticks() == [0, 0.5, 1, 1.5]
    assert Axis(2, 2, 0, 1).ticks() == [2]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.00412, "0.00412"),
        (12.345, "12.3"),
        (-4.0, "−4"),
        (11743, "11,743"),
        (4.8e-7, "4.8e−07"),
        (99.96, "100"),
        (1e6, "1,000,000"),
    ],
)
def test_figures_are_shown_with_three_significant_digits(value, shown):
    assert short(value) == shown


def test_names_that_differ_only_in_layer_numbers_are_one_group():
    names = ["layer.0.query.weight", "layer.1.query.weight", "layer.11.query.weight", "int8.weight"]
    assert touched_groups(names) == [("layer.*.query.weight", 3), ("int8.weight", 1)]


def test_only_stages_that_another_conversion_ran_are_called_cache_hits():
    text = Reader(page(sample("approved"))).text
    assert text.count("cache hit") == 1  # merge_lora of the sample
    assert "run by 00ff00ff00ff00ff" in text
    assert Reader(page(sample("cached"))).text.count("cache hit: run by") == 5
