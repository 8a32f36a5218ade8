import subprocess
import sys

import torch

from model.runtime import set_up_torch

# The first tensors are not counted: small allocations that lie between them cost glibc a few new mappings before it finds its pattern.
FAULTS_OF_LATER_TENSORS = """
import resource, torch
from model.runtime import set_up_torch
{setup}
faults_N = []
for _ in range(60):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
    faults_N.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults_N[-20:]))
"""


def page_faults(setup: str) -> int:
    """Return how many pages the system had to hand out for 20 tensors of 64 MiB, after 40 of their size were freed."""
    code = FAULTS_OF_LATER_TENSORS.format(setup=setup)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_the_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    set_up_torch(before + 1)
    assert torch.get_num_threads() == before + 1
    set_up_torch(before)


def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    assert page_faults("set_up_torch(1)") < page_faults("torch.set_num_threads(1)") / 10
