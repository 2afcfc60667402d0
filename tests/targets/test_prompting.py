import dataclasses

import pytest
import torch

from fovea.evaluation.prompts import UnreadablePrompt, encode_prompt, user_turns
from fovea.targets.chat_template import PromptError
from fovea.targets.conversation import Conversation
from fovea.targets.prompting import ChatPrompt


def by_processor(target, conversation: Conversation) -> torch.Tensor:
    """What the processor makes of the whole conversation, prompt or not."""
    text = target.processor.apply_chat_template(
        conversation.messages,
        tokenize=False,
        add_generation_prompt=conversation.messages[-1]["role"] == "user",
    )
    images = list(conversation.images) or None
    return target.processor(text=[text], images=images, return_tensors="pt")


@pytest.mark.parametrize("index", range(8))
def test_ids_and_pictures_equal_the_processors(small_target, small_conversations, index) -> None:
    conversation = small_conversations[index]
    encoded, expected = small_target.encode(conversation), by_processor(small_target, conversation)
    assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
    assert encoded.is_visual.tolist() == expected["mm_token_type_ids"][0].bool().tolist()
    for name, value in encoded.vision.items():
        assert torch.equal(value, expected[name])
    assert encoded.image_sizes == tuple(image.size for image in conversation.images)
    assert sum(rows * columns for rows, columns in encoded.grids) == int(encoded.is_visual.sum())


def test_the_mask_covers_answers_and_their_end_tokens(small_target, small_conversations) -> None:
    decoded = {}
    for conversation in small_conversations:
        encoded = small_target.encode(conversation)
        decoded[conversation.key] = small_target.tokenizer.decode(encoded.ids[encoded.answer_mask])
    assert decoded["image"] == "a red square<|im_end|>"
    assert decoded["turns"] == "a circle<|im_end|>red<|im_end|>the blue square<|im_end|>"
    assert decoded["prompt"] == ""


def test_a_system_turn_and_plain_strings_are_read(small_target) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]
    conversation = Conversation("plain", messages)
    encoded = small_target.encode(conversation)
    assert encoded.ids.tolist() == by_processor(small_target, conversation)["input_ids"][0].tolist()


def test_given_ids_stand_as_they_are(small_target, small_conversations) -> None:
    tokenizer = small_target.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    apart = [tokenizer.convert_tokens_to_ids(letter) for letter in "red"]  # not how the tokenizer writes it
    assert tokenizer("red")["input_ids"] != apart
    conversation = small_conversations[6]
    encoded = small_target.encode(conversation, [[*apart, end], [20, 21], [30, end]])
    assert encoded.ids[encoded.answer_mask].tolist() == [*apart, end, 20, 21, 30, end]
    # The cut answer is closed by the template all the same, and that end token is not the target's.
    after = encoded.answer_mask.nonzero().squeeze(-1)[5] + 1
    assert encoded.ids[after] == end
    assert not encoded.answer_mask[after]


def test_another_end_token_leaves_no_trace_before_a_later_turn(small_target, small_conversations) -> None:
    end, other = small_target.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    encoded = small_target.encode(small_conversations[6], [[20, 21, other], [22], [23, end]])
    assert encoded.ids[encoded.answer_mask].tolist() == [20, 21, 22, 23, end]
    assert other not in encoded.ids.tolist()


def test_the_last_answer_ends_as_the_target_ended_it(small_target, small_conversations) -> None:
    other = small_target.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    encoded = small_target.encode(small_conversations[0], [[20, 21, other]])
    assert encoded.ids[-3:].tolist() == [20, 21, other]
    assert encoded.ids[encoded.answer_mask].tolist() == [20, 21, other]
    (sample,) = small_target.teach([encoded], [1])
    assert sample.mid.shape[0] == 3


def test_an_answer_begins_where_the_generation_prompt_ends(twin) -> None:
    """A space that the template writes in front of an answer belongs to its first token, as when the target answers."""
    target = twin("llava15").target
    asked = Conversation("x", [{"role": "user", "content": "what is it?"}])
    prompt = target.encode(asked).ids.tolist()
    answers = [[30, 31, 2], [32, 2]]
    turns = [*asked.messages, {"role": "assistant", "content": "the red circle"}] * 2
    said = target.encode(Conversation("x", turns))
    given = target.encode(Conversation("x", turns), answers)
    for encoded in (said, given):
        assert encoded.ids[: len(prompt)].tolist() == prompt
        assert encoded.answer_mask.nonzero()[0] == len(prompt)
    assert target.tokenizer.decode(said.ids[said.answer_mask]) == "the red circle the red circle"
    # Vicuna's template writes no end token: only the last answer keeps its own.
    assert given.ids[given.answer_mask].tolist() == [30, 31, 32, 2]
    assert given.ids.tolist().count(2) == 1
    between = said.ids[~said.answer_mask].tolist()
    assert given.ids[~given.answer_mask].tolist() == between[: len(given.ids) - 4]


