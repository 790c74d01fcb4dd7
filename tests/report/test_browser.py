"""The page in Chromium: what a reader sees, hears and presses."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from crystallite.report import build, report
from crystallite.structure.levels import level_profile
from tests.helpers.reports import HOSTILE, planted_blocks


def numbers(page):
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#level-numbers dd')]"
        ".map(e => [e.dataset.name, Number(e.dataset.value)]))"
    )


def picture(page, name):
    return page.evaluate(f"document.getElementById('{name}').toDataURL()")


def open_layer(page, name):
    page.get_by_role("button", name=name, exact=True).click()
    assert page.locator("#detail-name").inner_text() == name


def check_level(page, profile, weight):
    shown = numbers(page)
    level = profile.at(shown["Threshold |w| ≥"])
    assert shown["Blocks"] == level.n_blocks
    assert shown["Largest block"] == level.largest_share
    assert (shown["Dormant inputs"], shown["Dormant outputs"]) == level.dormant
    assert shown["Weights kept"] == int((weight.abs().double() >= shown["Threshold |w| ≥"]).sum())


@pytest.mark.parametrize("name", ["first", "hubs", "noise"])
def test_numbers_at_every_stop_are_those_of_the_profile(visit, page_path, planted, name):
    page = visit(page_path)
    open_layer(page, name)
    weight = planted.get_submodule(name).weight.detach()
    profile = level_profile(weight)
    slider = page.get_by_role("slider", name="Threshold")
    slider.focus()
    page.keyboard.press("Home")
    pictures, sentences = set(), set()
    for _ in range(8):
        check_level(page, profile, weight)
        pictures.add(picture(page, "leveled"))
        sentences.add(slider.get_attribute("aria-valuetext"))
        for _ in range(20):
            page.keyboard.press("ArrowRight")
    assert len(pictures) > 4
    assert len(sentences) > 4
    page.keyboard.press("End")
    check_level(page, profile, weight)
    page.get_by_role("button", name="Analysed level").click()
    check_level(page, profile, weight)


def test_feedback_numbers_are_those_of_the_directed_profile(visit, page_path, planted):
    page = visit(page_path)
    open_layer(page, "cell.weight_hh_l0")
    gates = planted.cell.weight_hh_l0.detach().abs().view(4, 20, 20).amax(0)
    page.get_by_role("slider").focus()
    page.keyboard.press("Home")
    for _ in range(10):
        shown = numbers(page)
        at = level_profile(gates, "directed", thresholds=[shown["Threshold |w| ≥"]])
        assert shown["Strongly connected parts"] == at.n_scc[0]
        assert shown["Weak components"] == at.n_components[0]
        assert shown["Layers"] == at.n_layers[0]
        assert shown["Isolated neurons"] == at.isolated[0]
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
    assert "strongly connected components in 2 layers" in page.get_by_role("img", name="Condensation").get_attribute(
        "aria-label"
    )


def test_block_outlines_lie_around_the_weights(visit, page_path):
    """In the reordered picture of a planted layer nothing is drawn outside the outlined rectangles."""
    images = pytest.importorskip("PIL.Image", reason="needs Pillow")
    page = visit(page_path)
    open_layer(page, "first")
    data = base64.b64decode(picture(page, "after").partition(",")[2])
    image = np.asarray(images.open(io.BytesIO(data)).convert("RGB")).astype(int)
    red = np.abs(image - [0xB3, 0x32, 0x3F]).sum(2) < 12
    drawn = np.abs(image - 255).sum(2) > 12
    bounds = [160, 320, 480]  # four blocks of 20 × 24 in 80 × 96
    for b in bounds:
        assert red[b - 4 : b + 4, 20:].any()
    inside = np.zeros((640, 640), bool)
    for start in (0, 160, 320, 480):
        inside[max(0, start - 10) : start + 170, max(0, start - 10) : start + 170] = True
    assert drawn[inside].mean() > 0.4
    assert not drawn[~inside].any()


def test_tables_sort_by_keyboard(visit, page_path):
    page = visit(page_path)

    def column(index):
        return page.eval_on_selector_all(
            "#layer-table tbody tr", f"rows => rows.map(r => r.cells[{index}].dataset.value)"
        )

    for title, index, key in (("Blocks", 2, float), ("Matrix", 0, str), ("Kept", 4, float)):
        head = page.locator("#layer-table").get_by_role("columnheader", name=title)
        head.get_by_role("button").focus()
        page.keyboard.press("Enter")
        rising = [key(v) for v in column(index)]
        assert rising == sorted(rising)
        assert head.get_attribute("aria-sort") == "ascending"
        page.keyboard.press("Enter")
        assert [key(v) for v in column(index)] == sorted(rising, reverse=True)
        assert head.get_attribute("aria-sort") == "descending"
    assert page.locator("[aria-sort]").count() == 1


def test_layers_open_by_keyboard_and_step_in_the_order_of_the_table(visit, page_path):
    page = visit(page_path)
    page.get_by_role("button", name="second", exact=True).focus()
    page.keyboard.press("Enter")
    assert page.locator("#detail-name").inner_text() == "second"
    assert page.evaluate("document.activeElement.id") == "detail-name"
    assert page.locator("tr[aria-current] th").inner_text() == "second"
    before = picture(page, "before")
    page.get_by_role("button", name="Next layer").click()
    assert page.locator("#detail-name").inner_text() == "hubs"
    assert picture(page, "before") != before
    page.get_by_role("button", name="Previous layer").click()
    assert page.locator("#detail-name").inner_text() == "second"


def test_filter_leaves_the_layers_that_match(visit, page_path):
    page = visit(page_path)
    page.get_by_label("Show layers whose name has").fill("CELL")
    shown = page.locator("#layer-table tbody tr:visible th").all_inner_texts()
    assert shown == ["cell.weight_ih_l0", "cell.weight_hh_l0"]


def test_skip_link_comes_first(visit, page_path):
    page = visit(page_path)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the layers"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_accessible_on_phone_and_desktop_in_light_and_dark(visit, page_path, axe, width, scheme):
    page = visit(page_path, width, scheme)
    page.locator("details").evaluate_all("all => all.forEach(d => d.open = true)")
    open_layer(page, "cell.weight_hh_l0")  # has every kind of chart
    page.evaluate(axe)
    found = page.evaluate("axe.run().then(r => r.violations)")
    assert [(v["id"], v["nodes"][0]["html"]) for v in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_nothing_moves_while_the_page_loads_or_the_slider_does(visit, page_path):
    page = visit(page_path)
    page.evaluate(
        "window.shift = 0; new PerformanceObserver(list => list.getEntries().forEach(e => window.shift += e.value))"
        ".observe({type: 'layout-shift', buffered: true})"
    )
    slider = page.get_by_role("slider")
    slider.focus()
    for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
        page.keyboard.press(key)
    page.wait_for_timeout(200)
    assert page.evaluate("window.shift") == 0


def test_hostile_names_are_only_text(visit, tmp_path):
    path = report({HOSTILE: planted_blocks(32, 32, 2)}, title=HOSTILE).save(tmp_path / "hostile.html")
    page = visit(path)
    page.on("dialog", lambda dialog: pytest.fail(f"a name ran: {dialog.message}"))
    open_layer(page, HOSTILE)
    assert page.locator("img[src=x]").count() == 0
    assert page.title() == HOSTILE


def test_notebooks_run_the_page_in_its_frame(browser, full_report):
    page = browser.new_page()
    page.set_content(full_report._repr_html_())
    frame = page.frame_locator("iframe")
    frame.get_by_role("button", name="second", exact=True).click()
    assert frame.locator("#detail-name").inner_text() == "second"
    page.close()


def test_a_checkpoint_without_matrices_says_so(browser, tmp_path):
    path = report({"bias": torch.ones(4)}).save(tmp_path / "empty.html")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.get_by_role("heading", level=1).inner_text() == "No matrix of weights was found."
    page.close()


def test_dark_mode_redraws_the_pictures(visit, page_path):
    page = visit(page_path)
    light = picture(page, "before")
    page.emulate_media(color_scheme="dark")
    for _ in range(300):  # a busy machine may take its time
        if picture(page, "before") != light:
            return
        page.wait_for_timeout(100)
    pytest.fail("the picture is that of the light page")


def test_a_thousand_layers_open(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_MOST_CELLS", build._FEWEST_CELLS)  # as many cells as each of a thousand layers gets
    generator = torch.Generator().manual_seed(0)
    few = report({f"layer.{i}.weight": torch.randn(96, 64, generator=generator) for i in range(10)})
    views = [
        replace(view, row=replace(view.row, name=f"stage.{i}.{view.row.name}"))
        for i in range(100)
        for view in few.views
    ]
    many = replace(few, views=views, analysis=replace(few.analysis, rows=[view.row for view in views]))
    page = visit(many.save(tmp_path / "large.html"))
    assert page.locator("#layer-table tbody tr").count() == 1000
    open_layer(page, views[-1].row.name)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_result_of_every_rebuilt_model_comes_first(visit, page_path, width):
    page = visit(page_path, width)
    order = page.eval_on_selector_all("main > section h2", "all => all.map(h => h.textContent)")
    assert order[:3] == ["Before and after", "Layers that were rebuilt: exact", "Layers that were rebuilt: fitted"]
    assert order.index("What to do next") < order.index("What the tests say of the original")
    assert page.get_by_role("img", name="first, 80 × 96: 4 blocks").count() == 1
    table = page.get_by_role("region", name="The original and what was made of it")
    assert table.get_by_role("columnheader").all_inner_texts() == ["original", "exact", "fitted"]
    if width == 1280:  # nothing is cut
        wide = page.eval_on_selector_all(".scroll", "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length")
        assert wide == 0


def test_layer_names_can_be_copied(visit, page_path):
    page = visit(page_path)
    page.locator("#layer-table tbody th").first.evaluate("e => getSelection().selectAllChildren(e)")
    assert page.evaluate("getSelection().toString()").strip() == "first"
