"""vLLM's server and OpenAI's client."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from tests.processes import free_port
from tests.serving.engine.engines import FAMILIES, NEW, SETTINGS, folder_of, generated, model_of, prompts_of

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 30, 45, 64, 100, 200)
COMMAND = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--enforce-eager")
COMMAND += ("--max-model-len", "512", "--max-num-seqs", "16", "--host", "127.0.0.1", "--served-model-name", "model")


@contextlib.contextmanager
def server_of(folder: Path, log: Path) -> Iterator[OpenAI]:
    """A client of a server of its own process."""
    port = free_port()
    with log.open("w") as out:
        command = [*COMMAND, "--model", str(folder), "--port", str(port)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | SETTINGS)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
            yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        finally:
            process.terminate()
            process.wait(60)


def streamed(client: OpenAI, prompt: list[int]) -> list[int]:
    """The tokens of one stream."""
    parts = client.completions.create(
        model="model",
        prompt=prompt,
        max_tokens=NEW,
        temperature=0,
        logprobs=1,
        stream=True,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
    )
    found = [token for part in parts for choice in part.choices for token in choice.logprobs.tokens]
    return [int(token.removeprefix("token_id:")) for token in found]


def streamed_at_once(client: OpenAI, prompts: list[list[int]]) -> list[list[int]]:
    texts: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        texts[number] = streamed(client, prompts[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [texts[number] for number in range(len(prompts))]


@pytest.mark.parametrize("family", FAMILIES)
def test_server(family, tmp_path, record_property):
    """Twelve streams at once, a stop string, and a chat, all of them the text of `generate`."""
    folder = folder_of(family)
    model, tokenizer = model_of(folder), AutoTokenizer.from_pretrained(folder)
    prompts = prompts_of(model, LENGTHS, 9)
    expected = generated(model, prompts)
    messages = [{"role": "user", "content": "It was a dark night."}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    with server_of(folder, tmp_path / "log.txt") as client:
        for _ in range(2):  # the first time also warms up
            begun = time.perf_counter()
            assert streamed_at_once(client, prompts) == expected
            seconds = time.perf_counter() - begun
        record_property("requests a second", f"{len(prompts) / seconds:.2f}")
        record_property("new tokens a second", f"{len(prompts) * NEW / seconds:.1f}")

        same = {"model": "model", "temperature": 0, "max_tokens": NEW, "extra_body": {"ignore_eos": True}}
        text = client.completions.create(prompt=prompts[7], **same).choices[0].text
        stop = text[len(text) // 2 :][:3]
        cut = client.completions.create(prompt=prompts[7], stop=stop, **same).choices[0]
        assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"

        chat = client.chat.completions.create(messages=messages, **same)
        assert chat.usage.prompt_tokens == len(asked) and chat.usage.completion_tokens == NEW
        wanted = tokenizer.decode(generated(model, [asked])[0], skip_special_tokens=True)
        assert chat.choices[0].message.content == wanted
