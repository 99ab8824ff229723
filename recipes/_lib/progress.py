"""How far a run is: on a terminal a bar, elsewhere a line at each logging step, with tokens/s and the time left."""

import sys
import time
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

REPLACED = (ProgressCallback, PrinterCallback)


def _clock(seconds: float) -> str:
    return tqdm.format_interval(max(seconds, 0))


class TokenProgress(TrainerCallback):
    """Steps, tokens/s since the last report, time left, and the latest figures.

    `tokens` is raised by the trainer at every step: the tokens of all processes that it has trained on.
    """

    def __init__(self, disable_bar: bool = False):
        self.tokens, self._reported, self._reported_tokens = 0, 0.0, 0
        self._bar: Any = None
        self._is_terminal = not disable_bar and sys.stderr.isatty()

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin = self._reported = time.perf_counter()
        self._first_step, self._reported_tokens, self._rate = state.global_step, self.tokens, 0.0
        if state.is_world_process_zero and self._is_terminal:
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if now > self._reported + 1 or not self._rate:
            self._rate = (self.tokens - self._reported_tokens) / (now - self._reported)
            self._reported, self._reported_tokens = now, self.tokens
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)
            self._bar.set_description(f"{self._rate:,.0f} tokens/s", refresh=False)

    def on_evaluate(self, args, state, control, **kwargs):
        self._reported, self._reported_tokens = time.perf_counter(), self.tokens  # it trains on nothing meanwhile

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        logs.pop("total_flos", None)
        shown = {name: value for name, value in logs.items() if name in ("loss", "eval_loss", "learning_rate")}
        text = "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown.items())
        if not text:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
        elif state.max_steps:
            print(f"{self._place(state)}  {text}", flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _place(self, state) -> str:
        done, total = state.global_step, state.max_steps
        spent, steps = time.perf_counter() - self._begin, done - self._first_step
        left = _clock(spent / steps * (total - done)) if steps else "?"
        return f"step {done:,}/{total:,}  {self._rate:,.0f} tokens/s  {left} left"
