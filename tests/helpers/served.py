"""Fixtures of a small model behind a server; the conftest of a folder that needs them imports them."""

import pytest
import torch

from crystallite.serving import Listener, Service
from tests.helpers.artifacts import APART, network, saved


@pytest.fixture(scope="session")
def model():
    return network()


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory):
    return saved(model, tmp_path_factory.mktemp("served") / "small")


@pytest.fixture(scope="module")
def service(folder):
    """Every subnetwork a piece of its own."""
    with Service.load(folder, machine=APART) as service:
        yield service


@pytest.fixture(scope="module")
def url(service):
    with Listener(service, port=0) as listener:
        yield listener.url


@pytest.fixture
def x():
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
