"""Training on a CPU: memory that is freed stays with the process."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGEST_BLOCK, KEPT = 2**30, 2**31 - 1  # bytes


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed blocks of up to 1 GiB for the next allocations of this process.

    By default it asks the kernel for every large tensor, and gives it back when the tensor is freed: each step of
    training then touches its activations as new pages, one page fault for each 4 KiB. The same as starting Python with
    MALLOC_MMAP_THRESHOLD_=1073741824 and MALLOC_TRIM_THRESHOLD_=2147483647. The process holds its greatest use of
    memory until it ends.

    Returns:
        Whether it was done; False where malloc is not glibc's.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT))
