import pytest

from crystallite.serving import engine
from tests.helpers.served import folder, model, service, url, x

__all__ = ["folder", "model", "service", "url", "x"]


@pytest.fixture(autouse=True)
def one_batch_at_a_time(monkeypatch):
    """However many cores there are, and however long a batch takes: tests look at what waits meanwhile."""
    monkeypatch.setattr(engine, "usable_cores", lambda: 1)
