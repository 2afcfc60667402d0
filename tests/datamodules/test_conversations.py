"""Sources of conversations: layouts, keys, errors with file and line."""

import json
from pathlib import Path

import pytest

from datamodules.conversations import JsonlConversations, MMSpecConversations, SourceError, TinyConversations

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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"x": 1}', "line 2: needs 'messages' or 'conversations', has x"),
        ('{"messages": []}', "line 2: 'key' is missing"),
        (json.dumps(ours("b", images=["1.png"])), "line 2: 1 images are named, the text has places for 0"),
        (json.dumps(llava("1", "no mark")), "line 2: 1 images are named, the text has places for 0"),
        (json.dumps(llava("1", "<image>", image=None)), "line 2: 0 images are named, the text has places for 1"),
        ('{"id": 1, "conversations": [{"from": "bot", "value": ""}]}', "line 2: a turn is from 'bot'"),
        ("[1]", "line 2"),
    ],
)
def test_errors_name_file_and_line(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ours("a")) + "\n" + line)
    with pytest.raises(SourceError, match=rf"c\.jsonl, {message}"):
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
