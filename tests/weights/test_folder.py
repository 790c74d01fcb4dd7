"""Folders of weights: what an index or a link names must lie inside, and must fit what the index says."""

import json

import pytest
import torch
from safetensors.torch import save_file

from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint


def test_several_weights_files_are_not_guessed_between(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.ones(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors; name the one you mean"):
        open_checkpoint(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A model folder, and a secret outside it that no index may reach."""
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("../secret.safetensors", "a file in the same folder"),
        ("sub/../../secret.safetensors", "a file in the same folder"),
        ("..\\secret.safetensors", "a file in the same folder"),
        ("/etc/passwd", "a file in the same folder"),
        ("C:\\secret.safetensors", "a file in the same folder"),
        ("", "a file in the same folder"),
        ("a\0b", "a file in the same folder"),
        ("link.safetensors", "a link that leaves it"),
        ("linked/secret.safetensors", "a link that leaves it"),
        ("circle", "a readable file|Too many levels|symbolic"),
        ("missing.safetensors", "No such file"),
        (7, "file names in weight_map"),
    ],
)
def test_an_index_cannot_leave_its_folder(folder, shard, message):
    (folder / "link.safetensors").symlink_to("../secret.safetensors")
    (folder / "linked").symlink_to("..")
    (folder / "circle").symlink_to("circle")
    write_index(folder, {"w": shard})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_cache_lookalike_gives_no_way_out(tmp_path):
    """Links may lead to the blobs of their own `models--…` folder, not to another's."""
    for name in ("models--a", "models--b"):
        (tmp_path / name / "blobs").mkdir(parents=True)
        save_file({"w": torch.ones(1)}, tmp_path / name / "blobs" / "1")
    snapshot = tmp_path / "models--a" / "snapshots" / "x"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(tmp_path / "models--b" / "blobs" / "1")
    with pytest.raises(CheckpointError, match="a link that leaves it"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_links_out_of_the_folder_are_refused(folder, name):
    if name == "config.json":
        save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    (folder / name).symlink_to("../secret.safetensors")
    with pytest.raises(CheckpointError, match="a link that leaves it"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "a weight_map"),
        ("[]", "a JSON object"),
        ('{"weight_map": []}', "a weight_map"),
        ('{"weight_map": {"w": "a", "w": "b"}}', "twice"),
        ('{"weight_map": {"v": "one.safetensors"}}', "tensor 'v' in one.safetensors"),
        ('{"weight_map": {"w": "one.safetensors", "x": "two.safetensors"}}', "again in two"),
        ("{", "in JSON"),
    ],
)
def test_indexes_that_do_not_fit_their_shards(folder, index, message):
    save_file({"w": torch.ones(2)}, folder / "one.safetensors")
    save_file({"w": torch.ones(2), "x": torch.ones(2)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("config", ["not json", "[1]", '{"a": 1, "a": 2}'])
def test_broken_config_is_said(folder, config):
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)
