"""What an output has to be: the float64 model on one document alone, without cache, mask, packing or kernels."""

import torch
from transformers import PreTrainedModel

from hf_hybrid_ssm.ops.core.dispatch import backend
from tests.programs.models import VARIANTS, build
from tests.programs.program import Program
from tests.programs.specification import Question

Key = tuple[tuple[int, ...], int, tuple[int, ...]]


class Oracle:
    """The answers for one program; every document is read once, by the step-by-step references."""

    def __init__(self, program: Program):
        self.model = build(program.variant, program.head, "float64")
        self.head, self.variant = program.head, VARIANTS[program.variant]
        self.answers: dict[Key, torch.Tensor] = {}

    def prepare(self, questions: list[Question]) -> None:
        """Read the longest documents first: where nothing sees the future, they also answer for their prefixes."""
        for question in sorted(questions, key=lambda question: -len(question.document)):
            self.answer(question)

    def answer(self, question: Question) -> torch.Tensor:
        """(C,) float64."""
        document, source = question.document, question.source
        if (document, question.index, source) not in self.answers:
            outputs = self._read(document, source)
            if self.head == "sequence":
                self.answers[document, question.index, source] = outputs[0]
            else:
                for index, output in enumerate(outputs):
                    key = document[: index + 1] if self.variant.is_causal else document
                    self.answers[key, index, source] = output
        return self.answers[document, question.index, source]

    @torch.no_grad()
    def _read(self, document: tuple[int, ...], source: tuple[int, ...]) -> torch.Tensor:
        """(L, C), of a whole sequence (1, C)."""
        ids = torch.tensor([document])
        inputs = {"decoder_input_ids": ids, "input_ids": torch.tensor([source])} if source else {"input_ids": ids}
        if self.variant.is_causal:
            inputs["use_cache"] = False
        with backend("reference"):
            return output_of(self.model, self.head, self.model(**inputs))[0]


def output_of(model: PreTrainedModel, head: str, outputs) -> torch.Tensor:
    """(B, L, C) what a head says of every token; (B, 1, C) of a whole sequence."""
    if head == "base":
        return outputs.last_hidden_state
    if head == "span":
        return torch.stack([outputs.start_logits, outputs.end_logits], 2)
    return outputs.logits.unsqueeze(1) if head == "sequence" else outputs.logits
