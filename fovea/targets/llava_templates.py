"""How the LLaVA code base asks its models, as chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fovea.targets.chat_template import find_chat_template
from fovea.targets.spec import UnsupportedTargetError

#: Stands for a picture.
IMAGE = "<image>"
# With which both Vicuna and Mistral end their answers.
_END = "</s>"

# What the code base trains and asks Vicuna with (its conversation "v1"), and Mistral (its "mistral_instruct").
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
# Pictures stand before the text in Vicuna's turns, a system message in Mistral's first instruction. The space that the
# code base puts between Mistral's answers and their end is left out: the target's own answers have none.
_TEMPLATES = {
    "llama": (
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | map(attribute='text') | join + ' ' }}"
        '{% else %}{{ "' + _VICUNA + "\" + ' ' }}{% endif %}"
        "{% for message in messages if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}"
        "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
        "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
        "{{ '</s>' if message['role'] == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "mistral": (
        "{% for message in messages if message['role'] != 'system' %}{% if message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'][0]['text'] + '</s>' }}{% else %}{{ '[INST] ' }}"
        "{% if loop.first and messages[0]['role'] == 'system' %}"
        "{{ '<<SYS>>\\n' + messages[0]['content'] | map(attribute='text') | join + '\\n<</SYS>>\\n\\n' }}{% endif %}"
        "{% for part in message['content'] %}{{ '<image>\\n' if part['type'] == 'image' else part['text'] }}"
        "{% endfor %}{{ ' [/INST]' }}{% endif %}{% endfor %}"
    ),
}


def chat_template(source: Path, tokenizer: Any, kind: str) -> str:
    """How the checkpoint of the code base in ``source`` is asked: as its own template says, if that has a place for
    pictures, else as the code base asks the first language models of its kind, Vicuna and Mistral.

    Raises:
        UnsupportedTargetError: another end token, so another language model, trained on other words around the turns.
    """
    own = find_chat_template(tokenizer) if tokenizer.chat_template else ""
    if IMAGE in own:
        return own
    if tokenizer.eos_token == _END:
        return _TEMPLATES[kind]
    raise UnsupportedTargetError(
        f"'{source}' ends answers with {tokenizer.eos_token!r}, so it is asked in other words than Vicuna and Mistral, "
        f"and nothing in it says in which; write them into its chat_template.jinja, with {IMAGE} for a picture"
    )
