import subprocess
import sys

import torch

from model.runtime import set_up_torch

FAULTS_OF_A_SECOND_TENSOR = """
import resource, torch
from model.runtime import set_up_torch
{setup}
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(setup: str) -> int:
    """Return how many pages the system had to hand out for a tensor of 64 MiB, after one of its size was freed."""
    code = FAULTS_OF_A_SECOND_TENSOR.format(setup=setup)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_the_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    set_up_torch(before + 1)
    assert torch.get_num_threads() == before + 1
    set_up_torch(before)


def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    assert page_faults("set_up_torch(1)") < page_faults("torch.set_num_threads(1)") / 10
