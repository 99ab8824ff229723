"""How long does a chat wait for its first word? Time to the first token by turn, through `transformers serve`.

    python benchmarks/conversation.py FOLDER --turns 10 --tokens 8192 --output conversation.json

Starts the server twice, with the cache of prefixes that `hf-hybrid-ssm run` gives it and without, and has the same
conversation with both: every turn asks something and sends all turns so far. FOLDER has a chat template.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoTokenizer

START_SECONDS = 300
TEXT = "the river ran slowly past an old mill where nobody had ground corn since the winter of the great flood"


@contextmanager
def serving(folder: str, prefix_cache: int) -> Iterator[str]:
    """The address of a server; `prefix_cache` bytes for states of earlier texts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_hybrid_ssm", "run", "transformers", "serve", folder, "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = os.environ | {"HF_HYBRID_SSM_PREFIX_CACHE": str(prefix_cache)}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            wait_for(address, process)
            yield address
        finally:
            process.terminate()


def wait_for(address: str, process: subprocess.Popen) -> None:
    for _ in range(START_SECONDS):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)  # noqa: S310 - of this machine
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                raise SystemExit("the server ended before it answered") from None
            time.sleep(1)
        else:
            return
    raise SystemExit(f"the server did not answer within {START_SECONDS} s")


def ask(address: str, folder: str, messages: list[dict[str, str]], max_tokens: int) -> tuple[str, float]:
    """The answer, and seconds until its first word."""
    content = {"model": folder, "messages": messages, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(content).encode(), headers)  # noqa: S310
    text, first, begin = "", float("nan"), time.perf_counter()
    with urllib.request.urlopen(request, timeout=1200) as answer:  # noqa: S310
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                part = (choices[0]["delta"].get("content") or "") if choices else ""
                first = time.perf_counter() - begin if part and not text else first
                text += part
    return text, first


def converse(address: str, folder: str, questions: list[str], max_tokens: int) -> list[dict]:
    """One row a turn: tokens of the prompt, seconds to the first token, the answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ask(address, folder, [{"role": "user", "content": "hello"}], 2)  # the server loads the model
    messages, rows = [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        text, seconds = ask(address, folder, messages, max_tokens)
        rows.append({"prompt_tokens": len(prompt), "seconds_to_first_token": round(seconds, 3), "answer": text})
        print(json.dumps(rows[-1] | {"answer": len(text)}), flush=True)
        messages.append({"role": "assistant", "content": text})
    return rows


def questions_of(turns: int, tokens: int, answer: int) -> list[str]:
    """Of `tokens` in all, answers included: nearly a word is a token."""
    words, text = max(tokens // turns - answer, 1), TEXT.split()
    return [" ".join(text[(turn * 7 + n * (turn + 1)) % len(text)] for n in range(words)) for turn in range(turns)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model with a tokenizer and a chat template")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=8192, help="of the whole conversation")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--bytes", type=int, default=2**30, help="of the cache of prefixes")
    parser.add_argument("--output", type=Path, help="a JSON file to write; none that exists")
    given = parser.parse_args(arguments)
    if given.output is not None and given.output.exists():
        parser.error(f"--output {given.output} exists: choose another name")
    questions, found = questions_of(given.turns, given.tokens, given.answer), {}
    for name, size in (("with", given.bytes), ("without", 0)):
        with serving(given.folder, size) as address:
            found[name] = converse(address, given.folder, questions, given.answer)
    same = [row["answer"] for row in found["with"]] == [row["answer"] for row in found["without"]]
    found |= {"texts_are_the_same": same}
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"texts are the same: {same}")


if __name__ == "__main__":
    main()
