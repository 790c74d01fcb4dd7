"""How a served model is asked: a request to copy, as JSON and as a line for a shell, and the page at /docs."""

from __future__ import annotations

import json
import shlex
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from crystallite.core.web import page_policy
from crystallite.serving.model import CutModel, ServedModel
from crystallite.serving.protocol import HEADER_LENGTH, SERVER
from crystallite.serving.signature import DATATYPES

__all__ = ["curl", "docs_page", "example_request", "start_lines"]

_MOST_VALUES = 256  # of a request that is written out


def example_request(model: ServedModel | CutModel) -> dict[str, Any]:
    """A request that the model answers: a text, or one sample of numbers that mean nothing, rounded to be read."""
    text = model.signature.text
    if text is not None:
        return {"inputs": [{"name": text.name, "shape": [1], "datatype": text.datatype, "data": ["Good morning!"]}]}
    inputs = []
    for name, x in model.example.made(1).items():
        data = [round(value, 3) if isinstance(value, float) else value for value in x.flatten().tolist()]
        inputs.append({"name": name, "shape": list(x.shape), "datatype": DATATYPES[x.dtype], "data": data})
    return {"inputs": inputs}


def curl(model: ServedModel | CutModel, url: str, token: bool = False) -> str:
    """A line for a shell that asks the model; where a sample is large, all its numbers are 0."""
    where = f"{url}/v2/models/{model.name}/infer"
    header = ' -H "Authorization: Bearer $(cat TOKEN-FILE)"' if token else ""
    asked = example_request(model)
    if sum(len(tensor["data"]) for tensor in asked["inputs"]) <= _MOST_VALUES:
        return f"curl -s {where}{header} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(asked))}"
    sizes = {name: x.nbytes for name, x in model.example.made(1).items()}
    for tensor in asked["inputs"]:
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": sizes[tensor["name"]]}
    text = json.dumps(asked)
    given = f"(printf %s {shlex.quote(text)}; head -c {sum(sizes.values())} /dev/zero)"
    return f"{given} | curl -s {where}{header} -H '{HEADER_LENGTH}: {len(text)}' --data-binary @-"


def start_lines(model: ServedModel | CutModel, url: str, token: bool) -> list[str]:
    """What somebody who has started the service wants to know first."""
    return [*(f"  {line}" for line in model.described()), f"  {curl(model, url, token)}"]


@cache
def docs_page(has_token: bool) -> tuple[str, str]:
    """The page that tries requests and shows the plan and live numbers, and the policy that it is sent with.

    Nothing is loaded from elsewhere, and what the service says is never read as markup.
    """
    folder = files(__package__) / "docs_page"
    html, style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    page = Template(html).substitute(
        style=style, script=script, version=SERVER["version"], token="yes" if has_token else "no"
    )
    return page, page_policy(style, script, "connect-src 'self'", "frame-ancestors 'none'")
