"""The process of long_context.py that times one GGUF file in llama.cpp, with its own defaults but for the threads.

    PYTHON -m benchmarks.long_context_llama_cpp REQUEST

PYTHON has the package `llama-cpp-python`, and need not have torch. REQUEST is JSON: `file`, `kind` ("write", "read",
"convert" or "about"); for the first two `lengths`, `threads`, `steps`, `rounds`, `seconds`, and each length gives one
line of JSON; for a conversion `to` and `form` (see CONVERTED).
"""

import contextlib
import ctypes
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.rounds import forget_peak, peak_bytes, reading, resident_bytes, timed, writing

CONVERTED = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16}
PIECE = 512  # tokens that are read, and whose keys and values are then held again at later positions
CELLS = 256  # a cache has a multiple of so many
NOTHING = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Session:
    """A model and a cache with room for `length` tokens and those that are written after them."""

    def __init__(self, model: Any, length: int, request: dict[str, Any]):
        parameters = llama_cpp.llama_context_default_params()
        written = request["steps"] * (request["rounds"] + 1)
        parameters.n_ctx = -(-(length + PIECE + written) // CELLS) * CELLS
        parameters.n_threads = parameters.n_threads_batch = request["threads"]
        parameters.n_seq_max, parameters.kv_unified = 2, True  # the second one is used by `fill` alone
        self.context = llama_cpp.llama_init_from_model(model, parameters)
        if not self.context:
            raise SystemExit(f"llama.cpp makes no context of {parameters.n_ctx} tokens.")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = parameters.n_batch

    def read(self, ids: list[int]) -> None:
        for start in range(0, len(ids), self.batch):
            part = ids[start : start + self.batch]
            array = (llama_cpp.llama_token * len(part))(*part)
            if code := llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(array, len(part))):
                raise SystemExit(f"llama_decode of {len(part)} tokens returned {code}.")
        llama_cpp.llama_synchronize(self.context)

    def tokens(self, count: int) -> list[int]:
        draw = random.Random(count)
        return [draw.randrange(self.words) for _ in range(count)]

    def fill(self, length: int) -> None:
        """As if so many tokens had been read: those of one piece are, again and again at later positions."""
        piece = min(PIECE, length)
        self.read(self.tokens(piece))
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        held = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self.context, held, size, 0)
        for position in range(piece, length, piece):
            if not llama_cpp.llama_state_seq_set_data(self.context, held, size, 1):
                raise SystemExit(f"llama.cpp takes no keys and values back at {position} tokens.")
            llama_cpp.llama_memory_seq_rm(self.memory, 1, min(piece, length - position), -1)
            llama_cpp.llama_memory_seq_add(self.memory, 1, 0, -1, position)
            llama_cpp.llama_memory_seq_cp(self.memory, 1, 0, -1, -1)
            llama_cpp.llama_memory_seq_rm(self.memory, 1, -1, -1)
        if (last := llama_cpp.llama_memory_seq_pos_max(self.memory, 0)) != length - 1:
            raise SystemExit(f"llama.cpp's cache ends at position {last}, not at {length - 1}.")

    def cache_bytes(self) -> int:
        return llama_cpp.llama_state_seq_get_size(self.context, 0)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)


@contextlib.contextmanager
def session(model: Any, length: int, request: dict[str, Any]) -> Iterator[Session]:
    made = Session(model, length, request)
    try:
        yield made
    finally:
        llama_cpp.llama_free(made.context)


def loaded(file: str) -> Any:
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {file}.")
    return model


def write(model: Any, length: int, request: dict[str, Any]) -> dict[str, Any]:
    with session(model, length, request) as made:
        made.fill(length)
        size, token = made.cache_bytes(), made.tokens(1)

        def steps() -> None:
            for _ in range(request["steps"]):
                made.read(token)

        steps()
        found = writing(timed(steps, request), request["steps"])
        return found | {"resident_bytes": resident_bytes(), "cache_bytes": size}


def read(model: Any, length: int, request: dict[str, Any]) -> dict[str, Any]:
    with session(model, length, request) as made:
        made.read(made.tokens(CELLS))
        ids = made.tokens(length)

        def prompt() -> None:
            made.clear()
            made.read(ids)

        forget_peak()
        found = reading(timed(prompt, request), length)
        return found | {"peak_bytes": peak_bytes(), "cache_bytes": made.cache_bytes()}


def convert(request: dict[str, Any]) -> None:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = CONVERTED[request["form"]], True
    draft = Path(request["to"]).with_suffix(".draft")
    code = llama_cpp.llama_model_quantize(request["file"].encode(), str(draft).encode(), ctypes.byref(parameters))
    if code:
        raise SystemExit(f"llama_model_quantize to {request['form']} returned {code}.")
    draft.rename(request["to"])


def about(file: str) -> dict[str, str]:
    description = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_desc(loaded(file), description, len(description))
    system = llama_cpp.llama_print_system_info().decode()
    return {"version": llama_cpp.__version__, "model": description.value.decode(), "system": system}


def main(text: str) -> None:
    request = json.loads(text)
    llama_cpp.llama_log_set(NOTHING, None)
    llama_cpp.llama_backend_init()
    if request["kind"] == "convert":
        convert(request)
    elif request["kind"] == "about":
        print(json.dumps(about(request["file"])), flush=True)
    else:
        model, run = loaded(request["file"]), {"write": write, "read": read}[request["kind"]]
        for length in request["lengths"]:
            print(json.dumps({"length": length} | run(model, length, request)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
