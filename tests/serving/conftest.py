from tests.helpers.served import folder, model, service, url, x

__all__ = ["folder", "model", "service", "url", "x"]
