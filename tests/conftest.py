"""What all tests share."""

import pytest
import torch

# Where small networks are trained: one thread is quickest, and does not wait for a second one on a busy machine.
TRAINING = {"discovery", "monitoring", "refitting", "upgrading", "validation"}


@pytest.fixture(scope="module", autouse=True)
def threads(request):
    before = torch.get_num_threads()
    if request.path.parent.name in TRAINING or request.path.parent.name == "tests":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
