from tests.serving.conftest import folder, model, service, url, x

__all__ = ["folder", "model", "service", "url", "x"]
