"""The served description is true: requests made from it, good and bad, get what it says, and never a 5xx."""

import pytest
from hypothesis import HealthCheck, given, settings

from crystallite.serving import Listener
from crystallite.serving.openapi import document
from crystallite.serving.request_guard import RequestGuard
from tests.helpers.http_client import TOKEN, call, infer, request
from tests.helpers.waiting import PATIENCE

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")


DESCRIBED = schemathesis.openapi.from_dict(document(["small"], False))
OPERATIONS = [found.ok() for found in DESCRIBED.get_all_operations()]


GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.fixture(autouse=True)
def loaded(service):
    """One of the operations unloads the model."""
    yield
    service.reload("small")


@pytest.mark.parametrize(
    ("mode", "operation"),
    [(GOOD, operation) for operation in OPERATIONS]
    + [(BAD, operation) for operation in OPERATIONS if "{model}" in operation.path],  # others take nothing
    ids=lambda value: value.value if value in (GOOD, BAD) else value.label,
)
def test_what_is_described_is_what_happens(url, operation, mode):
    checks = schemathesis.checks

    @settings(max_examples=15, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        response = case.call(base_url=url, timeout=PATIENCE)
        assert response.status_code < 500
        case.validate_response(
            response,
            checks=[
                checks.not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
            ],
        )

    check()


def test_every_route_is_described(service):
    from crystallite.serving.app import application

    app = application(RequestGuard(service, None))
    found = {route.path for route in app.routes} - {"/openapi.json"}
    assert found == set(openapi(service)["paths"])


def openapi(service):
    with Listener(service, port=0) as listener:
        status, _, described = call(listener.url, "/openapi.json")
    assert status == 200
    return described


def test_a_token_is_described(service, x):
    with Listener(service, port=0, token=TOKEN) as listener:
        assert call(listener.url, "/openapi.json")[0] == 401
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        described = call(listener.url, "/openapi.json", headers=allowed)[2]
        assert described["security"] == [{"token": []}]
        assert call(listener.url, "/v2/models/small/infer", request(x), headers=allowed)[0] == 200
        assert infer(listener.url, x)[0] == 401
