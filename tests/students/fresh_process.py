"""Build, save and load students of teachers with experts where nothing ran before: no class of theirs was asked.

    python -m tests.students.fresh_process build|load FOLDER

What comes first of each teacher is built from a configuration, or loaded from FOLDER/NAME. Prints the teachers that
worked. (`test_ecosystem.py` runs this.)
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_hybrid_ssm  # noqa: F401
from tests.students.teachers import OF_EXPERTS, SIZES, TEACHERS, tokens

OFFERED = ("grouped_mm", "eager")
"""transformers' own choice, and one that cannot run on the meta device."""


def main(first: str, folder: str) -> None:
    ids = tokens(2, 20)
    for name in OF_EXPERTS:
        config = AutoConfig.for_model("hybrid_student", teacher_type=name, **SIZES | TEACHERS[name])
        ways = [(AutoModelForCausalLM.from_config, config), (AutoModelForCausalLM.from_pretrained, f"{folder}/{name}")]
        for make, given in ways if first == "build" else ways[::-1]:
            model = make(given).eval()
            assert model.config._experts_implementation == OFFERED[0]
            model.save_pretrained(f"{folder}/again")
            for chosen in OFFERED:
                again = AutoModelForCausalLM.from_pretrained(f"{folder}/again", experts_implementation=chosen)
                assert again.config._experts_implementation == chosen
                torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=3e-5)
            assert make(given, experts_implementation="eager").config._experts_implementation == "eager"
        print(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
