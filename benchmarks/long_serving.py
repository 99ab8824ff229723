"""Does a server grow, or forget? 2,000 requests to `transformers serve`, 3,600 texts through a folder at its bound.

    python benchmarks/long_serving.py

Both keep states of what they have read within a bound that is reached early: 4 MiB in the server's memory, 1 MiB in
files. A server's every tenth request is one of the first nine anew, and is answered as then. Two caches share the
folder and are made anew every 500 texts, as after a restart; a text in four goes on from an earlier one.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from openai import OpenAI
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.rounds import resident_bytes
from benchmarks.streaming import SIZES
from benchmarks.timing import machine_arguments, write_results
from hf_hybrid_ssm.serving import PrefixCache

MARKS = (10, 100, 500, 1_000, 2_000)
TEXTS, RESTART_EVERY, COMPARE_EVERY = 3_600, 500, 50
SERVER_BYTES, FOLDER_BYTES = 2**22, 2**20
FOREIGN = ("notes.txt", "prefix-of-somebody.safetensors")


def model_of() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", **SIZES)).eval()


def save_checkpoint(folder: Path) -> None:
    from _lib.documents import train_tokenizer  # beside the recipes

    tokenizer = train_tokenizer([Path(__file__).read_text(encoding="utf-8")], 300)
    end = tokenizer.eos_token_id
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    torch.manual_seed(0)
    config = AutoConfig.for_model("longhorn", **SIZES | tokens)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def serve(marks: tuple[int, ...]) -> dict[str, Any]:
    """Resident megabytes of the server after so many requests, and how many of those that came again were answered
    otherwise than at first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        save_checkpoint(Path(name))
        command = [sys.executable, "-m", "hf_hybrid_ssm", "run", "transformers", "serve", name, "--device", "cpu"]
        env = os.environ | {"HF_HYBRID_SSM_PREFIX_CACHE": str(SERVER_BYTES)}
        with (
            Path(name, "log").open("w") as log,
            subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=env) as server,
        ):
            try:
                return _ask(f"http://127.0.0.1:{port}", server, name, marks)
            finally:
                server.terminate()


def _ask(address: str, server: subprocess.Popen, model: str, marks: tuple[int, ...]) -> dict[str, Any]:
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=100)  # also while it starts
    first: dict[int, str] = {}
    found: dict[str, Any] = {"megabytes": {}, "repeated": 0, "other_answers": 0}
    for count in range(1, marks[-1] + 1):
        which = count // 10 % 10 if count % 10 == 0 and count > 10 else count
        prompt = f"{which} is the number of this text. " * (2 + which % 7)
        text = client.completions.create(model=model, prompt=prompt, max_tokens=8).choices[0].text
        if which != count and which in first:
            found["repeated"] += 1
            found["other_answers"] += text != first[which]
        elif count < 10:
            first[count] = text
        if count in marks:
            found["megabytes"][str(count)] = round(resident_bytes(server.pid) / 2**20, 1)
            print(f"  {count:,} requests: {found}", flush=True)
    return found


def keep(texts: int) -> dict[str, Any]:
    """Through a folder: the most bytes and files that it held, texts that were read on from a file after a restart,
    and what was lost."""
    model, random = model_of(), torch.Generator().manual_seed(1)
    found = {"most_bytes": 0, "most_files": 0, "other_answers": 0, "restarts": 0, "went_on": 0, "foreign_lost": 0}
    with tempfile.TemporaryDirectory() as name:
        folder, said = Path(name), None
        for foreign in FOREIGN:
            (folder / foreign).write_text("not a context", encoding="utf-8")
        for count in range(texts):
            if count % RESTART_EVERY == 0:
                caches = [PrefixCache(2**20, folder=folder, max_folder_bytes=FOLDER_BYTES) for _ in range(2)]
            cache, new = caches[count % 2], torch.randint(3, 250, (1, 40), generator=random)
            ids = torch.cat([said, new], dim=1) if said is not None and count % 4 == 0 else new
            before = cache.tokens_read
            options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
            said_now = model.generate(ids, prefix_cache=cache, **options)
            if count and count % RESTART_EVERY == 0:
                found["restarts"] += 1
                found["went_on"] += cache.tokens_read - before < ids.shape[1]
            if count % COMPARE_EVERY == 0:
                found["other_answers"] += not torch.equal(said_now, model.generate(ids, **options))
            said = said_now
            sizes = [path.stat().st_size for path in folder.iterdir() if path.name not in FOREIGN]
            found["most_bytes"] = max(found["most_bytes"], sum(sizes))
            found["most_files"] = max(found["most_files"], len(sizes))
        found["foreign_lost"] = sum(not (folder / foreign).is_file() for foreign in FOREIGN)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 requests and 20 texts")
    arguments = machine_arguments(parser, threads=1)
    marks, texts = ((10, 30), 30) if arguments.quick else (MARKS, TEXTS)
    settings = {"server_bytes": SERVER_BYTES, "folder_bytes": FOLDER_BYTES, "texts": texts}
    folder = keep(texts)
    print(folder, flush=True)
    results = {"settings": settings, "folder": folder, "server": serve(marks)}
    if arguments.quick:
        print(results)
    else:
        write_results("long_serving", results)


if __name__ == "__main__":
    main()
