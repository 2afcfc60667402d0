"""Sources of conversations: layouts, keys, errors with file and line."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.conversations import JsonlConversations, MMSpecConversations, SourceError, TinyConversations
from datamodules.layouts import conversation_of_record
from fovea.targets.messages import MessageError, checked_turns

MMSPEC = Path(__file__).parents[3] / "shared" / "data" / "mmspec"


def write(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def ours(key, **fields):
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
    return {"key": key, "messages": messages, **fields}


def llava(name, human, image="coco/train/1.jpg"):
    turns = [{"from": "human", "value": human}, {"from": "gpt", "value": "a cat"}]
    return {"id": name, "conversations": turns, **({"image": image} if image else {})}


def test_own_layout(tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    shown = {
        "key": "b",
        "messages": [{"role": "user", "content": parts}],
        "images": ["x/1.png"],
        "source": "s",
        "answer": "7",
    }
    items = JsonlConversations(write(tmp_path / "c.jsonl", ours("a"), shown), image_root="/pictures")
    assert [c.key for c in items] == ["a", "b"]
    assert items[0].images == ()
    assert items[1].images == (Path("/pictures/x/1.png"),)
    assert (items[1].source, items[1].answer) == ("s", "7")
    assert items[1].messages == [{"role": "user", "content": parts}]


def test_pictures_may_have_an_address(tmp_path):
    address, written = "https://example.org/a.png", "data:image/png;base64,AAAA"
    place = {"type": "image"}
    ours = {"key": "a", "messages": [{"role": "user", "content": [place, place, place]}]}
    ours["images"] = [address, "b.png", written]
    theirs = {"id": 1, "image": address, "conversations": [{"from": "human", "value": "<image> what?"}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(ours) + "\n" + json.dumps(theirs))
    first, second = JsonlConversations(tmp_path / "x.jsonl")
    assert first.images == (address, tmp_path / "b.png", written)
    assert (second.images, second.source) == ((address,), "example.org")


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_llava_layout(tmp_path, suffix):
    records = [
        llava("1", "<image>\nwhat is it?"),
        llava("1", "what is it?\n<image>", image="gqa/2.jpg"),
        llava("2", "say hello", image=None),
        llava("3", "first <image> then <image>", image=["vg/1.jpg", "vg/2.jpg"]),
    ]
    path = tmp_path / f"mix{suffix}"
    write(path, *records) if suffix == ".jsonl" else path.write_text(json.dumps(records))
    items = JsonlConversations(path)
    image, text = {"type": "image"}, {"type": "text", "text": "what is it?"}
    assert items[0].messages == [{"role": "user", "content": [image, text]}, {"role": "assistant", "content": "a cat"}]
    assert items[1].messages[0]["content"] == [text, image]
    assert items[2].messages[0]["content"] == [{"type": "text", "text": "say hello"}]
    assert [part["type"] for part in items[3].messages[0]["content"]] == ["text", "image", "text", "image"]
    assert items[3].images == (tmp_path / "vg/1.jpg", tmp_path / "vg/2.jpg")
    assert [c.source for c in items] == ["coco", "gqa", "text", "vg"]
    assert len({c.key for c in items}) == 4  # ids repeat in this layout
    assert len(JsonlConversations(path, limit=2)) == 2


def test_pictures_may_stand_in_their_parts(tmp_path):
    """As for transformers and OpenAI; the parts without one take those of ``images`` in order."""
    whole = "data:image/png;base64,AAAA"
    parts = [
        {"type": "image", "path": "a.png"},
        {"type": "image"},
        {"type": "image", "url": "https://example.org/b.png"},
        {"type": "image", "base64": "BBBB"},
        {"type": "image_url", "image_url": {"url": whole}},
        {"type": "image", "image": "c.png"},
    ]
    record = {"key": 7, "messages": [{"role": "user", "content": parts}], "images": "own.png", "answer": 3}
    (item,) = JsonlConversations(write(tmp_path / "c.jsonl", record))
    assert item.images == (
        tmp_path / "a.png",
        tmp_path / "own.png",
        "https://example.org/b.png",
        "data:image/*;base64,BBBB",
        whole,
        tmp_path / "c.png",
    )
    assert item.messages == [{"role": "user", "content": [{"type": "image"}] * 6}]
    assert (item.key, item.answer, item.fault) == ("7", "3", "")


USER = {"role": "user", "content": "hi"}


def shaped(*messages, **fields):
    return {"key": "b", "messages": list(messages), **fields}


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ([1], "it is a list, not an object"),
        (None, "it is null, not an object"),
        ({}, "needs 'messages' or 'conversations', has nothing"),
        ({"x": 1}, "needs 'messages' or 'conversations', has x"),
        ({"messages": [USER]}, "'key' is missing; name the conversation"),
        (shaped(USER) | {"key": ["b"]}, "'key' is a list; write a text or a number"),
        (shaped(USER) | {"key": "\ud83d"}, r"'key' holds half a character (\ud83d, place 1); remove or mend it"),
        (shaped(USER, source=[]), "'source' is a list; write a text"),
        ({"key": "b", "messages": None}, "its messages are null; write a list of turns"),
        (shaped("hi"), "turn 1 is a text; write an object with 'role' and 'content'"),
        (shaped({"content": "hi"}), "turn 1 has no 'role'; write an object with 'role' and 'content'"),
        (shaped(USER, {"role": "assistant"}), "turn 2 has no 'content'; write an object with 'role' and 'content'"),
        (shaped({"role": "user", "content": None}), "turn 1: its content is null; write a text or a list of parts"),
        (
            shaped({"role": "user", "content": [{"type": "text"}]}),
            "turn 1: a text part without 'text'; write {'type': 'text', 'text': ...}",
        ),
        (
            shaped({"role": "user", "content": [{"type": "text", "text": 5}]}),
            "turn 1: a text part whose 'text' is a number; write {'type': 'text', 'text': ...}",
        ),
        (
            shaped({"role": "user", "content": "half \ud83d"}),
            r"turn 1 holds half a character (\ud83d, place 6); remove or mend it",
        ),
        (
            shaped(USER, {"role": "assistant", "content": [{"type": "image"}]}),
            "turn 2: a picture in an answer; move it to a turn of the user",
        ),
        (
            shaped({"role": "assistant", "content": "hello"}, USER),
            "turn 1: an assistant's turn stands before the first of the user, and answers nothing; remove it",
        ),
        (
            shaped(USER, images=["1.png"]),
            "it has 1 images and 0 image parts; write one part {'type': 'image'} where each belongs",
        ),
        (shaped(USER, images=5), "'images' holds a number; write a path, a URL, or a list of them"),
        (shaped(USER, images=[None]), "'images' holds null; write a path, a URL, or a list of them"),
        (
            shaped({"role": "user", "content": [{"type": "image", "url": 5}]}),
            "the 'url' of an image part is a number; write a path or a URL",
        ),
        (shaped(USER, videos=["a.mp4"]), "it has 'videos', which is not supported; use images, of a video its frames"),
        (
            llava("1", "<video>\nwhat?", image=None) | {"video": "a.mp4"},
            "it has 'video', which is not supported; use images, of a video its frames",
        ),
        (
            llava("1", "no mark"),
            "it has 1 images and 0 image parts; write one part {'type': 'image'} where each belongs",
        ),
        (
            llava("1", "<image>", image=None),
            "it has 0 images and 1 image parts; write one part {'type': 'image'} where each belongs",
        ),
        (
            {"id": 1, "conversations": [{"from": "bot", "value": ""}]},
            "turn 1 is from 'bot'; choose from: human, gpt, system",
        ),
        ({"id": 1, "conversations": ["hi"]}, "turn 1 is no object with the texts 'from' and 'value'"),
        ({"id": 1, "conversations": "hi"}, "'conversations' is a text; write a list of turns"),
        ({"conversations": []}, "'id' is missing; name the conversation"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_bad_record_is_counted_by_file_and_line(tmp_path, caplog, record, fault, suffix):
    path, records = tmp_path / f"c{suffix}", [ours("a"), record, ours("c")]
    write(path, *records) if suffix == ".jsonl" else path.write_text(json.dumps(records))
    first, bad, last = JsonlConversations(path)
    assert (first.key, last.key, first.fault, last.fault) == ("a", "c", "", "")
    assert (bad.key, bad.fault, bad.messages, bad.images) == (f"c{suffix}:2", fault, [], ())
    expected = f"{path}: 1 of 3 conversations cannot be used; the first is 'c{suffix}:2': {fault}"
    assert expected in caplog.messages


@pytest.mark.parametrize("empty", [None, [], ""])
def test_no_pictures_may_be_written_in_several_ways(tmp_path, empty):
    records = [shaped(USER, images=empty), llava("1", "hi", image=None) | {"image": empty, "video": None}]
    items = JsonlConversations(write(tmp_path / "c.jsonl", *records))
    assert [(item.fault, item.images) for item in items] == [("", ())] * 2


WORDS = st.sampled_from(
    ["role", "content", "type", "text", "image", "user", "assistant", "key", "id", "messages", "from", "value", "human"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | WORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
RECORDS = st.fixed_dictionaries({"key": JSON, "messages": JSON}, optional={"images": JSON, "answer": JSON}) | (
    st.fixed_dictionaries({"id": JSON, "conversations": JSON}, optional={"image": JSON, "images": JSON})
)


@given(JSON | RECORDS)
@settings(max_examples=200, deadline=None)
def test_whatever_json_holds_is_a_conversation_or_refused(record):
    try:
        item = conversation_of_record(record, 3, Path("/pictures"))
    except MessageError:
        return
    assert all(turn["role"] in ("user", "assistant", "system") for turn in item.messages)
    assert len(checked_turns(item.messages, len(item.images))) == len(item.messages)


@pytest.mark.parametrize("line", ["{", '{"key": 1, "key": 2}'])
def test_what_is_not_json_ends_with_file_and_line(tmp_path, line):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ours("a")) + "\n" + line)
    with pytest.raises(SourceError, match=r"c\.jsonl, line 2: "):
        len(JsonlConversations(path))


def test_doubled_keys(tmp_path):
    path = write(tmp_path / "c.jsonl", ours("a"), ours("b"), ours("a"))
    with pytest.raises(SourceError, match=r"c\.jsonl, line 3: the key 'a' is that of \S*c\.jsonl, line 1 already"):
        len(JsonlConversations(path))


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        JsonlConversations(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match=r"mmspec\.jsonl is missing"):
        MMSpecConversations(tmp_path)


def test_digest_changes_with_content_and_limit(tmp_path):
    path = write(tmp_path / "c.jsonl", ours("a"))
    digests = {JsonlConversations(path).digest(), JsonlConversations(path, limit=1).digest()}
    write(path, ours("b"))
    digests.add(JsonlConversations(path).digest())
    assert len(digests) == 3


def test_mmspec_layout(tmp_path):
    record = {"id": "m1", "image": "1.jpg", "turns": ["one?", "two?"], "category": "c", "topic": "general vqa"}
    write(tmp_path / "mmspec.jsonl", record)
    with pytest.raises(SourceError, match=r"mmspec.jsonl, line 1: the picture '.*/1.jpg' does not exist \(1 of 1"):
        len(MMSpecConversations(tmp_path))
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").touch()
    (item,) = MMSpecConversations(tmp_path)
    assert (item.key, item.source, item.meta) == ("m1", "general vqa", {"category": "c"})
    assert item.images == (tmp_path / "images" / "1.jpg",)
    assert [m["role"] for m in item.messages] == ["user", "user"]
    assert [part["type"] for part in item.messages[0]["content"]] == ["image", "text"]
    texts = MMSpecConversations(tmp_path, pictures=False)
    assert (texts[0].images, texts[0].messages[0]["content"]) == ((), [{"type": "text", "text": "one?"}])
    assert texts.digest() != MMSpecConversations(tmp_path).digest()
    for turns in ([], [""], ["one?", None], "one?"):
        write(tmp_path / "mmspec.jsonl", {**record, "turns": turns})
        with pytest.raises(SourceError, match=r"mmspec.jsonl, line 1: .*'turns' must be a list of questions"):
            len(MMSpecConversations(tmp_path))
    write(tmp_path / "mmspec.jsonl", record, {**record, "id": "m2"})
    assert len(MMSpecConversations(tmp_path, limit=1)) == 1
    del record["turns"]
    write(tmp_path / "mmspec.jsonl", record)
    with pytest.raises(SourceError, match=r"mmspec.jsonl, line 1: .*'turns'"):
        len(MMSpecConversations(tmp_path))


def test_drawn_conversations():
    train, heldout = TinyConversations("train", 20, seed=1), TinyConversations("heldout", 20, seed=1)
    assert len(train) == len(heldout) == 20
    assert not {c.key for c in train} & {c.key for c in heldout}
    assert all(c.messages[-1]["role"] == "assistant" for c in train)
    assert train[3].messages == TinyConversations("train", 20, seed=1)[3].messages
    digests = [source.digest() for source in (train, heldout, TinyConversations("train", 20, seed=2))]
    assert len(set(digests)) == 3
    assert TinyConversations("train", 20, seed=1).digest() == digests[0]
    with pytest.raises(SourceError, match="choose from: train, heldout"):
        TinyConversations("test", 20)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SourceError, match="count"):
        TinyConversations("train", 0)


@pytest.mark.skipif(not MMSPEC.is_dir(), reason="the MMSpec benchmark is not there")
def test_real_mmspec():
    items = MMSpecConversations(MMSPEC)
    assert len(items) == 60
    assert all(image.is_file() for item in items for image in item.images)
    assert any(len(item.messages) > 1 for item in items)
