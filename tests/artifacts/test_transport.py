"""Shards from a server that is slow, refuses, or dies in the middle; and local copies of them."""

import errno
import logging
import os
import threading
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from fovea.artifacts import transport
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.manifest import MANIFEST, Manifest
from fovea.artifacts.schema import SampleMeta
from fovea.artifacts.streaming import StreamedArtifacts
from fovea.artifacts.transport import Patience
from fovea.artifacts.writer import ArtifactWriter, finish_rank

KEYS = [f"set/{i}.png" for i in range(9)]
IMPATIENT = Patience(retries=2, timeout=0.4, pause=0.01)


@pytest.fixture
def folder(tmp_path, fingerprint, make_sample):
    with ArtifactWriter(tmp_path / "artifacts", fingerprint, dtype="bf16", shard_bytes=8_000) as out:
        for key in KEYS:
            out.write(make_sample(key), SampleMeta())
    finish_rank(tmp_path / "artifacts", fingerprint, {}, 0, 1)
    return tmp_path / "artifacts"


class Server(ThreadingHTTPServer):
    """Serves ``folder``; ``faults`` are played one after the other, by file name, before it does so rightly.

    Attributes:
        sent: bytes by file name.
        asked: requests by file name.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.sent, self.asked = folder, {}, Counter(), Counter()
        self.stop = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, name = self.server, self.path.lstrip("/")
        server.asked[name] += 1
        faults = server.faults.get(name, [])
        fault = faults.pop(0) if faults else None
        path = server.folder / name
        if isinstance(fault, int) or not path.is_file():
            return self.send_error(fault or 404)
        if fault == "silent":
            server.stop.wait(30)
            return None
        content = path.read_bytes()
        if fault == "damaged":
            content = content[:-2_000] + bytes(2_000)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        part = len(content) * 2 // 3 if fault in ("cut", "stalls") else len(content)
        server.sent[name] += part  # before who reads it can look
        self.wfile.write(content[:part])
        if fault == "stalls":
            self.wfile.flush()
            server.stop.wait(30)
        return None

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(folder) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.stop.set()
        made.shutdown()
        thread.join()


def stream(location, **settings):
    return StreamedArtifacts(location, **{"batch_size": 2, "shuffle_buffer": 0, "patience": IMPATIENT} | settings)


def keys(data, workers=0):
    return [key for batch in DataLoader(data, batch_size=None, num_workers=workers) for key in batch.keys]


def names(folder):
    return [shard.name for shard in Manifest.read(folder).shards]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("faults", [[500], [404, 503], ["cut"], ["silent"], ["stalls"], ["cut", "stalls"]])
def test_a_server_that_recovers(server, folder, tmp_path, faults, cached, caplog):
    caplog.set_level(logging.WARNING)
    second = names(folder)[1]
    server.faults[second] = list(faults)
    assert keys(stream(server.url, cache=tmp_path / "cache" if cached else None)) == KEYS
    assert server.asked[second] == 1 + len(faults)
    assert caplog.text.count("once more in") == len(faults)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("fault", "why"),
    [(404, "404"), (500, "500"), ("cut", "cut|arrived"), ("silent", "timed out"), ("stalls", "timed out")],
)
def test_a_server_that_does_not(server, folder, tmp_path, fault, why, cached):
    second = names(folder)[1]
    server.faults[second] = [fault] * 20
    given, data = [], stream(server.url, batch_size=1, cache=tmp_path / "cache" if cached else None)
    with pytest.raises(ArtifactError) as error:
        given.extend(batch.keys[0] for batch in data)
    message = str(error.value)
    assert message.startswith(f"shard {second} could not be read in 3 attempts from {server.url}/{second}: ")
    assert any(text in message for text in why.split("|"))
    assert "data.loader.timeout" in message
    assert "copy the artifacts to a local folder" in message
    assert server.asked[second] == 3
    assert given == KEYS[: len(given)]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_server_that_is_not_there():
    with pytest.raises(ArtifactError, match=f"no finished artifacts at http://127.0.0.1:9: {MANIFEST} cannot be read"):
        stream("http://127.0.0.1:9", patience=Patience(retries=1, timeout=0.5, pause=0.01))


def test_the_manifest_of_a_server_that_stumbles(server):
    server.faults[MANIFEST] = [500, "cut"]
    assert keys(stream(server.url)) == KEYS
    server.faults[MANIFEST] = [404]
    with pytest.raises(ArtifactError, match="404"):
        stream(server.url)
    assert server.asked[MANIFEST] == 4  # what is not there is not asked for again


@pytest.mark.parametrize("workers", [0, 2])
def test_the_second_epoch_asks_nobody(server, folder, tmp_path, workers):
    data = stream(server.url, cache=tmp_path / "cache", num_workers=workers, shuffle_buffer=4)
    assert sorted(keys(data, workers)) == sorted(KEYS)
    assert {name: server.sent[name] for name in names(folder)} == {
        shard.name: shard.bytes for shard in Manifest.read(folder).shards
    }
    sent = dict(server.sent)
    data.set_epoch(1)
    assert sorted(keys(data, workers)) == sorted(KEYS)
    assert server.sent == sent
    again = stream(server.url, cache=tmp_path / "cache")
    assert keys(again) == KEYS
    assert {name: size for name, size in server.sent.items() if name != MANIFEST} == {
        name: size for name, size in sent.items() if name != MANIFEST
    }


def test_a_damaged_copy_is_not_kept(server, folder, tmp_path):
    second = names(folder)[1]
    server.faults[second] = ["damaged"]
    assert keys(stream(server.url, cache=tmp_path / "cache")) == KEYS
    assert server.asked[second] == 2


def test_another_shard_of_the_same_name_is_never_taken(folder, tmp_path, fingerprint, make_sample):
    """Of the same fingerprint and length too: an export that was cut at other places."""
    cache, other = tmp_path / "cache", tmp_path / "other"
    with ArtifactWriter(other, fingerprint, dtype="bf16", shard_bytes=8_000) as out:
        for key in reversed(KEYS):
            out.write(make_sample(key), SampleMeta())
    finish_rank(other, fingerprint, {}, 0, 1)
    assert [s.bytes for s in Manifest.read(other).shards] == [s.bytes for s in Manifest.read(folder).shards]
    for place, expected in ((folder, KEYS), (other, KEYS[::-1]), (folder, KEYS)):
        assert keys(stream(f"pipe:cat {place}/{{name}}", cache=cache)) == expected


def test_a_cut_copy_is_made_again(server, folder, tmp_path):
    assert keys(stream(server.url, cache=tmp_path / "cache")) == KEYS
    copy = sorted((tmp_path / "cache").rglob("*.tar"))[0]
    copy.write_bytes(copy.read_bytes()[:-10])
    assert keys(stream(server.url, cache=tmp_path / "cache")) == KEYS
    assert sum(server.asked[name] for name in names(folder)) == len(names(folder)) + 1


@pytest.mark.parametrize("place", ["a sample's bytes", "the tar's header"])
@pytest.mark.parametrize("retries", [0, 2])
def test_a_damaged_copy_is_made_again(server, folder, tmp_path, caplog, place, retries):
    cache = tmp_path / "cache"
    assert keys(stream(server.url, cache=cache)) == KEYS
    shard = Manifest.read(folder).shards[1]
    (copy,) = cache.rglob(f"*-{shard.name}")
    data = bytearray(copy.read_bytes())
    offset, size = shard.samples[0].data
    data[offset + size // 2 if place == "a sample's bytes" else 148] ^= 4
    copy.write_bytes(data)
    if not retries:
        with pytest.raises(
            ArtifactError, match=f"could not be read in one attempt .*{copy.name} was damaged and is del"
        ):
            keys(stream(server.url, cache=cache, patience=Patience(0, 5, 0.01)))
    assert keys(stream(server.url, cache=cache)) == KEYS
    assert server.asked[shard.name] == 2
    assert copy.read_bytes() == (folder / shard.name).read_bytes()
    assert retries == 0 or f"the copy {copy} was damaged and is deleted" in caplog.text


def test_a_copy_of_what_the_source_has_is_kept(server, folder, tmp_path):
    """The manifest itself is wrong: fetching the shard again would change nothing."""
    manifest = Manifest.read(folder)
    first, shard = manifest.shards[:2]
    wrong = replace(shard.samples[0], xxh3="0" * 16)
    shards = (first, replace(shard, samples=(wrong, *shard.samples[1:])), *manifest.shards[2:])
    replace(manifest, shards=shards).write(folder)
    with pytest.raises(ArtifactError, match=f"'{shard.samples[0].key}' is damaged"):
        keys(stream(server.url, cache=tmp_path / "cache"))
    assert server.asked[shard.name] == 1


class TestWhereCopiesCannotBeKept:
    def test_a_full_disk_is_said_once_and_training_goes_on(self, server, folder, tmp_path, monkeypatch, caplog):
        keeping, calls = transport._keeping, []

        def full(path):
            calls.append(path)
            if len(calls) == 2:
                raise transport._NotKeptError(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            return keeping(path)

        monkeypatch.setattr(transport, "_keeping", full)
        data = stream(server.url, cache=tmp_path / "cache")
        assert keys(data) == keys(data) == KEYS
        assert caplog.text.count("No space left on device") == 1
        assert "name another folder in data.root" in caplog.text
        assert len(calls) == 2

    def test_a_write_that_fails_is_no_fault_of_the_source(self, tmp_path):
        with pytest.raises(transport._NotKeptError), transport._keeping(Path("/dev/full")) as write:
            write(bytes(1 << 20))

    def test_a_folder_that_cannot_be_made(self, server, tmp_path, caplog):
        (tmp_path / "cache").write_text("a file")
        assert keys(stream(server.url, cache=tmp_path / "cache")) == KEYS
        assert "no copies of shards can be kept in" in caplog.text


def test_a_pipe_that_fails(folder):
    first = names(folder)[0]
    data = stream(f"pipe:cat {folder}/{{name}}")
    (folder / first).unlink()
    with pytest.raises(ArtifactError, match=rf"shard {first} could not be read in 3 attempts from pipe:cat .*command"):
        keys(data)


def test_a_local_shard_is_not_read_again(folder, caplog):
    data = stream(str(folder), patience=Patience(retries=5, pause=60))
    (folder / names(folder)[1]).unlink()
    with pytest.raises(ArtifactError, match="0 of its"):
        keys(data)
    assert "once more" not in caplog.text
