"""Conversations as text: a chat template that needs no tokens beyond those a tokenizer has."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

# The end-of-text token closes each answer, so that generation stops there. What stands between the generation tags is
# what `assistant_only_loss` trains. The space is part of the answer, as byte-level vocabularies begin words with it.
PLAIN = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
Assistant:{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message['role'] | capitalize }}: {{ message['content'] }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
Assistant:
{%- endif %}
"""


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> None:
    """The template of a file; without one, the tokenizer keeps its own, or gets `PLAIN`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path is not None:
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN
