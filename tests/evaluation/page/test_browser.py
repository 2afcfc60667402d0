"""The page in a browser: it opens from a file, asks for nothing, complains about nothing, and can be worked.

Needs playwright and a Chromium, its own or the system's; skips without.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.evaluation.page.build import write_page
from fovea.evaluation.page.entries import find_entries
from tests.evaluation.page.made_up import job, keep_trajectories

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

#: Names of a Chromium that a system may have.
SYSTEM = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = own if Path(own).is_file() else next(filter(None, map(shutil.which, SYSTEM)), None)
        if found is None:
            pytest.skip("no Chromium: playwright install chromium, or the system's package")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for name, better in (("fovea", 1), ("pld", 0)):
        keep_trajectories(job(folder / name, name, better=better) / "evaluation" / "final")
    return write_page(find_entries([folder])[0], folder / "page.html")[0]


class Opened:
    """A page, and what it said and asked for meanwhile."""

    def __init__(self, page: sync_api.Page, file: Path) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(file.as_uri())

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["desktop", "phone"])
def opened(browser, file, request) -> Iterator[Opened]:
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    opened = Opened(page, file)
    yield opened
    page.close()
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("data:")] == [file.as_uri()]


def test_it_fits_the_screen_and_follows_its_scheme(opened):
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")


def test_buttons_keys_and_slider_step_through_the_answer(opened):
    page = opened.page
    assert opened.text("#place") == "round 1 of 2"
    assert opened.texts("#answer span") == ["<b>A</b>", " red", " box", "</s>"]
    assert page.locator("#previous").is_disabled()
    page.click("#next")
    assert opened.text("#place") == "round 2 of 2"
    assert opened.texts("#answer span") == ["<b>A</b> red box", "", "</s>", ""]
    assert page.locator("#next").is_disabled()
    page.keyboard.press("ArrowLeft")
    assert opened.text("#place") == "round 1 of 2"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert opened.text("#place") == "round 2 of 2"
    page.click("#first")
    assert opened.text("#place") == "round 1 of 2"
    page.click("#last")
    assert opened.text("#place") == "round 2 of 2"
    page.locator("#slider").fill("0")
    assert opened.text("#place") == "round 1 of 2"
    page.locator("#tree").focus()
    page.keyboard.press("End")
    assert opened.text("#place") == "round 2 of 2"


def test_the_tree_shows_what_was_accepted_and_what_was_said_instead(opened):
    assert opened.texts("#tree .node.root text") == ["<b>A</b>"], "text of a token is never markup"
    assert opened.texts("#tree .node.accepted text") == [" red", "61%"]
    assert opened.texts("#tree .node.said text") == [" box"]
    assert opened.texts("#tree .node.rejected text") == [" blue", "37%", " cat", "22%"]
    assert opened.page.locator("#tree path.edge").count() == 4
    assert "3 drafted, 1 accepted, 2 committed" in opened.text("#tree-caption")
    opened.page.click("#next")
    assert opened.texts("#tree .node text") == [" box", "␣", "■ end"], "no percentage where the drafter knows none"
    rejected = opened.page.locator("#tree .node.rejected")
    assert rejected.get_attribute("aria-label") == "␣, rejected"


def test_a_pointer_on_a_point_is_told_its_figures(opened):
    told = opened.page.locator("#plot-speed-against-tau .told").first
    assert told.locator("title").text_content().startswith(("fovea: tau ", "pld: tau "))
    assert told.evaluate("element => getComputedStyle(element).cursor") == "help"


def test_a_chosen_node_tells_its_evidence_and_the_targets_word(opened):
    page = opened.page

    def cells() -> list[tuple[float, float]]:
        found = page.locator("#pictures .cell")
        return [(float(cell.get_attribute("x")), float(cell.get_attribute("y"))) for cell in found.all()]

    assert cells() == [(20, 0), (40, 20)], "cells 1 and 5 of 2 x 3 on 60 x 40 pixels"
    heavy, light = (float(cell.get_attribute("fill-opacity")) for cell in page.locator("#pictures .cell").all())
    assert heavy > light
    page.locator('#tree .node[data-row="1"]').click()
    assert cells() == [(40, 0)]
    assert "“ red”: 1 of 6" in opened.text("#evidence-caption")
    page.locator('#tree .node[data-row="2"]').focus()
    page.keyboard.press("Enter")
    assert cells() == [(20, 0), (40, 20)], "a node without evidence shows that of its parent"
    told = page.locator("#detail").text_content()
    assert "was rejected" in told
    assert "most probable token is  sky" in told
    page.click("#next")
    assert cells() == []
    assert "Nothing was retrieved" in opened.text("#evidence-caption")


def test_another_question_and_another_method_are_chosen(opened):
    page = opened.page
    assert opened.text("#question") == "What </script> is it?"
    page.select_option("#pick-prompt", label="And without a picture?")
    assert opened.text("#question") == "And without a picture?"
    assert page.locator("#pictures svg").count() == 0
    page.select_option("#pick-entry", label="pld")
    assert opened.text("#question") == "And without a picture?", "the same question of the other method"
    assert page.locator("#pick-entry").evaluate("select => select.selectedOptions[0].text") == "pld"


def test_columns_sort_by_their_numbers(opened):
    page = opened.page
    names = page.locator("#comparison table").first.locator("tbody th")
    assert names.all_text_contents() == ["fovea", "pld"]
    tau = page.locator("#comparison").get_by_role("button", name="tau", exact=True)
    tau.click()
    assert names.all_text_contents() == ["fovea", "pld"]
    tau.click()
    assert names.all_text_contents() == ["pld", "fovea"]
    assert page.locator("th[aria-sort=ascending]").count() == 1
