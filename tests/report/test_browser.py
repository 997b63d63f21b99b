"""The report in a real browser: drawn, filtered, coloured, reached by keyboard, harmless, and fast enough."""

from __future__ import annotations

import json
import threading
import time

import pytest
from color_vision import CONE_LOSS, contrast, distance, linear, luminance, seen
from made_runs import make_run, rollout, write_metrics, write_samples, write_timeline

browser = pytest.importorskip("browser", reason="selenium is not installed")
from browser import WAIT_S, count, css, until  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

from lit_async_rl.report import write_report  # noqa: E402
from lit_async_rl.report.run_data import RunData  # noqa: E402
from lit_async_rl.report.server import ReportServer  # noqa: E402

pytestmark = pytest.mark.skipif(not browser.is_there and not browser.IS_NEEDED, reason=browser.MISSING)
HOSTILE = (
    "<img src=x onerror=\"window.hacked='img'\"><script>window.hacked='script'</script></script>"
    "<style>body{display:none}</style>{{constructor.constructor('window.hacked=1')()}}${window.hacked=2}"
    "\x1b[31mred\x1b[0m\x00\x07\u202eright to left\u2066\u200b\u2028"
)
DRAWN = """
return [...document.querySelectorAll("#view .chart")].map((box) => {
  const canvas = box.querySelector("canvas"), colours = new Set();
  if (!canvas) return 0;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 200) colours.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
  return colours.size;
});
"""


