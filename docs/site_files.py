"""What `mkdocs build` needs besides the pages: files of the repository that pages link to become files of the site.

A notebook becomes a page, with the outputs that are stored in it.
"""

import json
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#]+)\)")
EMPTY_HEADING = re.compile(r"<th([^>]*)></th>")


def on_files(files, config):
    """Add every file outside docs/ that a page links to."""
    for page in list(files.documentation_pages()):
        for *_, path in _outside(page):
            if (ROOT / path).is_file() and _copy(path) not in files.src_uris:
                made = {"content": _page(path)} if path.endswith(".ipynb") else {"abs_src_path": str(ROOT / path)}
                files.append(File.generated(config, _copy(path), **made))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to these files lead to their copies; a folder has none, and is named only."""
    if page.file.generated_by is not None:
        return markdown
    for link, text, path in _outside(page.file, markdown):
        copy = f"[{text}]({'../' * page.file.src_uri.count('/')}{_copy(path)})"
        markdown = markdown.replace(link, copy if (ROOT / path).is_file() else text)
    return markdown


def on_page_content(html, page, config, files):
    """The empty corner of a table is an ordinary cell: a heading without words says nothing."""
    return EMPTY_HEADING.sub(r"<td\1></td>", html)


def _outside(file, markdown=None):
    """(link, its text, path in the repository) of all links out of docs/."""
    for found in OUTSIDE.finditer(file.content_string if markdown is None else markdown):
        if found[2].count("../") > file.src_uri.count("/"):
            yield found[0], found[1], found[3]


def _copy(path):
    return f"files/{re.sub('[.]ipynb$', '.md', path)}"


def _page(path):
    """A notebook as Markdown; its links to docs/ lead to the pages of the site."""
    parts = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](" + "../" * (path.count("/") + 1)))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            html, text = "".join(data.get("text/html", [])), "".join(data["text/plain"])
            parts.append(f'<div class="output">{html}</div>' if html else f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)
