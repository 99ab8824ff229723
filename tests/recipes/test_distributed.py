"""The recipe under the launcher that `accelerate launch` uses: two processes share the batch and agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes/pretrain_clm.py"


def test_two_processes(tmp_path):
    texts = [{"text": f"line {number} of a short text that counts to {number + 1}"} for number in range(200)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(text) for text in texts), encoding="utf-8")
    settings = f"""
model_type: longhorn
config: {{hidden_size: 16, num_hidden_layers: 1, state_size: 4}}
train_files: [{tmp_path}/texts.jsonl]
sequence_length: 32
tokenizer_vocab_size: 300
output_dir: {tmp_path}/run
max_steps: 4
per_device_train_batch_size: 2
save_strategy: "no"
report_to: none
use_cpu: true
ddp_backend: gloo
"""
    (tmp_path / "settings.yaml").write_text(settings, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(RECIPE), str(tmp_path / "settings.yaml")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads((tmp_path / "run/results.json").read_text(encoding="utf-8"))
    assert results["tokens"] == 4 * 32 * 2 * 2
    assert run.stdout.count("'model_type': 'longhorn'") == 1
