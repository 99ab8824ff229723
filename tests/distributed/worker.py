"""Everything of this folder that takes two processes, in one launch.

python -m torch.distributed.run --nproc_per_node 2 worker.py FOLDER
"""

import sys
from pathlib import Path

import torch.distributed as dist

from tests.distributed import resuming, sequence_parallel, sharded_rollback, tensor_parallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for job in (tensor_parallel, sequence_parallel, resuming, sharded_rollback):
        job.main(Path(sys.argv[1]))
    dist.destroy_process_group()
