"""The report of the demo: true to its evidence, self-contained, and readable in a browser."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import mmstream as mm
from mmstream.audit.compare_runs import Proof
from mmstream.converting.convert import ConvertReport
from mmstream.demo.charts import Line, line_chart, ticks
from mmstream.demo.report import Evidence, facts, html_report, markdown_report
from tests.helpers.browser import open_page
from tests.helpers.corpora import write_corpus

EPOCHS, STEPS, G, KILLED, SAVED = 3, 10, 6, 17, 15


def history(start=0, stop=EPOCHS * STEPS, world_size=1):
    return {
        (n // STEPS, n % STEPS): {
            "loss": 3 * math.exp(-n / 20),
            "keys": [f"{n}-{row}" for row in range(G)],
            "samples_per_s": 100.0 + n,
            "wait_fraction": 0.25,
            "world_size": world_size,
        }
        for n in range(start, stop)
    }


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    def fields(number):
        from tests.helpers.corpora import captioned

        return captioned(number) | {"txt": b"a caption with <b>markup</b> & more"}

    dataset = mm.open_dataset(write_corpus(tmp_path_factory.mktemp("report"), [G * 2], fields))
    pipeline = mm.Pipeline(
        dataset, global_batch_size=G, decode=mm.Decode(image=mm.ImageDecoder(size=32))
    )
    return Evidence(
        ConvertReport(96, 480, 0, 5, 8_000_000, 8_000_000, 1.0),
        Proof(EPOCHS * STEPS, 0, 0, 0, 0, 2.5e-6),
        undisturbed=history(),
        killed=history(stop=KILLED, world_size=2),
        disturbed=history(stop=SAVED, world_size=2) | history(start=SAVED),
        batch=next(iter(mm.Loader(pipeline, world=mm.World()))),
    )


@pytest.fixture(scope="module")
def page(evidence, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html_report(evidence), encoding="utf-8")
    return path


def browser_says(page, tmp_path, script, width=1200):
    """What a script finds in the page; the policy that forbids scripts is taken out for it."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    run = f"addEventListener('load', () => {{ document.title = JSON.stringify({script}) }})"
    with_script = tmp_path / "with_script.html"
    with_script.write_text(text.replace("</head>", f"<script>{run}</script></head>"))
    opened = open_page(with_script, tmp_path / "profile", width)
    assert opened.messages == []
    title = re.search(r"<title>(.*?)</title>", opened.dom, re.S)[1]
    return json.loads(title.replace("&amp;", "&"))


@pytest.mark.slow
def test_a_real_browser_opens_the_page_without_an_error(page, tmp_path):
    opened = open_page(page, tmp_path / "profile")
    assert opened.messages == []
    assert "The proof holds" in opened.dom


@pytest.mark.slow
def test_a_real_browser_shows_every_picture_and_both_charts(page, tmp_path):
    widths = browser_says(page, tmp_path, "[...document.images].map(i => i.naturalWidth)")
    assert widths == [32] * G
    boxes = browser_says(
        page, tmp_path, "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect())"
    )
    assert [box["width"] > 600 and box["height"] > 80 for box in boxes] == [True, True]
    curves = browser_says(
        page, tmp_path, "[...document.querySelectorAll('polyline')].map(s => s.getTotalLength())"
    )
    assert len(curves) == 7  # 3 curves and their keys in the legend, and the share of waiting
    assert min(curves) > 20


@pytest.mark.slow
def test_a_narrow_window_needs_no_sideways_scrolling(page, tmp_path):
    script = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    scroll, client = browser_says(page, tmp_path, script, width=500)
    assert scroll <= client <= 500


@pytest.mark.slow
def test_the_browser_would_tell_of_a_page_that_is_not_self_contained(page, tmp_path):
    other = tmp_path / "other.html"
    other.write_text(page.read_text().replace("</h1>", '</h1><img src="http://127.0.0.1:9/x.png">'))
    opened = open_page(other, tmp_path / "profile")
    assert any("Content Security Policy" in message for message in opened.messages)


class _Urls(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.urls = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.urls += [v for n, v in attrs if n in ("src", "href", "xlink:href", "action")]


def test_the_page_refers_to_nothing_outside_and_runs_nothing(page):
    tick_values = _Urls(page.read_text())
    assert len(tick_values.urls) == G
    assert all(url.startswith("data:image/jpeg;base64,") for url in tick_values.urls)
    assert not {"script", "link", "iframe", "object", "form"} & set(tick_values.tags)
    assert "@import" not in page.read_text()
    assert "url(" not in page.read_text()
    assert "default-src 'none'" in page.read_text()


def test_captions_are_text_not_markup(page):
    assert "a caption with &lt;b&gt;markup&lt;/b&gt; &amp; more" in page.read_text()
    assert "<b>markup" not in page.read_text()


def test_both_forms_say_the_same_facts(evidence, page):
    markdown = markdown_report(evidence)
    assert "the proof holds" in markdown
    assert "| samples lost / repeated per epoch | 0 / 0 |" in markdown
    for fact in facts(evidence):
        assert fact.value in markdown
        assert fact.value.replace(">", "&gt;") in page.read_text()
    values = {fact.name: fact.value for fact in facts(evidence)}
    assert values["steps"] == "30 of 6 samples, 3 epochs"
    assert "killed at step 17" in values["disturbed run"]
    assert "checkpoint of step 15" in values["disturbed run"]
    assert "25 % of a step waiting" in values["speed of the undisturbed run"]


@pytest.mark.parametrize("fault", ["lost", "repeated", "unplanned", "different", "loss_difference"])
def test_a_proof_that_fails_is_said_to_fail(evidence, fault):
    failed = replace(evidence, proof=replace(evidence.proof, **{fault: 1}))
    assert "DOES NOT HOLD" in markdown_report(failed)
    text = html_report(failed)
    assert "The proof does not hold" in text
    assert "The proof holds" not in text
    assert text.count('<td class="bad">') == 1
    assert [fact.good for fact in facts(failed)].count(False) == 1


def points_of(svg):
    root = ElementTree.fromstring(svg)
    return [
        [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        for line in root.iter("polyline")
        if line.get("points")
    ]


def test_a_curve_runs_through_its_values():
    svg = line_chart(
        [Line("", [(0, 0), (50, 5), (100, 10)], "a")], title="t", x_name="x", top=10, height=200
    )
    ((first, middle, last),) = points_of(svg)
    assert first == (44, 166)  # the corner of the axes
    assert last == (908, 34)
    assert middle == ((44 + 908) / 2, 100)


def test_values_that_are_no_numbers_leave_the_chart_whole():
    points = [(1, math.nan), (2, 1.0), (3, math.inf), (4, 2.0)]
    svg = line_chart([Line("<a>", points, "a")], title="<t>", x_name="x", marks={2: "<m>"})
    curve, _key = points_of(svg)
    assert len(curve) == 2
    assert points_of(line_chart([Line("", [], "a")], title="none", x_name="x")) == []


@pytest.mark.parametrize("end", [1e-9, 0.03, 0.7, 1, 2.77, 9.99, 10, 100, 180, 12345])
def test_axes_have_a_few_round_numbers(end):
    tick_values = ticks(end)
    assert tick_values[0] == 0
    assert tick_values[-1] >= end > tick_values[-2]
    assert 4 <= len(tick_values) <= 8
    assert len({f"{value:g}" for value in tick_values}) == len(tick_values)
