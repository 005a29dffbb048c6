"""The report: what it draws is what the definition counts, what it shows is what the record says, in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

import reported
from browser import Browser, needs_browser
from longring import Dense, Dilated
from longring.bench.report import attending, bench, errors, meeting, tiles, write
from longring.bench.report.asked import Asked, asked, in_small
from longring.bench.report.markup import Markup, tag
from longring.bench.report.svg import ticks
from longring.bench.report.told import Told, shown, spoken
from longring.bench.report.writing import html
from longring.errors import ArgumentError, LongringError
from longring.geometry.plans import PLANS
from longring.numerics.definition import pair_counts
from longring.plan.work import pairs as pairs_of_rank

# ------------------------------------------------------------------------------------------------ what is drawn


def run(schedule="ring", layout="zigzag", pattern=None, *, tokens=101, ranks=4, nodes=1, kv_heads=2, heads=4):
    return Asked(pattern or Dense(causal=True), tokens, ranks, layout, schedule, nodes, kv_heads, heads)


RUNS = {
    **{name: run(name, nodes=2 if name in ("double_ring", "hybrid") else 1) for name in PLANS},
    "striped": run("ring", "striped"),
    "window": run("exchange", "contiguous", Dense(causal=True, window=(9, 0))),
    "documents": run("exchange", "dealt", Dense(causal=True, documents=[0, 11, 60, 101])),
    "dilated": run("exchange", "contiguous", Dilated([8, 32, 64], [1, 2, 4])),
    "three ranks": run("ring", ranks=3),
    "one rank": run("ring", ranks=1),
}


@pytest.mark.parametrize("one", RUNS.values(), ids=RUNS)
def test_the_tiles_in_small_are_the_definition(one):
    taught = tiles.lesson(one)
    counted = tiles.numbers(taught)["panels"]
    want = pair_counts(taught.small.pattern, taught.small.task.problem)[0]
    for head in {panel["head"] for panel in counted}:
        drawn = sum(sum(panel["pairs"]) for panel in counted if panel["head"] == head)
        assert drawn == int(want[head].sum())


@pytest.mark.parametrize("one", RUNS.values(), ids=RUNS)
def test_blocks_cover_every_pair_of_a_step_once(one):
    for panel in tiles.lesson(one).panels:
        seen = {}
        for block in tiles._blocks(panel.step):
            for row in range(block.row, block.row + block.height):
                for col in range(block.col, block.col + block.width):
                    assert (row, col) not in seen
                    seen[row, col] = block.worker, block.times
        for row, (workers, counts) in enumerate(zip(panel.step.workers, panel.step.counts, strict=True)):
            for col, (worker, times) in enumerate(zip(workers, counts, strict=True)):
                assert seen.get((row, col)) == ((worker, times) if times else None)


@pytest.mark.parametrize("one", RUNS.values(), ids=RUNS)
def test_the_meetings_are_all_the_work_there_is(one):
    counted = meeting.numbers(one)
    for row in counted["work"]:
        assert row["pairs"] == one.task.share * pairs_of_rank(one.task, row["rank"])


@pytest.mark.parametrize("name", ["ring", "bidirectional", "double_ring", "exchange"])
def test_meetings_happen_at_the_step_at_which_tiles_are_computed(name):
    small = in_small(RUNS[name])
    counted = meeting.numbers(small)
    panels = tiles.lesson(small).panels
    for mine, row, when in zip(counted["queries"], counted["pairs"], counted["steps"], strict=True):
        for theirs, some, steps in zip(counted["keys"], row, when, strict=True):
            if some:
                query, keys = mine["last"], range(theirs["first"], min(theirs["last"], mine["last"]) + 1)
                computed = {panel.number for panel in panels for key in keys if panel.step.counts[query][key]}
                assert computed == set(steps)


def test_many_ranks_are_sampled_and_one_rank_is_kept():
    counted = meeting.numbers(run(tokens=10**6, ranks=1000), rank=513)
    assert {one["rank"] for one in counted["queries"]} == {513}
    assert len(counted["keys"]) <= meeting.MOST + 2
    assert "513" in meeting.draw(Told(counted), name="m")


def test_a_pattern_is_read_back_as_it_was_written():
    for pattern in (Dense(causal=False, window=(3, 4)), Dilated([4, 8], [1, 2], causal=False, phase="block")):
        assert asked({"tokens": 64, "ranks": 2, "pattern": repr(pattern)}).pattern == pattern
    given = {"tokens": 64, "ranks": 2, "dilated": "16:1,1K:2", "causal": False}
    assert asked(given).pattern == Dilated([16, 1000], [1, 2], causal=False)
    assert asked({"tokens": 64, "window": 8}).pattern == Dense(causal=True, window=(7, 0))


@pytest.mark.parametrize("text", ["Dense(", "__import__('os').getcwd()", "Dense(causal=open('x'))", "Other(a=1)"])
def test_a_pattern_that_is_none_is_not_run(text):
    with pytest.raises(LongringError, match="cannot be read"):
        asked({"tokens": 64, "pattern": text})


def test_what_cannot_be_drawn_is_told_and_the_rest_is():
    scenes = attending.prepare(
        [lambda: attending.Scene(run()), lambda: attending.Scene(asked({"tokens": 9, "schedule": "sung"}))]
    )
    assert len(scenes.drawn) == 1
    assert "sung" in scenes.left_out[0]


# ------------------------------------------------------------------------------------------------ what is written


def test_whatever_is_not_markup_is_escaped():
    assert tag("p", "<b>", Markup("<i>"), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<i></p>'


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1234567, "", "1,234,567"),
        (3 * 2**20, "bytes", "3 MiB"),
        (0.00123, "seconds", "1.23 ms"),
        (0.873, "share", "87.3 %"),
        (1.0349, "ratio", "1.03"),
        (2.13e-7, "error", "2.13e-07"),
        (None, "bytes", "-"),
        (True, "", "yes"),
    ],
)
def test_numbers_are_spoken_in_one_way(value, unit, words):
    assert spoken(value, unit) == words


def test_a_number_says_where_it_stands():
    told = Told({"a/b": [{"x": 0.5}]})
    assert 'data-at="/a~1b/0/x"' in shown(told["a/b"][0]["x"], "share")
    assert told["no"][3]["such"].value is None


def test_ticks_are_round():
    assert ticks(10 * 2**20, "bytes", about=2) == [0, 5 * 2**20, 10 * 2**20]
    assert ticks(0.1) == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1])
    assert ticks(0.0) == [0.0]


@pytest.mark.parametrize("command", reported.EXAMPLES)
def test_a_page_names_nothing_outside_itself(command):
    class Links(HTMLParser):
        def handle_starttag(self, name, attributes):
            for key, value in attributes:
                assert key not in ("src", "srcset", "style", "action", "data", "poster")
                assert not key.startswith("on")
                assert key != "href" or value.startswith("#")
            assert name not in ("link", "iframe", "object", "embed", "base", "img")

    Links().feed(html(command, reported.EXAMPLES[command]()))


@pytest.mark.parametrize("command", reported.EXAMPLES)
def test_a_record_that_has_little_makes_a_page(command):
    page = html(command, {"command": command, "arguments": {}})
    assert page.startswith("<!doctype html>")
    assert html(command, {**reported.envelope(command), "rows": [], "ranks": [], "choices": []})


def test_times_of_ours_are_foreseen_and_those_of_others_are_not():
    told = {**reported.bench(), "machine": {"device": "cpu", "cores": 2}}
    told["arguments"] |= {"dtype": "fp32"}
    for row in told["rows"]:
        row["predicted_seconds"] = None
    found = bench.counted(json.loads(json.dumps(told)))["predicted_seconds"]
    assert [seconds is not None for seconds in found] == [row["kind"] == "ours" for row in told["rows"]]
    sizes = [(row["tokens"], row["phase"], row["ranks"], row["name"]) for row in told["rows"]]
    known = dict(zip(sizes, found, strict=True))
    assert known[16384, "forward", 4, "ring"] > 8 * known[4096, "forward", 4, "ring"]
    assert known[4096, "both", 4, "ring"] > 2 * known[4096, "forward", 4, "ring"]
    assert "event simulation" in html("bench", told)
    assert all(
        seconds is None for seconds in bench.counted({**told, "machine": {"device": "H200"}})["predicted_seconds"]
    )


def test_rows_of_one_name_are_all_drawn():
    row = Told({"errors": {"out": 1e-7, "dq": 2e-7}, "allowed": {"out": 1e-6, "dq": 1e-9}})
    drawn = errors.draw("budgets", "caption", errors.of_rows([("twice", row), ("twice", row)]))
    cells, _, table = drawn.partition("<details>")
    assert cells.count('scope="row">twice') == 2
    assert table.count('scope="row">twice') == 4
    assert cells.count("WRONG") == 2


@pytest.mark.parametrize("error", [None, 3e-6])
def test_an_error_beyond_its_budget_or_not_a_number_is_wrong_and_one_without_budget_is_not(error):
    judged = errors.of_rows([("case", Told({"errors": {"out": error, "lse": 9.0}, "allowed": {"out": 1e-6}}))])
    assert [one.is_ok for one in judged] == [False, True]
    assert "not judged" in errors.draw("budgets", "caption", judged)


def test_what_is_not_finite_is_null_in_the_record():
    told = {**reported.plan(), "longest_tokens": float("nan"), "more": [float("inf"), (1, 2)]}
    embedded = json.loads(re.search(r'id="data">(.*?)</script>', html("plan", told)).group(1))
    assert embedded["longest_tokens"] is None
    assert embedded["more"] == [None, [1, 2]]


def test_an_unknown_command_and_a_path_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="demo, bench, profile, replay, plan; got 'sing'"):
        write(tmp_path / "x.html", "sing", {})
    with pytest.raises(LongringError, match="cannot be written"):
        write(tmp_path / "no" / "folder" / "x.html", "plan", reported.plan())


def test_a_report_needs_no_torch():
    script = (
        "import sys; sys.path.insert(0, 'tests'); import reported; from longring.bench.report.writing import html\n"
        "html('plan', reported.plan()); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, timeout=60).returncode == 0


# ------------------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every example, and what `longring demo` itself writes."""
    folder = tmp_path_factory.mktemp("reports")
    made = {command: write(folder / f"{command}.html", command, make()) for command, make in reported.EXAMPLES.items()}
    made["demo"] = folder / "demo.html"
    small = ("--tokens", "67", "--ranks", "2", "--head-dim", "8", "--heads", "4", "--kv-heads", "2")
    command = [sys.executable, "-c", "from longring.cli import main; main()", "demo", *small, "--out", str(folder)]
    done = subprocess.run([*command, "--report", str(made["demo"])], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return made


COMMANDS = [*reported.EXAMPLES, "demo"]
OPEN_ALL = "for (const one of document.querySelectorAll('details')) one.open = true"


@pytest.fixture
def opened(browser, pages):
    shown_pages = []

    def show(command, **how):
        shown_pages.append(browser.open(pages[command], **how))
        return shown_pages[-1]

    yield show
    for page in shown_pages:
        page.close()


@needs_browser
@pytest.mark.parametrize("command", COMMANDS)
def test_it_opens_without_a_complaint_and_asks_nobody(opened, command):
    page = opened(command)
    assert page.evaluate("document.title") == f"longring {command}"  # or the nasty name of a peer has run
    assert page.evaluate("document.querySelectorAll('main script, main img, header script').length") == 0
    assert page.complaints == []
    assert [url.split(":")[0] for url in page.requests] == ["file"]


NUMBERS = """
(() => {
  const record = JSON.parse(document.getElementById("data").textContent);
  const found = [];
  for (const one of document.querySelectorAll("[data-at]")) {
    let value = record;
    for (const key of one.dataset.at.split("/").slice(1)) value = value[key.replace(/~1/g, "/").replace(/~0/g, "~")];
    found.push([one.dataset.at, value, Number(one.value), one.textContent]);
  }
  return found;
})()
"""
SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS = {**SIZES, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01, "x": 1.0, "TFLOP/s": 1.0, "": 1.0}


def heard(words):
    """The number that was written, and by how much its last digit may be off."""
    number, _, unit = words.replace(",", "").partition(" ")
    digits, _, power = number.partition("e")
    decimals = len(digits.partition(".")[2])
    return float(number) * UNITS[unit], 0.5001 * 10.0 ** (int(power or 0) - decimals) * UNITS[unit]


@needs_browser
@pytest.mark.parametrize("command", COMMANDS)
def test_the_numbers_shown_are_those_of_the_record(opened, command):
    found = opened(command).evaluate(NUMBERS)
    assert len(found) > 100
    for at, value, kept, words in found:
        assert kept == value, at
        got, off = heard(words)
        assert abs(got - value) <= off + 1e-12 * abs(value) or f"{got:.3g}" == f"{value:.3g}", (at, value, words)


@needs_browser
@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_the_record_is_shown(opened, command):
    missing = """
    (() => {
      const shown = new Set(Array.from(document.querySelectorAll("[data-at]"), (one) => one.dataset.at));
      const record = JSON.parse(document.getElementById("data").textContent);
      const walk = (value, at) => typeof value === "number" ? [at]
        : value && typeof value === "object" ? Object.keys(value).flatMap((key) => walk(value[key],
            at + "/" + key.replace(/~/g, "~0").replace(/\\//g, "~1"))) : [];
      const skipped = ["drawn", "arguments", "versions", "machine"];
      return walk(record, "").filter((at) => !skipped.includes(at.split("/")[1]) && !shown.has(at));
    })()
    """
    assert opened(command).evaluate(missing) == []


@needs_browser
def test_the_keyboard_reaches_the_slider_and_moves_it(opened):
    page = opened("profile")
    for _ in range(40):
        page.press("Tab")
        if page.evaluate("document.activeElement.type") == "range":
            break
    name = page.evaluate("document.activeElement.dataset.panels")
    state = f"""(() => {{ const figure = document.getElementById("{name}"); return [
        figure.querySelector(".stage use").getAttribute("href"),
        figure.querySelector("output").textContent.split(":")[0],
        document.activeElement.getAttribute("aria-valuetext"),
        Array.from(figure.querySelectorAll(".panels > li"), (one) => one.hasAttribute("aria-current")).indexOf(true),
    ]; }})()"""
    assert page.evaluate(state) == [f"#{name}-0", "Step 0", "Step 0", 0]
    page.press("ArrowRight")
    assert page.evaluate(state) == [f"#{name}-1", "Step 1", "Step 1", 1]
    page.press("End")
    assert page.evaluate(state) == [f"#{name}-3", "Step 3", "Step 3", 3]
    page.press("Home")
    assert page.evaluate(state)[3] == 0
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


@needs_browser
def test_tables_and_folds_are_reached_by_the_keyboard(opened):
    page = opened("plan")
    assert page.evaluate("Array.from(document.querySelectorAll('.scroll')).every((one) => one.tabIndex === 0)")
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the numbers"
    for _ in range(60):
        page.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    before = page.evaluate("document.activeElement.parentElement.open")
    page.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.open") != before


@needs_browser
def test_without_scripts_all_steps_stand_beside_each_other(opened):
    page = opened("profile", scripts=False)
    names = [node["name"] for node in page.accessible() if node["role"] == "image"]
    assert sum(name.startswith("Step ") for name in names) == 4
    assert not any(node["role"] == "slider" for node in page.accessible())


@needs_browser
@pytest.mark.parametrize("command", COMMANDS)
def test_a_screen_reader_hears_everything_by_name(opened, command):
    page = opened(command)
    page.evaluate(OPEN_ALL)
    heard_nodes = page.accessible()
    roles = [node["role"] for node in heard_nodes]
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert roles.count(landmark) == 1, landmark
    for node in heard_nodes:
        if node["role"] in ("figure", "image", "region", "slider", "button", "link", "table"):
            assert node["name"] or node["role"] == "table", node
    assert roles.count("figure") >= 2
    levels = page.evaluate("Array.from(document.querySelectorAll('h1, h2, h3'), (one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert page.evaluate(
        "Array.from(document.querySelectorAll('figure')).every((one) => one.querySelector('figcaption'))"
    )
    ids = page.evaluate("Array.from(document.querySelectorAll('[id]'), (one) => one.id)")
    assert len(ids) == len(set(ids))


@needs_browser
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [360, 800, 3840])
def test_nothing_runs_out_of_the_page(opened, command, width):
    page = opened(command, width=width)
    page.evaluate(OPEN_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = """
    Array.from(document.querySelectorAll("main *")).filter((one) => {
      const box = one.getBoundingClientRect();
      return box.right > innerWidth + 1 && box.width > 0 && !one.closest(".scroll, svg, .unseen, .bars thead");
    }).map((one) => one.outerHTML.slice(0, 80))
    """
    assert page.evaluate(wide) == []


@needs_browser
def test_tables_stay_tables_on_a_narrow_page(opened):
    roles = [node["role"] for node in opened("replay", width=360).accessible()]
    assert roles.count("table") + roles.count("LayoutTable") >= 3
    assert roles.count("rowheader") > 5


CONTRAST = """
(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = (top, share, below) => top.map((part, index) => part * share + below[index] * (1 - share));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const paper = numbers(getComputedStyle(document.body).backgroundColor);
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found.slice(0, 3);
    }
    return paper;
  };
  const under = (text) => {
    text.scrollIntoView({ block: "center", behavior: "instant" });
    const box = text.getBoundingClientRect();
    let below = paper;
    for (const one of document.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2).reverse()) {
      const style = getComputedStyle(one);
      if (!(one instanceof SVGGeometryElement) || !style.fill.startsWith("rgb")) continue;
      below = over(numbers(style.fill).slice(0, 3), Number(style.fillOpacity), below);
    }
    return below;
  };
  const found = [], seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !one.checkVisibility()) continue;
    if (one.closest("script, style, .unseen, title")) continue;
    const style = getComputedStyle(one), is_drawn = one instanceof SVGElement;
    const colour = numbers(is_drawn ? style.fill : style.color).slice(0, 3);
    const key = is_drawn ? null : [colour, ground(one)].join();
    if (key !== null && seen.has(key)) continue;
    if (key !== null) seen.add(key);
    found.push([ratio(colour, is_drawn ? under(one) : ground(one)), one.outerHTML.slice(0, 120)]);
    if (found.length > 900) break;
  }
  return found;
})()
"""


@needs_browser
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_in_light_and_dark(opened, command, dark):
    page = opened(command, dark=dark)
    found = page.evaluate(CONTRAST)
    assert len(found) > 20
    assert [one for one in found if one[0] < 4.5] == []


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_shapes_stand_out_from_the_paper(opened, dark):
    page = opened("plan", dark=dark)
    colour = "getComputedStyle(document.documentElement).getPropertyValue('--{}')"
    paper = page.evaluate(colour.format("paper"))
    for name in ("ink", "soft", *(f"r{index}" for index in range(8))):
        assert contrast(paper, page.evaluate(colour.format(name))) >= 4.5, name


def contrast(a, b):
    dim, bright = sorted(map(luminance, (a, b)))
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour):
    parts = [int(colour.strip()[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@needs_browser
def test_dark_is_dark_light_is_light_and_paper_is_white(opened):
    page = opened("plan")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.show_as(dark=True)
    assert page.evaluate(ground) != light
    page.show_as(dark=True, media="print")
    assert page.evaluate(ground) == "rgba(0, 0, 0, 0)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"


@needs_browser
def test_the_record_can_be_saved(opened):
    page = opened("replay")
    page.evaluate("""
    HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, fetchable(this.href)]; };
    window.fetchable = (href) => href.startsWith("blob:");
    document.getElementById("save").click();
    """)
    assert page.evaluate("window.saved") == ["longring-replay.json", True]
    assert page.evaluate("document.getElementById('save').hidden") is False
    assert page.complaints == []