def test_a_placeholder_in_an_answer_is_a_token_like_any_other(small_target, small_conversations) -> None:
    place = small_target.image_token_id
    encoded = small_target.encode(small_conversations[0], [[place, 20]])
    assert encoded.ids[encoded.answer_mask].tolist() == [place, 20]
    assert not (encoded.is_visual & encoded.answer_mask).any()
    assert int(encoded.is_visual.sum()) == 12


def test_fewer_answers_make_a_prompt_of_the_next_turn(small_target, small_conversations) -> None:
    prompt, conversation = small_conversations[7], small_conversations[6]
    assert torch.equal(small_target.encode(prompt, []).ids, small_target.encode(prompt).ids)
    asked = small_target.encode(conversation, [[20], [21]])
    assert small_target.tokenizer.decode(asked.ids[-2:]).endswith("\n")
    assert asked.ids[asked.answer_mask].tolist() == [20, 21]
    with pytest.raises(PromptError, match="'turns' has 3 user turns; give 3 or 2 answers, not 1"):
        small_target.encode(conversation, [[20]])


USER = {"role": "user", "content": "hi"}
PICTURE = {"role": "user", "content": [{"type": "image"}]}
ANSWER = {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {"role": "tool", "content": "x"}], "turn 2: unknown role 'tool'; use system, user, assistant"),
        ([{"role": "user", "content": [{"type": "video"}]}], "video is not supported"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "unknown part 'audio'"),
        ([{"role": "user", "content": "see <|image_pad|>"}], r"holds '<\|image_pad\|>'"),
        ([USER, {"role": "assistant", "content": "a<|im_end|>b"}], r"turn 2: the text holds '<\|im_end\|>'"),
        ([], "nothing to ask"),
        ([{"role": "user", "content": " "}], "nothing to ask"),
        ([{"role": "user", "content": " "}, ANSWER, USER], "nothing to ask"),
        ([ANSWER], "nothing to ask"),
        ([SYSTEM, ANSWER, USER], "turn 2: an assistant's turn stands before the first of the user"),
        ([PICTURE], "0 images and 1 image parts"),
        ([USER, {"role": "assistant", "content": [{"type": "image"}]}], "turn 2: a picture in an answer"),
        ([{"content": "hi"}], "turn 1 has no 'role'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "turn 1: a text part without 'text'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "whose 'text' is a number"),
        ([{"role": "user", "content": [5]}], "turn 1: a part is a number"),
        ([{"role": "user", "content": "\ud83d"}], r"turn 1 holds half a character \(\\ud83d, place 1\)"),
        (None, "its messages are null"),
    ],
)
def test_what_no_template_could_render_is_refused(small_target, messages, message) -> None:
    with pytest.raises(PromptError, match=message) as error:
        small_target.encode(Conversation("bad", messages))
    assert "'bad'" in str(error.value)


@pytest.mark.parametrize("messages", [[], None, [5], [{"content": "hi"}], [ANSWER, USER], [USER, {"role": "user"}]])
@pytest.mark.parametrize("fault", ["", "it is a list, not an object"])
def test_an_evaluation_refuses_what_has_no_turns_by_its_key(small_target, messages, fault) -> None:
    bad = Conversation("c.jsonl:2", messages, fault=fault)
    (prompt,) = user_turns(bad)
    assert prompt is bad
    with pytest.raises(UnreadablePrompt, match=rf"^conversation 'c\.jsonl:2': {fault}"):
        encode_prompt(small_target, prompt, [], 4)


