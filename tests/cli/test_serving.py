"""`transformers serve` and `transformers chat` with an exported folder and the package: OpenAI's requests."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_ssm.cli import run
from tests.cli.folders import environment, save_checkpoint
from tests.processes import free_port

for needed in ("fastapi", "uvicorn", "openai", "starlette", "rich"):  # what `transformers[serving]` installs
    if importlib.util.find_spec(needed) is None:  # not imported: other tests would wait for it
        pytest.skip(f"transformers serve needs {needed}", allow_module_level=True)

PROMPT, TOKENS = "one two", 12
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SERVER_SECONDS = 180


def with_our_paths(**more: str) -> dict[str, str]:
    env = environment(**more)  # what serving needs may lie on this process's path alone
    return env | {"PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], *filter(None, sys.path)])}


@pytest.fixture(scope="module", params=["longhorn", "student"])
def folder(request, tmp_path_factory):
    folder = save_checkpoint(tmp_path_factory.mktemp("serving") / request.param, request.param, export_code=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    letters = set(
        tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    )  # no end, no part of a character
    model.generation_config.suppress_tokens = [token for token in range(len(tokenizer)) if token not in letters]
    model.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Started with --continuous-batching, which must fall back."""
    port = free_port()
    log = tmp_path_factory.mktemp("log") / "server.txt"
    command = [sys.executable, "-m", "hf_hybrid_ssm", "run", "transformers", "serve", str(folder)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--device", "cpu", "--continuous-batching"]
    env = with_our_paths(HF_HYBRID_SSM_PREFIX_CACHE_FOLDER=str(log.parent / "states"))
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=env) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            for _ in range(SERVER_SECONDS):
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                except (urllib.error.URLError, OSError):
                    assert process.poll() is None, log.read_text()[-3000:]
                    time.sleep(1)
            yield address, log
        finally:
            process.kill()


def asked(address: str, path: str, **content) -> str:
    body = json.dumps(content).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def events(text: str) -> list[dict]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_completions(server, folder, expected):
    content = {"model": str(folder), "prompt": PROMPT, "max_tokens": TOKENS}
    answer = json.loads(asked(server[0], "completions", **content))
    assert answer["choices"][0]["text"] == expected and answer["usage"]["completion_tokens"] == TOKENS
    parts = events(asked(server[0], "completions", **content, stream=True))
    assert len(parts) > 3 and "".join(part["choices"][0]["text"] for part in parts) == expected


def test_chat(server, folder, expected):
    messages = [{"role": "user", "content": PROMPT}]
    content = {"model": str(folder), "messages": messages, "max_tokens": TOKENS}
    answer = json.loads(asked(server[0], "chat/completions", **content))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    parts = events(asked(server[0], "chat/completions", **content, stream=True))
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == expected


def test_turns_of_a_chat_go_on_as_if_all_was_read(server, folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{PROMPT} {turn}"})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
        out = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        content = {"model": str(folder), "messages": messages, "max_tokens": TOKENS}
        for _ in range(2):  # asked again, from the states before the answer
            answer = json.loads(asked(server[0], "chat/completions", **content))["choices"][0]["message"]
            assert answer["content"] == tokenizer.decode(out, skip_special_tokens=True)
        # each endpoint, streamed or not: its text is begun from states, so its prompt's and its answer's are kept
        held = {len(tokens) for tokens in texts_with_states(server[1].parent / "states")}
        assert {inputs["input_ids"].shape[1] - 1, inputs["input_ids"].shape[1] + TOKENS - 1} <= held
        messages.append(answer)
    assert "does not serve" not in server[1].read_text()


def texts_with_states(folder) -> list[list[int]]:
    found = []
    for path in folder.glob("prefix-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.append(file.get_tensor("tokens")[0].tolist())
    return found


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_request_leaves_its_states(path, stream, server, folder):
    """So that a later one can go on from them: the cache of prefixes serves what the server asks for."""
    text = f"{path} {'streamed' if stream else 'whole'}"
    given = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    asked(server[0], path, model=str(folder), max_tokens=TOKENS, stream=stream, **given)
    prompt = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    for _ in range(SERVER_SECONDS):  # the last word of a stream comes before its states are written
        held = texts_with_states(server[1].parent / "states")
        if any(tokens[: len(prompt)] == prompt for tokens in held):
            break
        time.sleep(1)
    else:
        pytest.fail(f"no state of {len(prompt)} tokens among those of {sorted(map(len, held))}")
    assert "does not serve" not in server[1].read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_cache_of_prefixes_cannot_serve_is_said(stream, monkeypatch, caplog, folder):
    monkeypatch.setenv("HF_HYBRID_SSM_PREFIX_CACHE", "1000000")
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = 2 + stream + 2 * (model.config.model_type == "longhorn")  # a reason is said once in a process
    ids = torch.full((rows, 4), 5)
    for _ in range(2):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    assert [message for message in caplog.messages if "does not serve" in message and f"{rows} rows" in message]
    assert len([message for message in caplog.messages if "does not serve" in message]) == 1


@pytest.mark.parametrize("asked_for", [None, "0", "5000"])
def test_a_server_has_a_cache_of_prefixes_unless_told_otherwise(asked_for, monkeypatch):
    monkeypatch.delenv("HF_HYBRID_SSM_PREFIX_CACHE", raising=False)
    if asked_for is not None:
        monkeypatch.setenv("HF_HYBRID_SSM_PREFIX_CACHE", asked_for)
    seen = {}

    def serve():
        seen["bytes"] = os.environ["HF_HYBRID_SSM_PREFIX_CACHE"]

    monkeypatch.setattr(run, "entry_points", lambda **_: [SimpleNamespace(load=lambda: serve)])
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit):
        run.run_command("transformers", ["serve", "FOLDER"])
    assert seen["bytes"] == (asked_for or str(2**30))


def test_chat_in_the_terminal(server, folder, expected, tmp_path):
    env = with_our_paths(HF_HUB_DISABLE_UPDATE_CHECK="1", NO_PROXY="127.0.0.1", COLUMNS="200")
    del env["HF_HUB_OFFLINE"]  # the client would refuse its own machine too
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", str(folder), server[0]]
    chat = subprocess.run(
        [*command, f"max_new_tokens={TOKENS}", "do_sample=False"],
        input=f"{PROMPT}\nn\n!exit\n", capture_output=True, text=True, env=env, cwd=tmp_path, timeout=180,
    )  # fmt: skip
    assert expected in chat.stdout, chat.stdout + chat.stderr


def test_continuous_batching_falls_back(server):
    assert "does not support continuous batching" in server[1].read_text()
