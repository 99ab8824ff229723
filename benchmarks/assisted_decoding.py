"""What does a student of windows gain as a draft for its teacher, or for a student that keeps some layers whole?

    python benchmarks/assisted_decoding.py DRAFT TARGET --text TEXT.jsonl

DRAFT and TARGET are folders of one teacher's models, in weights of 4 bits over bfloat16. By transformers' assisted
generation real texts are continued, by greedy choice, eager, with so many drafted tokens in each round; none is TARGET
by itself. Each call adds to the results.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from timing import COMMIT, RESULTS, machine_arguments, write_results
from transformers import AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.compiled_decoding import load

DRAFTED = (0, 2, 4, 8)
PROMPT, WRITTEN, TEXTS, FORM = 4096, 48, 2, "4 bits"


class Clock(BaseStreamer):
    """When tokens come: the prompt, then those of each round."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.counts.append(value.numel())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def rate(self) -> tuple[float, float]:
        """Tokens a second and a round, after the first round, which reads the prompt too."""
        written = sum(self.counts[2:])
        return written / (self.times[-1] - self.times[1]), written / len(self.counts[2:])


@torch.inference_mode()
def continued(target: PreTrainedModel, draft: PreTrainedModel, ids: torch.Tensor) -> dict[int, tuple[float, float]]:
    """Drafted tokens → tokens a second and a round."""
    found, texts = {}, []
    for count in DRAFTED:
        draft.generation_config.num_assistant_tokens = count
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        clock = Clock()
        options: dict[str, Any] = {"assistant_model": draft} if count else {}
        options |= {"streamer": clock, "do_sample": False}
        texts.append(target.generate(ids, max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, **options))
        found[count] = clock.rate()
    # bfloat16 rounds a forward of several tokens otherwise than several of one
    same = [int((text == texts[0])[0, PROMPT:].sum()) for text in texts]
    print(f"tokens as without drafts, of {WRITTEN}: {same}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="a student of windows")
    parser.add_argument("target", help="its teacher, or another student")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with a field `text`")
    given = machine_arguments(parser)
    target, draft = load(given.target, FORM), load(given.draft, FORM)
    tokenizer = AutoTokenizer.from_pretrained(given.draft)
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in DRAFTED}
    for line in given.text.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"][:, :PROMPT]
        if ids.shape[1] == PROMPT and len(found[0]) < TEXTS:
            for count, rates in continued(target, draft, ids).items():
                found[count].append(rates)
    figures = {str(count): [round(statistics.mean(each), 2) for each in zip(*rates)] for count, rates in found.items()}
    file = RESULTS / "assisted_decoding.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    targets = before.get("targets", {}) | {Path(given.target).name: {"commit": COMMIT} | figures}
    write_results("assisted_decoding", {"prompt": PROMPT, "written": WRITTEN, "texts": TEXTS, "targets": targets})


if __name__ == "__main__":
    main()
