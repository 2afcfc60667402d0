"""An evaluation that was cut short goes on behind its last answer, and ends as if it had not been."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fovea.decoding.scripted import RandomProposer
from fovea.drafters.trie_lookahead import TrieConfig, TrieLookahead
from fovea.evaluation import race
from fovea.evaluation.prompts import user_turns
from fovea.evaluation.results import CONTINUED, CONTINUED_FROM, SpeedResult
from fovea.evaluation.speed import evaluate_and_save
from fovea.evaluation.speed_config import SpeedConfig
from fovea.evaluation.unfinished import OtherSettingsError, discard_answers, identity_of
from fovea.targets.conversation import Conversation

CONFIG = SpeedConfig(max_new_tokens=8, warmup_prompts=1, warmup_tokens=3, transformers_prompts=1, resamples=0)
JOURNAL = ".answers-00-of-01.jsonl"


class Killed(BaseException):
    """Stands for a signal that no process survives."""


@pytest.fixture
def measure(small_target, small_conversations, monkeypatch):
    """Measures lookahead with a memory, whose drafts depend on all earlier answers; ends before a ``cut``-th one."""
    real = race.generate

    def run(folder, cut=None, config=CONFIG, prompts=small_conversations, proposer=None, **more) -> SpeedResult | None:
        answered: list[str] = []

        def counted(*args, **settings):
            trace = real(*args, **settings)
            answered.append(trace.key)
            if cut is not None and len(answered) > cut + config.warmup_prompts:
                raise Killed
            return trace

        monkeypatch.setattr(race, "generate", counted)
        proposer = proposer or TrieLookahead(small_target.spec, TrieConfig())
        identity = identity_of(prompts, None, {"target_weights": "w"})
        try:
            return evaluate_and_save(small_target, proposer, prompts, config, folder, identity=identity, **more)
        except Killed:
            return None
        finally:
            run.answered = answered

    return run


def untimed(result: SpeedResult) -> list:
    def bare(value):
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if not k.endswith("_s") and k != "peak_memory_bytes"}
        return [bare(item) for item in value] if isinstance(value, list) else value

    return [bare(json.loads(json.dumps(prompt.to_json()))) for prompt in result.prompts]


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_killed_and_begun_again_in_its_folder(measure, tmp_path, cut):
    whole = measure(tmp_path / "whole")
    folder = tmp_path / "cut"
    assert measure(folder, cut=cut) is None
    with pytest.raises(FileNotFoundError):
        SpeedResult.load(folder)
    first = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()[1:]]
    again = measure(folder)
    assert untimed(again) == untimed(whole)
    assert again.summary()["tau"] == whole.summary()["tau"]
    kept = [prompt for item in first for prompt in item["prompts"]]
    # With the seconds that they took.
    assert [json.loads(json.dumps(prompt.to_json())) for prompt in again.prompts][: len(kept)] == kept
    assert again.settings.get(CONTINUED, 0) == len(kept)
    assert SpeedResult.load(folder) == again
    assert len(measure.answered) == CONFIG.warmup_prompts + len(whole.prompts) - len(kept)
    discard_answers(folder)
    assert not (folder / JOURNAL).exists()


def test_killed_again_and_again_in_folders_of_their_own(measure, tmp_path):
    whole, earlier = measure(tmp_path / "whole"), None
    for number in range(5):
        folder = tmp_path / str(number)
        assert measure(folder, cut=2, earlier=earlier, insist=earlier is not None) is None
        earlier = folder
        if measure.answered == []:
            break
    last = measure(tmp_path / "last", earlier=earlier, insist=True)
    assert untimed(last) == untimed(whole)


def test_a_line_that_was_being_written_or_is_damaged_counts_for_nothing(measure, tmp_path, caplog):
    """A journal of what the answers depend on and four answers."""
    whole = measure(tmp_path / "whole")
    assert measure(tmp_path / "cut", cut=4) is None
    journal = tmp_path / "cut" / JOURNAL
    raw = journal.read_bytes()
    lines = raw.splitlines(keepends=True)
    assert len(lines) == 5
    digit = raw.rindex(b'"total_s": ') + len(b'"total_s": ') + 2
    other = b"1" if raw[digit : digit + 1] != b"1" else b"2"
    #: Content, answers that are still taken, and the line that is named.
    broken: dict[str, tuple[bytes, int, int | None]] = {
        "torn": (raw[:-7], 3, None),
        "zeros behind": (raw + bytes(100) + b"\n", 4, 6),
        "zeros within": (b"".join(lines[:2]) + bytes(50) + b"\n" + b"".join(lines[2:]), 4, 3),
        "another digit": (raw[:digit] + other + raw[digit + 1 :], 3, 5),
        "no record": (b"".join(lines[:2]) + b"{}\n[]\n3\n", 1, 3),
        "nothing": (b"", 0, None),
        "no header": (b"\xff\xfe\n" + b"".join(lines[1:]), 0, 1),
    }
    for name, (content, taken, line) in broken.items():
        caplog.clear()
        journal.write_bytes(content)
        result = measure(tmp_path / name, earlier=tmp_path / "cut")
        assert untimed(result) == untimed(whole), name
        assert result.settings.get(CONTINUED, 0) == taken, name
        assert (f"{journal}, line {line} is damaged" in caplog.text) == (line is not None), name


def test_other_settings_are_refused_by_name_or_measured_anew(measure, small_conversations, tmp_path, caplog):
    assert measure(tmp_path, cut=3) is None
    longer = replace(CONFIG, max_new_tokens=9)
    with pytest.raises(OtherSettingsError, match=r"max_new_tokens was 8 and is 9\. Resume with the settings"):
        measure(tmp_path / "on", config=longer, earlier=tmp_path, insist=True)
    with pytest.raises(OtherSettingsError, match="prompts was"):
        measure(tmp_path / "on", prompts=small_conversations[:4], earlier=tmp_path, insist=True)
    result = measure(tmp_path, config=longer)
    assert "measured anew: max_new_tokens was 8 and is 9" in caplog.text
    assert CONTINUED not in result.settings


class TestAnotherNumberOfProcesses:
    """Each in turn, as if it were alone: what a rank does depends on the files of all, and on no message."""

    @pytest.fixture
    def share(self, measure, small_target, monkeypatch):
        def run(folder, rank, world, proposer=None, **more):
            monkeypatch.setattr(dist, "is_initialized", lambda: world > 1)
            monkeypatch.setattr(dist, "get_rank", lambda: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda: world)
            monkeypatch.setattr(dist, "all_gather_object", lambda parts, own: parts.__setitem__(slice(None), [own]))
            random = RandomProposer(vocab_size=small_target.spec.vocab_size, nodes=3)
            return measure(folder, proposer=proposer or random, **more)

        return run

    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 3), (3, 2)])
    def test_nothing_is_answered_twice(
        self, share, measure, small_conversations, tmp_path, caplog, before, now, in_place
    ):
        keys = [conversation.key for conversation in small_conversations]
        for rank in range(before):
            assert share(tmp_path, rank, before, cut=1) is None
        kept = keys[:before]
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)  # a launcher deals the cores to the processes
        try:
            folder = tmp_path if in_place else tmp_path / "resumed"
            source = None if in_place else tmp_path
            results = [share(folder, rank, now, earlier=source, insist=not in_place) for rank in range(now)]
        finally:
            torch.set_num_threads(threads)
        answered = [prompt.speculative.key.split("#")[0] for result in results for prompt in result.prompts]
        assert set(answered) == set(keys)
        assert len(answered) == sum(len(user_turns(conversation)) for conversation in small_conversations)
        again = sum(result.settings.get(CONTINUED, 0) for result in results)
        assert again == sum(len(user_turns(c)) for c in small_conversations if c.key in kept)
        told = [result.settings.get(CONTINUED_FROM) for result in results if CONTINUED in result.settings]
        assert told
        assert told == [[before]] * len(told)
        assert SpeedResult.merged(results).settings[CONTINUED_FROM] == [before]
        assert f"of {now} processes, going on behind answers that {before} shared" in caplog.text

    def test_a_memory_is_of_its_own_share(self, share, small_target, tmp_path, caplog):
        def memory():
            return TrieLookahead(small_target.spec, TrieConfig())

        assert share(tmp_path, 0, 2, cut=2, proposer=memory()) is None
        with pytest.raises(OtherSettingsError, match="processes was 2 and is 1"):
            share(tmp_path / "on", 0, 1, earlier=tmp_path, insist=True, proposer=memory())
        assert CONTINUED not in share(tmp_path, 0, 1, proposer=memory()).settings
        assert "measured anew: processes was 2 and is 1" in caplog.text

    def test_answers_of_other_settings_do_not_hide_those_that_fit(self, share, small_conversations, tmp_path, caplog):
        assert share(tmp_path, 1, 2, cut=2) is None
        assert share(tmp_path, 0, 1, cut=3, config=replace(CONFIG, max_new_tokens=5)) is None
        assert "max_new_tokens was 8 and is 5" in caplog.text
        result = share(tmp_path / "on", 0, 1, earlier=tmp_path, insist=True)
        assert result.settings[CONTINUED] == sum(len(user_turns(c)) for c in small_conversations[1::2][:2])


def test_a_memory_that_cannot_be_made_again_starts_over(measure, small_target, tmp_path, caplog):
    class Closed(RandomProposer):
        def forget(self) -> None:
            pass

    make = {"vocab_size": small_target.spec.vocab_size, "nodes": 3}
    assert measure(tmp_path, cut=3, proposer=Closed(**make)) is None
    result = measure(tmp_path, proposer=Closed(**make))
    assert CONTINUED not in result.settings
    assert len(measure.answered) == CONFIG.warmup_prompts + len(result.prompts)
    assert "speculative drafts from answers that it cannot be told again: all is measured anew" in caplog.text


def test_what_could_not_be_read_is_remembered(measure, small_conversations, tmp_path):
    ask = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    prompts = [Conversation("gone", ask, (tmp_path / "none.png",)), *small_conversations[:3]]
    assert measure(tmp_path, cut=2, prompts=prompts) is None
    result = measure(tmp_path, prompts=prompts)
    assert result.failed.keys() == {"gone"}
    assert len(result.prompts) == 3


def test_results_of_an_earlier_evaluation_do_not_pass_for_those_of_a_killed_one(measure, tmp_path, monkeypatch):
    """Killed between figures and traces, in the folder of a finished evaluation."""
    measure(tmp_path)
    written = []

    def stop(path, text, _real=SpeedResult.save.__globals__["write_text"]):
        written.append(path.name)
        if path.name == "traces.jsonl":
            raise Killed
        _real(path, text)

    monkeypatch.setitem(SpeedResult.save.__globals__, "write_text", stop)
    assert measure(tmp_path) is None
    assert written == ["evaluation.json", "traces.jsonl"]
    with pytest.raises(FileNotFoundError, match=r"holds no traces.jsonl"):
        SpeedResult.load(tmp_path)


def test_what_a_target_is_called_is_no_setting_of_its_answers(measure, tmp_path):
    assert measure(tmp_path / "before", cut=3) is None, "when names were not recorded"
    named = {"target_name": "a copy", "target_revision": "main"}
    assert measure(tmp_path / "named", cut=3, settings=named) is None
    for earlier, settings in (("before", named), ("named", {"target_name": "the same elsewhere"})):
        result = measure(tmp_path / f"on {earlier}", earlier=tmp_path / earlier, settings=settings, insist=True)
        assert result.settings[CONTINUED] > 0
        assert result.settings["target_name"] == settings["target_name"]