@pytest.mark.parametrize(
    ("turns", "prompts", "answered"),
    [
        ([USER, SYSTEM, ANSWER], ["us"], "us1"),
        ([USER, SYSTEM], ["us"], "us1"),
        ([SYSTEM, USER, ANSWER, SYSTEM, USER, ANSWER], ["su", "suasu"], "su1su2"),
        ([USER, SYSTEM, USER], ["us", "usu"], "us1u2"),
        ([USER, ANSWER, ANSWER, USER, ANSWER], ["u", "uaau"], "u1u2"),
        ([USER, ANSWER, SYSTEM], ["u"], "u1s"),
    ],
)
def test_an_answer_stands_where_it_was_given(small_target, turns, prompts, answered) -> None:
    """Its question is all that stands before it, for those who ask and for those who put the answers in."""
    conversation = Conversation("x", turns)
    assert ["".join(m["role"][0] for m in p.messages) for p in user_turns(conversation)] == prompts
    given = [[*small_target.tokenizer(text)["input_ids"], small_target.spec.eos_ids[0]] for text in ("yes", "red")]
    said = {"u": USER, "s": SYSTEM, "1": ANSWER, "2": ANSWER | {"content": "red"}}
    alike = small_target.encode(Conversation("y", [said[letter] for letter in answered]))
    encoded = small_target.encode(conversation, given[: len(prompts)])
    assert encoded.ids.tolist() == alike.ids.tolist()
    assert encoded.answer_mask.tolist() == alike.answer_mask.tolist()
    for number, prompt in enumerate(user_turns(conversation)):
        asked = small_target.encode(prompt, given[:number]).ids.tolist()
        assert encoded.ids.tolist()[: len(asked) + len(given[number])] == asked + given[number]


@pytest.mark.parametrize("name", ["qwen25vl", "llava15"])
@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_an_empty_answer_supervises_nothing(twin, name, empty) -> None:
    """Not even its end token, which some templates write; another answer of the conversation is taught as ever."""
    target = twin(name).target
    blank = {"role": "assistant", "content": empty}
    assert not target.encode(Conversation("x", [USER, blank])).answer_mask.any()
    encoded = target.encode(Conversation("x", [USER, blank, USER, ANSWER]))
    taught = encoded.ids[encoded.answer_mask]
    assert target.tokenizer.decode(taught, skip_special_tokens=True) == "yes"
    assert not target.encode(Conversation("x", [USER]), [[target.spec.eos_ids[0]]]).answer_mask.any()


def test_more_pictures_than_parts_are_refused(small_target, small_conversations) -> None:
    one = small_conversations[0]
    with pytest.raises(PromptError, match="has 2 images and 1 image parts"):
        small_target.encode(dataclasses.replace(one, images=one.images * 2))


def test_what_the_image_processor_refuses_names_the_conversation(small_target, small_conversations) -> None:
    one = small_conversations[0]
    sliver = one.images[0].resize((900, 2))
    with pytest.raises(PromptError, match=r"conversation 'image': the image processor says: .*aspect ratio"):
        small_target.encode(dataclasses.replace(one, images=(sliver,)))


class Renderer:
    """A stand-in for a processor: renders a template and nothing else."""

    def __init__(self, tokenizer, chat_template: str | None) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template

    def apply_chat_template(self, messages, **options):
        return self.tokenizer.apply_chat_template(messages, **options)


def test_the_tokenizers_template_serves_a_processor_without_one(small_target) -> None:
    tokenizer = small_target.tokenizer
    prompt = ChatPrompt(Renderer(tokenizer, None), tokenizer, image_token="<|image_pad|>", eos_ids=(2,))
    conversation = Conversation("x", [USER])
    assert prompt.tokens(conversation).ids == small_target.prompt.tokens(conversation).ids


def prompt_of(small_target, template) -> ChatPrompt:
    """Of a target that sees, whose checkpoint has ``template``."""
    tokenizer = small_target.tokenizer
    return ChatPrompt(Renderer(tokenizer, template), tokenizer, image_token="<|image_pad|>", eos_ids=(2,))


TRIMMED = "{% for m in messages %}{{ '[' + m['role'] + ']' }}{{ m['content'] | trim }}{{ '<|im_end|>' }}{% endfor %}"
ADDED = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<|im_end|>' }}{% endfor %}"
#: Parts of the user alone; another's content is printed as it is.
MIXED = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'user' %}{% for p in m['content'] %}"
    "{{ '<|image_pad|>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
)


@pytest.mark.parametrize("template", [TRIMMED, ADDED, MIXED])
def test_a_template_for_strings_is_given_strings(small_target, template) -> None:
    """As a language model's is: a list of parts would fail in it, or be printed as code."""
    tokens = prompt_of(small_target, template).tokens(Conversation("x", [SYSTEM, USER, ANSWER]))
    text = small_target.tokenizer.decode(tokens.ids)
    assert text == "[system]be brief<|im_end|>[user]hi<|im_end|>[assistant]yes<|im_end|>"
    answer = [token for token, answered in zip(tokens.ids, tokens.answer_mask, strict=True) if answered]
    assert small_target.tokenizer.decode(answer) == "yes<|im_end|>"


