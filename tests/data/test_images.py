"""A folder of images as data: taken in turns, prepared as the model's own processor does, bad ones refused by name."""

import json

import numpy as np
import pytest
import torch

import crystallite as cx
from crystallite.cli.main import main
from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.data.files import read_data
from tests.helpers.tiny_transformers import VISION, build

Image = pytest.importorskip("PIL.Image", reason="needs pillow")


def painted(path, value, size=(12, 10)):
    path.parent.mkdir(exist_ok=True)
    noise = np.random.default_rng(value).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    noise[0, 0] = value
    Image.fromarray(noise).save(path)
    return noise


@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        painted(tmp_path / "images" / "cats" / f"{i}.png", i) if i else (tmp_path / "images").mkdir()
    for i in range(2):
        painted(tmp_path / "images" / "dogs" / f"{i}.PNG", 100 + i)
    (tmp_path / "images" / "notes.txt").write_text("not an image")
    return tmp_path / "images"


def firsts(data):
    return [round(float(x[0, 0, 0]) * 255) for batch in data for x in batch]


def test_pixels_of_all_folders_in_turns(folder):
    data = cx.images(folder, batch=3)
    assert firsts(data) == [1, 100, 2, 101, 3, 4, 5]
    assert [tuple(x.shape) for x in data] == [(3, 3, 10, 12)] * 2 + [(1, 3, 10, 12)]
    assert len(data) == 3
    assert firsts(data) == firsts(data)  # goes through again
    assert repr(data) == f"{folder}: 7 images"
    whole = torch.cat(list(data))
    assert 0 <= whole.min() < whole.max() <= 1


def test_some_of_them_spread_evenly(folder):
    data = cx.images(folder, samples=3)
    assert firsts(data) == [1, 101, 5]
    assert repr(data).endswith("3 images, 4 left out")


def test_resized_or_by_a_function(folder):
    painted(folder / "wide.png", 7, (30, 5))
    with pytest.raises(InvalidOption, match=r"several sizes, 10×12 and 5×30 \(wide.png\)|5×30 and 10×12"):
        cx.images(folder)
    assert {tuple(x.shape[1:]) for x in cx.images(folder, size=(4, 6))} == {(3, 4, 6)}
    assert {tuple(x.shape[1:]) for x in cx.images(folder, lambda image: torch.zeros(image.size[0] * 0 + 2))} == {(2,)}
    with pytest.raises(InvalidOption, match=r"one shape for all images, got \(12,\), \(30,\)"):
        list(cx.images(folder, lambda image: torch.zeros(image.size[0])))


def vision_model(place, name="vit"):
    build(name).save_pretrained(place)
    size = VISION[name][1]["image_size"]
    (place / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": size, "width": size},
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3, "resample": 0}))  # fmt: skip
    return size


def test_as_the_processor_of_the_model_prepares_them(tmp_path):
    size = vision_model(tmp_path / "model")
    pixels = painted(tmp_path / "images" / "a.png", 3, (size, size))
    (batch,) = cx.images(tmp_path / "images", tmp_path / "model")
    expected = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - 0.5) / 0.25
    torch.testing.assert_close(batch["pixel_values"], expected[None])
    (again,) = read_data(tmp_path / "images", 4, tmp_path / "model")
    assert torch.equal(again["pixel_values"], batch["pixel_values"])


def test_compressed_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vision_model(tmp_path / "model")
    for i in range(30):
        painted(tmp_path / "images" / f"{i}.jpg", i, (40, 36))
    words = "compress model --calibration images --budget 0.8 --out small --batch 10 --ignore classifier"
    assert main(words.split()) == 0, capsys.readouterr().err
    assert "images: 30 images\n" in capsys.readouterr().err
    assert (tmp_path / "small" / "config.json").exists()


def test_bad_folders_are_refused_by_name(folder, tmp_path):
    with pytest.raises(InvalidOption, match="none: no such folder"):
        cx.images(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidOption, match=r"at least 1 images .* found 0"):
        cx.images(tmp_path / "empty")
    with pytest.raises(InvalidOption, match=r"at least 9 images .* found 7"):
        cx.images(folder, least=9)
    with pytest.raises(InvalidOption, match="no image processor in this folder"):
        cx.images(folder, tmp_path / "empty")
    with pytest.raises(InvalidOption, match="size= is for images without a processor="):
        cx.images(folder, torch.ones, size=3)
    with pytest.raises(InvalidOption, match="one folder of images and nothing beside it, got 2 paths"):
        read_data([folder, folder], 4)
    # as a download that was cut off, and as no image at all
    (folder / "cats" / "6.png").write_bytes((folder / "cats" / "5.png").read_bytes()[:-300])
    with pytest.raises(CheckpointError, match=r"6.png: expected an image that Pillow reads"):
        list(cx.images(folder, size=4))
    (folder / "cats" / "6.png").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"6.png: expected an image"):
        cx.images(folder)
