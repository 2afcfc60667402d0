"""An evaluation that was cut short goes on behind its last answer, and ends as if it had not been."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fovea.decoding.scripted import RandomProposer
from fovea.drafters.trie_lookahead import TrieConfig, TrieLookahead
from fovea.evaluation import speed
from fovea.evaluation.results import CONTINUED, SpeedResult
from fovea.evaluation.speed import SpeedConfig, evaluate_and_save
from fovea.evaluation.unfinished import OtherSettingsError, discard_answers, identity_of
from fovea.targets.conversation import Conversation

CONFIG = SpeedConfig(max_new_tokens=8, warmup_prompts=1, warmup_tokens=3, transformers_prompts=1, resamples=0)
JOURNAL = ".answers-00-of-01.jsonl"


class Killed(BaseException):
    """Stands for a signal that no process survives."""


@pytest.fixture
def measure(small_target, small_conversations, monkeypatch):
    """Measures lookahead with a memory, whose drafts depend on all earlier answers; ends before a ``cut``-th one."""
    real = speed.generate

    def run(folder, cut=None, config=CONFIG, prompts=small_conversations, proposer=None, **more) -> SpeedResult | None:
        answered: list[str] = []

        def counted(*args, **settings):
            trace = real(*args, **settings)
            answered.append(trace.key)
            if cut is not None and len(answered) > cut + config.warmup_prompts:
                raise Killed
            return trace

        monkeypatch.setattr(speed, "generate", counted)
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


def test_a_line_that_was_being_written_counts_for_nothing(measure, tmp_path):
    whole = measure(tmp_path / "whole")
    assert measure(tmp_path / "cut", cut=4) is None
    journal = tmp_path / "cut" / JOURNAL
    raw = journal.read_bytes()
    lines = raw.splitlines(keepends=True)
    broken = {
        "torn": raw[:-7],
        "zeros behind": raw + bytes(100) + b"\n",
        "zeros within": b"".join(lines[:2]) + bytes(50) + b"\n" + b"".join(lines[2:]),
        "no record": b"".join(lines[:2]) + b"{}\n[]\n3\n",
        "nothing": b"",
        "no header": b"\xff\xfe\n",
    }
    for name, content in broken.items():
        journal.write_bytes(content)
        assert untimed(measure(tmp_path / name, earlier=tmp_path / "cut")) == untimed(whole), name


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


def test_a_memory_that_cannot_be_made_again_starts_over(measure, small_target, tmp_path):
    class Closed(RandomProposer):
        def forget(self) -> None:
            pass

    make = {"vocab_size": small_target.spec.vocab_size, "nodes": 3}
    assert measure(tmp_path, cut=3, proposer=Closed(**make)) is None
    result = measure(tmp_path, proposer=Closed(**make))
    assert CONTINUED not in result.settings
    assert len(measure.answered) == CONFIG.warmup_prompts + len(result.prompts)


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

    def stop(path, text, _real=speed.SpeedResult.save.__globals__["write_text"]):
        written.append(path.name)
        if path.name == "traces.jsonl":
            raise Killed
        _real(path, text)

    monkeypatch.setitem(speed.SpeedResult.save.__globals__, "write_text", stop)
    assert measure(tmp_path) is None
    assert written == ["evaluation.json", "traces.jsonl"]
    with pytest.raises(FileNotFoundError, match=r"holds no traces.jsonl"):
        SpeedResult.load(tmp_path)