def test_a_template_for_parts_is_given_parts_and_one_for_both_too(small_target) -> None:
    said = "{% set c = messages[0]['content'] %}{{ 'text' + c if c is string else 'parts' + c[0].text }}"
    tokens = prompt_of(small_target, said).tokens(Conversation("x", [USER]))
    assert small_target.tokenizer.decode(tokens.ids) == "partshi"


@pytest.mark.parametrize("template", [TRIMMED, ADDED])
def test_a_template_for_strings_has_no_place_for_pictures(small_target, small_conversations, template) -> None:
    with pytest.raises(PromptError, match=r"'image': it has pictures, and the chat template .* takes texts only; give"):
        prompt_of(small_target, template).tokens(small_conversations[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['content'] + 1 }}", r"fails on it \(TypeError: .*\); it may be .*chat_template\.jinja"),
        (
            "{{ raise_exception('parts!') if messages[0]['content'] is string else messages[0]['content'] }}",
            r"prints the parts of messages as code; give .* the chat_template\.jinja of its chat model",
        ),
    ],
)
def test_a_template_that_cannot_be_applied_is_named_in_one_sentence(small_target, template, message) -> None:
    with pytest.raises(PromptError, match=f"conversation 'x': .*{message}") as error:
        prompt_of(small_target, template).tokens(Conversation("x", [USER]))
    assert "\n" not in str(error.value)


def test_of_several_templates_the_default_one_is_taken(small_target) -> None:
    tokenizer = small_target.tokenizer
    named = {"default": tokenizer.chat_template, "tool_use": "{{ 'tools' }}"}
    conversation = Conversation("x", [USER])
    expected = small_target.prompt.tokens(conversation).ids
    assert prompt_of(small_target, named).tokens(conversation).ids == expected
    with pytest.raises(PromptError, match=r"called rag, tool_use and none called default; save .*chat_template\.jinja"):
        prompt_of(small_target, {"tool_use": "x", "rag": "y"})


def test_a_missing_template_is_named(small_target) -> None:
    class Bare:
        all_special_tokens = ()

    with pytest.raises(PromptError, match="no chat template"):
        ChatPrompt(Bare(), Bare(), image_token=None, eos_ids=(2,))


@pytest.mark.parametrize("template", ["", "{{ 'fixed' }}", "{% for m in messages %}{{ m['role'] }}{% endfor %}"])
def test_a_template_that_drops_the_question_is_refused(small_target, template) -> None:
    tokenizer = small_target.tokenizer
    renderer = Renderer(tokenizer, template or "{# nothing #}")
    prompt = ChatPrompt(renderer, tokenizer, image_token="<|image_pad|>", eos_ids=(2,))
    with pytest.raises(PromptError, match="template of the checkpoint loses the text 'hi'"):
        prompt.tokens(Conversation("x", [USER]))


def test_what_the_template_refuses_names_the_conversation(small_target) -> None:
    tokenizer = small_target.tokenizer
    template = "{{ raise_exception('roles must alternate') }}"
    prompt = ChatPrompt(Renderer(tokenizer, template), tokenizer, image_token=None, eos_ids=(2,))
    with pytest.raises(PromptError, match=r"conversation 'x': the chat template .* refuses it: roles must alternate"):
        prompt.tokens(Conversation("x", [USER]))


def test_a_text_that_looks_like_the_marker_is_kept(small_target) -> None:
    turns = [{"role": "user", "content": "say [answer-goes-here]"}, {"role": "assistant", "content": "ok"}]
    encoded = small_target.encode(Conversation("x", turns))
    assert "[answer-goes-here]" in small_target.tokenizer.decode(encoded.ids)
    assert small_target.tokenizer.decode(encoded.ids[encoded.answer_mask]) == "ok<|im_end|>"


def test_text_only_models_take_strings_and_no_pictures(small_target, small_conversations) -> None:
    tokenizer = small_target.tokenizer
    template = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    prompt = ChatPrompt(Renderer(tokenizer, template), tokenizer, image_token=None, eos_ids=(2,))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tokens = prompt.tokens(Conversation("x", [{"role": "user", "content": parts}]))
    assert tokenizer.decode(tokens.ids) == "<|im_start|>ab<|im_end|>"
    with pytest.raises(PromptError, match="reads text only"):
        prompt.tokens(small_conversations[0])
