"""Serve a model and talk to it through OpenAI's client, word by word.

python examples/serve_and_call.py checkpoints/longhorn-books "What is a state?"
"""

import argparse
import subprocess
import time

import openai

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("question")
parser.add_argument("--port", default="8000")
parser.add_argument("--tokens", type=int, default=64)
args = parser.parse_args()

server = subprocess.Popen(["hf-hybrid-ssm", "run", "transformers", "serve", args.model, "--port", args.port])
client = openai.OpenAI(base_url=f"http://localhost:{args.port}/v1", api_key="none", max_retries=0)
try:
    while server.poll() is None:
        try:
            client.models.list()
            break
        except openai.APIConnectionError:  # it does not listen yet
            time.sleep(1)
    messages = [{"role": "user", "content": args.question}]
    stream = client.chat.completions.create(
        model=args.model, messages=messages, max_tokens=args.tokens, temperature=0, stream=True
    )
    for piece in stream:
        if piece.choices:
            print(piece.choices[0].delta.content or "", end="", flush=True)
    print()
finally:
    server.terminate()
    server.wait()
