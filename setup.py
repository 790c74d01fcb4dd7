"""README as a package index shows it: its links are relative here, where they work, and lead nowhere there.

With `Repository` in [project.urls] they are made absolute; until then only their text is kept.
"""

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def for_package_index(text: str, repository: str | None) -> str:
    """The text with relative links and pictures made absolute, or without them where no address is known."""
    if repository is None:
        text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*(?:^\*[^*\n]*\*\n+)?", "", text, flags=re.M)
        return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)
    base = repository.rstrip("/")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{base}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{base}/blob/main/", text)


if __name__ == "__main__":
    from setuptools import setup

    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=for_package_index(readme, PROJECT.get("urls", {}).get("Repository")),
        long_description_content_type="text/markdown",
    )
