"""Settings of a process that runs a model: threads, and how the C library keeps memory."""

import ctypes

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_KEEP_BYTES, _PAD_BYTES = 2**30, 2**26


def set_up_torch(num_threads: int) -> None:
    """Use so many threads, and keep freed memory in the process instead of giving it back to the system after each tensor.

    By default glibc maps every large tensor anew, and the system clears its pages each time: on a CPU that was a fifth of the
    time of a training step of a small model. Without effect where the C library is not glibc.
    """
    torch.set_num_threads(num_threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_M_MMAP_THRESHOLD, _KEEP_BYTES), (_M_TRIM_THRESHOLD, _KEEP_BYTES), (_M_TOP_PAD, _PAD_BYTES)):
            mallopt(parameter, value)
