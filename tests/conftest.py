"""What all tests share."""

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Rooms whose kernels have threads of their own. Elsewhere networks are small: one thread is quickest, and two workers
# do not wait for each other's.
THREADED = {"analysis", "annealing", "serving", "structure", "weights"}


# One worker has all tests of a file, whose fixtures take long; those of Ray start several nodes, so one has them all.
RAY = {"test_ray.py", "test_ray_engine.py"}


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.path.name in RAY else str(item.path)))


@pytest.fixture(scope="module", autouse=True)
def threads(request):
    before = torch.get_num_threads()
    if request.path.parent.name not in THREADED:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
