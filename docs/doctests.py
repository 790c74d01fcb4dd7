"""For the API pages: doctests in docstrings without an "Examples:" section are shown as code, too."""

import re

import griffe

DOCTEST = re.compile(r"(?:^|\n\n)(>>> .*?)(?=\n\n|$)", re.S)


class Doctests(griffe.Extension):
    """Puts a fence around every paragraph that begins with `>>>`."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"\n\n```pycon\n\1\n```", obj.docstring.value)