@pytest.fixture(scope="module")
def driver():
    with browser.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "quick" / "v0")
    with (run / "samples.jsonl").open("a") as file:
        mask = [1, 1, 1, 0, 0, 1]
        turns = [{"end": 3, "reward": 0.0, "state": 0}, {"end": 6, "reward": 1.0, "state": 1}]
        words = ["[1+1]", "<call>", "\n", "2", ":", "two"]
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
        talk = rollout(50, 900, 0, 6, tokens=words, mask=mask, turns=turns, messages=messages, prompt="1+1?")
        file.write(json.dumps(talk) + "\n")
        long = HOSTILE * (100_000 // len(HOSTILE) + 1)
        row = rollout(51, 901, 0, prompt=HOSTILE, completion=long, answer=HOSTILE)
        del row["tokens"]
        file.write(json.dumps(row) + "\n")
        file.write(json.dumps(rollout(51, 901, 1, 3, tokens=[HOSTILE, "</div>", "x"], prompt=HOSTILE)) + "\n")
    (run / "config.yaml").write_text(HOSTILE.replace("\x00", ""))
    return write_report(run, out=folder / "report.html")


@pytest.fixture(autouse=True)
def desktop(driver):
    browser.resize(driver, 1440, 900)
    browser.errors(driver)


def color(driver, name: str):
    return linear(driver.execute_script("report.forgetColors(); return report.color(arguments[0])", name))


def all_drawn(driver) -> bool:
    found = driver.execute_script(DRAWN)
    return bool(found) and all(number > 3 for number in found)


@pytest.mark.slow
def test_all_views_are_drawn_without_an_error(driver, report):
    browser.resize(driver, 1440, 4000)  # charts are drawn when they are seen
    for tab in ("overview", "curves", "pipeline", "rollouts", "compare"):
        browser.show(driver, report, tab)
        until(driver, "document.querySelector('#view').children.length")
        if tab in ("overview", "curves", "pipeline"):
            WebDriverWait(driver, WAIT_S, 0.1).until(all_drawn)
    assert browser.errors(driver) == []
    browser.show(driver, report, "curves")
    until(driver, "document.querySelectorAll('#view .chart canvas').length >= 10")
    Select(css(driver, "#metric")).select_by_value("sample/total_tokens")
    Select(css(driver, "#smoothing")).select_by_value("20")
    WebDriverWait(driver, WAIT_S, 0.1).until(all_drawn)
    assert browser.errors(driver) == []


@pytest.mark.slow
def test_printing_draws_charts_that_have_not_come_into_view(driver, report):
    browser.resize(driver, 1440, 300)
    browser.show(driver, report, "curves")
    until(driver, "document.querySelectorAll('#view .chart').length >= 10")
    drawn = "document.querySelectorAll('#view .chart canvas').length"
    assert driver.execute_script(f"return {drawn}") < 10
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert driver.execute_script(f"return {drawn} === document.querySelectorAll('#view .chart').length")
    options = "[...document.querySelectorAll('#view .chart')].map(c => echarts.getInstanceByDom(c).getOption())"
    assert driver.execute_script(f"return {options}.every(o => o.yAxis[0].name && o.legend[0].type === 'plain')")


@pytest.mark.slow
def test_fine_tuning_has_losses_and_no_verdict(driver, tmp_path):
    rows = ["step,train/loss,val/loss,val/token_accuracy", "0,,4.4,0.1", "0,4.3,,", "1,3.9,,", "2,,3.5,0.3"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    browser.show(driver, write_report(tmp_path, out=tmp_path / "report.html"))
    until(driver, "document.querySelectorAll('#view .chart canvas').length === 2")
    figures = [element.text for element in driver.find_elements("css selector", "#view figcaption")]
    assert [text.split()[0] for text in figures] == ["Loss", "Held-out"]
    assert count(driver, "#view .verdict") == 0
    assert "held-out loss, first and last 4.400, 3.500" in css(driver, "#view .numbers").text


@pytest.mark.slow
def test_a_reward_that_is_the_accuracy_is_drawn_once(driver, report):
    figure = "[...document.querySelectorAll('figure')].find(f => f.textContent.startsWith('Held-out'))"
    chart = f"{figure}.querySelector('.chart')"
    browser.show(driver, report, "curves")
    until(driver, "document.querySelector('#view .chart')")
    until(driver, f"{chart}.querySelector('canvas')")
    names = f"echarts.getInstanceByDom({chart}).getOption().series.map(s => s.name)"
    assert driver.execute_script(f"return {names}") == ["val/pass@1"]


def test_filters_and_colours_of_tokens(driver, report):
    browser.show(driver, report, "rollouts")
    until(driver, "document.querySelector('#found')")
    assert css(driver, "#found").text == "323 of 323 rollouts"
    css(driver, "#max-step").send_keys("10")
    css(driver, "#min-reward").send_keys("1")
    until(driver, "document.querySelector('#found').textContent.startsWith('40 of')")
    assert {e.text for e in driver.find_elements("css selector", ".entry .reward")} == {"reward 1"}
    css(driver, "#min-staleness").send_keys("4")
    until(driver, "document.querySelector('#found').textContent.startsWith('0 of') === false")
    tokens = "[...document.querySelectorAll('.rollout .t')].map(t => getComputedStyle(t).backgroundColor)"
    shown = dict(version="> 1", ratio="> 4", advantage="> 0", mask="> 0", entropy="> 4", none="=== 1")
    for mode, colours in shown.items():
        Select(css(driver, "#mode")).select_by_value(mode)
        until(driver, f"new Set({tokens}).size {colours}")  # the page draws in a frame of its own, and colours fade
        until(driver, f"(document.querySelectorAll('.legend li').length > 0) === {str(mode != 'none').lower()}")
    assert browser.errors(driver) == []


def test_keyboard(driver, report):
    browser.show(driver, report)
    until(driver, "document.querySelector('#tab-overview')")
    css(driver, "#tab-overview").send_keys(Keys.ARROW_RIGHT)
    driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert driver.switch_to.active_element.get_attribute("id") == "tab-pipeline"
    until(driver, "document.querySelector('.gantt canvas')")
    zoomed = "echarts.getInstanceByDom(document.querySelector('.gantt .chart')).getOption().dataZoom[0]"
    span = f"{zoomed}.endValue - {zoomed}.startValue"
    whole = driver.execute_script(f"return {span}")
    css(driver, ".gantt").send_keys("+")
    assert driver.execute_script(f"return {span}") == pytest.approx(whole / 2, rel=0.05)
    css(driver, ".gantt").send_keys(Keys.ARROW_LEFT, "0")
    assert driver.execute_script(f"return {span}") == pytest.approx(whole, rel=0.01)
    css(driver, "#tab-pipeline").send_keys(Keys.ARROW_RIGHT)
    css(driver, "#text").send_keys("held")
    until(driver, "document.querySelector('#found').textContent.startsWith('0 of')")
    css(driver, "#text").send_keys(Keys.BACKSPACE * 4)
    until(driver, "document.querySelector('.entry')")
    next(e for e in driver.find_elements("css selector", ".entry") if "step 40" in e.text).send_keys(Keys.ENTER)
    box = until(driver, "document.querySelector('.tokens')")
    box.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "token 2 · version" in css(driver, "#token").text
    assert "importance ratio" in css(driver, "#token").text


def test_conversation_and_comparison(driver, report):
    browser.show(driver, report, "rollouts")
    css(driver, "#min-step").send_keys("50")
    css(driver, "#max-step").send_keys("50")
    until(driver, "document.querySelector('#found').textContent.startsWith('1 of')")
    roles = [role.text for role in driver.find_elements("css selector", ".role")]
    assert roles == ["system", "user", "policy, turn 1 · reward 0", "tool or environment", "policy, turn 2 · reward 1"]
    assert css(driver, ".bubble.tool .tokens").text == "2:"
    browser.show(driver, report, "compare")
    until(driver, "document.querySelector('.completion')")
    assert [box.text for box in driver.find_elements("css selector", ".completion")] == ["at step 0", "at step 40"]


def test_hostile_text_is_shown_harmlessly(driver, report):
    browser.show(driver, report, "rollouts")
    until(driver, "document.querySelector('.rollout .text')")
    text = css(driver, ".rollout .text").text
    assert text.startswith("<img src=x onerror=")
    assert "␛[31mred" in text
    assert "⟨U+202E⟩right to left" in text
    began = time.monotonic()
    css(driver, ".rollout .more").click()
    until(driver, "document.querySelector('.rollout .text').textContent.length > 100000")
    assert time.monotonic() - began < 20
    assert count(driver, ".rollout .t") == 3
    assert driver.execute_script("return window.hacked") is None
    assert count(driver, "#app img, #app script, #app style") == 0
    browser.show(driver, report)
    css(driver, "details summary").click()
    assert "<script>" in css(driver, "pre").text
    assert driver.execute_script("return window.hacked") is None
    assert browser.errors(driver) == []


@pytest.mark.parametrize("dark", [False, True])
def test_phone_and_contrast(driver, report, dark):
    browser.resize(driver, 390, 844, dark)
    for tab in ("overview", "curves", "pipeline", "rollouts", "compare"):
        browser.show(driver, report, tab)
        until(driver, "document.querySelector('#view').children.length")
        for box in ("document.documentElement", "document.querySelector('[role=tablist]')"):
            assert driver.execute_script(f"return {box}.scrollWidth") <= 390, (tab, box)
    ranges = (("v", 6), ("n", 4), ("p", 4), ("s", 6))
    names = [f"--{kind}{n}" for kind, last in ranges for n in range(kind in "np", last)]
    pairs = [("--text", name) for name in (*names, "--page", "--panel", "--span", "--aside", "--reward")]
    pairs += [(name, "--panel") for name in ("--muted", "--accent")] + [("--muted", "--page")]
    for text, ground in pairs:
        assert contrast(color(driver, text), color(driver, ground)) >= 4.5, (text, ground)
    for line in ("--c0", "--c1", "--c2", "--c3"):
        assert contrast(color(driver, line), color(driver, "--panel")) >= 3, line
    assert (luminance(color(driver, "--page")) < 0.1) == dark
    for ends in (("--n3", "--p3"), ("--n2", "--p2"), ("--c0", "--c1")):
        for kind in CONE_LOSS:
            assert distance(*(seen(kind, color(driver, name)) for name in ends)) > 0.15, (kind, ends)


def test_theme_can_be_chosen(driver, report):
    browser.show(driver, report)
    Select(css(driver, "#theme")).select_by_value("dark")
    assert luminance(color(driver, "--page")) < 0.1
    Select(css(driver, "#theme")).select_by_value("light")
    assert luminance(color(driver, "--page")) > 0.8


@pytest.mark.slow
def test_the_live_page_follows_the_run(driver, tmp_path):
    run = make_run(tmp_path / "run" / "v0", steps=3)
    server = ReportServer(RunData(run), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        driver.get(f"{server.address}#rollouts")
        until(driver, "document.querySelector('#found')")
        assert css(driver, "#found").text == "24 of 24 rollouts"
        with (run / "samples.jsonl").open("a") as file:
            file.write(json.dumps(rollout(4, 70, 0, prompt="a new prompt")) + "\n")
        until(driver, "document.querySelector('#found').textContent.startsWith('25 of')")
        assert "a new prompt" in css(driver, "#group").text
        assert css(driver, "#state").text.startswith("live")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    assert browser.errors(driver) == []
    until(driver, "document.querySelector('#state').textContent.includes('has ended')")
    driver.get("about:blank")  # or it asks on, in vain


@pytest.mark.slow
def test_a_long_run_answers_at_once(driver, tmp_path):
    write_metrics(tmp_path, 3000)
    write_samples(tmp_path, 600, 16, tokens=60)
    write_timeline(tmp_path, 1500, 2, more=8)
    browser.resize(driver, 1440, 900)
    browser.show(driver, write_report(tmp_path, out=tmp_path / "report.html"))
    until(driver, "document.querySelector('#view')")
    for name, action in browser.INTERACTIONS.items():
        taken = [driver.execute_async_script(browser.TIMED, action) for _ in range(3)]
        assert min(taken) < 200, (name, taken)
    assert browser.errors(driver) == []
