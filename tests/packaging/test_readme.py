"""README on a package index, where a relative link would lead nowhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELATIVE = r"\]\((?!https?:|#)[^)]*\)"


@pytest.fixture(scope="module")
def for_package_index():
    spec = importlib.util.spec_from_file_location("crystallite_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.for_package_index


def test_no_relative_link_is_left(for_package_index):
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(RELATIVE, text)) > 10
    for repository in (None, "https://example.org/us/crystallite/"):
        assert re.findall(RELATIVE, for_package_index(text, repository)) == []


def test_links_are_made_absolute_where_the_address_is_known(for_package_index):
    text = "a [page](docs/a.md#b), ![picture](docs/p.svg) and [far](https://far.org), [here](#here)"
    assert for_package_index(text, "https://example.org/us/it") == (
        "a [page](https://example.org/us/it/blob/main/docs/a.md#b), ![picture](https://example.org/us/it/raw/main/docs/p.svg)"
        " and [far](https://far.org), [here](#here)"
    )
    assert for_package_index(text, None) == "a page,  and [far](https://far.org), [here](#here)"
