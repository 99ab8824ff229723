"""A forward of half a row, in each of two processes with DeepSpeed's sequence parallelism; prints what it answers.

python rows_shared_out.py VARIANT, with the environment of `torchrun`
"""

import sys

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

from tests.tiny_models import ids_of, own_language_model

deepspeed.init_distributed("gloo")
model = own_language_model(sys.argv[1])
UlyssesSPAttentionHF.register_with_transformers(
    model, core_attn_implementation=model.config._attn_implementation, sequence_parallel_size=2, micro_batch_size=1
)
half = slice(6 * torch.distributed.get_rank(), None)
try:
    model(ids_of(1, 12)[:, half][:, :6], position_ids=torch.arange(12)[None, half][:, :6])
except ValueError as error:
    print(error)
