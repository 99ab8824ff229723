"""Make a student of a pretrained transformer, whose cache grows in few layers, and chat with it.

TEACHER is a folder, a name on the Hub or a GGUF file of a model with a chat template.

python examples/student.py SmolLM2-135M-Instruct.Q4_1.gguf OUT --keep 6
"""

import argparse
import sys

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_hybrid_ssm  # noqa: F401  registers the families
from hf_hybrid_ssm.upcycle import Keep, choose_layers, load_teacher, upcycle

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("teacher")
parser.add_argument("out")
parser.add_argument("--keep", type=int, default=6, help="layers that see all tokens")
parser.add_argument("--keep-by", help="how they are chosen; by recall if nothing is said")
parser.add_argument("--window", type=int, default=256, help="tokens that the other layers see")
parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
args = parser.parse_args()

teacher = load_teacher(args.teacher)
choice = choose_layers(teacher, Keep(args.keep, args.keep_by, args.window), tqdm)  # minutes, with a bar
student, _ = upcycle(teacher, choice)
print(choice)
student.save_pretrained(args.out, export_code=True)
teacher.tokenizer.save_pretrained(args.out)

model, tokenizer = AutoModelForCausalLM.from_pretrained(args.out), AutoTokenizer.from_pretrained(args.out)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
conversation, cache = [], None
print("> ", end="", flush=True)
for line in sys.stdin:
    conversation.append({"role": "user", "content": line.strip()})
    inputs = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs,
        cache=cache,  # what was said before is not read again
        max_new_tokens=args.tokens,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
    )
    cache = output.cache
    answer = tokenizer.decode(output.sequences[0, length:], skip_special_tokens=True)
    conversation.append({"role": "assistant", "content": answer})
    print("> ", end="", flush=True)
