"""What all tests share."""

import os

# Before NumPy is imported, here and in the processes that tests start: its products in tests are small, and two workers
# do not wait for each other's threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Rooms whose kernels have threads of their own. Elsewhere networks are small: one thread is quickest, and two workers
# do not wait for each other's.
THREADED = {"analysis", "annealing", "serving", "structure", "weights"}


@pytest.fixture(scope="module", autouse=True)
def threads(request):
    before = torch.get_num_threads()
    if request.path.parent.name not in THREADED:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
