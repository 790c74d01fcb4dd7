"""One self-contained HTML page that shows what was found in a model, and its figures for papers."""

from crystallite.report.build import Report, report

__all__ = ["Report", "report"]
