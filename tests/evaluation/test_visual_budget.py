"""Budgets restrict what a drafter sees and nothing else: full access is normal decoding, none shows no picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fovea.decoding.growth import TreeConfig
from fovea.decoding.speculative import extend_tree, generate
from fovea.decoding.tree import DraftTree
from fovea.decoding.verify import verify
from fovea.drafters.interfaces import proposer_for
from fovea.drafters.registry import build_drafter, drafter_type
from fovea.evaluation.budget_results import BudgetResult
from fovea.evaluation.diagnostics import budget_figures, states_of
from fovea.evaluation.prompts import encode_prompt, user_turns
from fovea.evaluation.visual_budget import (
    BudgetConfig,
    accepted_drafts,
    attended,
    importance_along,
    measure_budgets,
    require_visual,
)
from fovea.visual.budget import restricted, retained_count, within_budget
from fovea.visual.retrieval import RetrievalConfig

CAP = 20
TREE = TreeConfig(width=3, depth=3, nodes=12)
CONFIG = BudgetConfig(focus_tokens=3)
KINDS = ("dream", "eagle3", "eaglevlm", "fovea", "msd", "specvlm", "vispec")


@pytest.fixture(scope="module")
def said(small_target, small_conversations):
    """[V] bool, tokens of the target's answers."""
    answers = small_target.answer(small_conversations, CAP, 4)
    out = torch.zeros(small_target.spec.vocab_size, dtype=torch.bool)
    out[[token for turns in answers for answer in turns for token in answer]] = True
    return out


@pytest.fixture(scope="module")
def make_drafter(small_target, enlarge, said):
    """Drafters of visible weights that guess among the tokens which the target says, so that some are accepted."""

    def make(name: str, **changes):
        torch.manual_seed(0)
        settings = {"depth": 3, **changes}
        if name == "fovea":
            settings = {"correction_width": 16, "retrieval": RetrievalConfig(rho=0.6, k_min=2, k_max=5), **settings}
        if name == "eagle3":
            settings["draft_vocabulary"] = small_target.spec.vocab_size
        drafter = build_drafter(name, small_target.spec, drafter_type(name).config_type(**settings), small_target.head)
        enlarge(drafter, seed=1)
        drafter.choose_vocabulary(torch.ones(small_target.spec.vocab_size))
        logits = drafter.logits
        drafter.logits = lambda states: logits(states) - 100.0 * ~said
        return drafter.eval()

    return make


@pytest.fixture(scope="module")
def shown(small_target, small_conversations):
    """Prompts with pictures: one, two side by side, two with text between."""
    prompts = (user_turns(c)[0] for c in small_conversations if c.key in ("image", "two", "between"))
    return [small_target.encode(prompt, []) for prompt in prompts]


def measured(small_target, drafter, conversations, config=CONFIG, **changes):
    return measure_budgets(small_target, drafter, TREE, conversations, config, max_new_tokens=CAP, **changes)


@pytest.mark.parametrize("name", KINDS)
def test_full_access_is_normal_decoding_round_by_round(name, small_target, small_conversations, make_drafter):
    drafter = make_drafter(name)
    result = measured(small_target, drafter, small_conversations)
    by_key = {sample.key: sample for sample in result.samples}
    compared = 0
    for conversation in small_conversations:
        answers = []
        for turn in user_turns(conversation):
            encoded = encode_prompt(small_target, turn, answers, CAP)
            trace = generate(small_target, proposer_for(drafter, TREE), encoded, max_new_tokens=CAP)
            answers.append(trace.tokens)
            if turn.images:
                sample = by_key[turn.key]
                assert [accepted[-1] for accepted in sample.accepted] == [r.accepted for r in trace.rounds]
                assert (sample.answer_tokens, sample.visual_tokens) == (len(trace.tokens), trace.visual_tokens)
                compared += len(trace.rounds)
    assert compared > 40
    rows = [accepted for sample in result.samples for accepted in sample.accepted]
    assert len({accepted[-1] for accepted in rows}) > 1
    assert any(len(set(accepted)) > 1 for accepted in rows), "budgets make a difference"
    assert set(by_key) | set(result.text_only) == {t.key for c in small_conversations for t in user_turns(c)}


@pytest.mark.parametrize("ratio", [0.0, 0.4])
@pytest.mark.parametrize("name", KINDS)
def test_a_budget_hides_what_lies_outside_it(name, ratio, small_target, shown, make_drafter):
    """What a budget leaves out may hold anything: no tree changes, and without pictures no row stands for one."""
    drafter = make_drafter(name)
    for encoded in shown:
        _, prefill = small_target.prefill(encoded, CAP, TREE.max_drafts, drafter.feature_layers)
        kept = within_budget(prefill.importance(), prefill.is_visual, ratio)
        assert int((kept & prefill.is_visual).sum()) == retained_count(len(prefill.visual), ratio)
        hidden = ~kept
        poisoned = replace(
            prefill,
            embeds=prefill.embeds.masked_fill(hidden[:, None], torch.nan),
            visual=prefill.visual.masked_fill(hidden[prefill.is_visual][:, None], torch.nan),
        )
        if drafter.states_leave:
            poisoned = replace(poisoned, hidden=prefill.hidden.masked_fill(hidden[:, None], torch.nan))
        trees = []
        for source in (prefill, poisoned):
            seen = restricted(source, kept, states_leave=drafter.states_leave)
            proposer = proposer_for(drafter, TREE)
            proposer.start(seen)
            proposer.commit(torch.tensor([7]), prefill.read[-1:])
            trees.append(proposer.propose())
            context = drafter.context(seen)
            if ratio == 0:
                assert not context.is_visual.any()
                assert proposer.memory is None or not len(proposer.memory)
            elif proposer.memory is not None:
                assert len(proposer.memory) == len(seen.visual)
        assert np.array_equal(trees[0].tokens, trees[1].tokens)
        assert np.array_equal(trees[0].log_probs, trees[1].log_probs)
        assert np.isfinite(trees[1].log_probs).all()


@pytest.mark.parametrize("name", ["fovea", "eaglevlm", "msd"])
def test_the_rows_that_stay_are_those_of_the_whole_context(name, small_target, shown, make_drafter):
    """Same embeddings beside the same true states, and the target's own positions."""
    drafter = make_drafter(name, rope="target")
    for encoded in shown:
        prefill = small_target.prefill(encoded, CAP)[1]
        kept = within_budget(prefill.importance(), prefill.is_visual, 0.5)
        whole = drafter.context(prefill)
        part = drafter.context(restricted(prefill, kept, states_leave=drafter.states_leave))
        rows = kept[1:]
        for field in ("embeds", "states", "is_visual"):
            torch.testing.assert_close(getattr(part, field), getattr(whole, field)[rows])
        torch.testing.assert_close(part.positions, whole.positions[:, rows])
        assert part.next_position == whole.next_position


def test_at_three_quarters_dream_is_what_it_is_by_default(small_target, shown, make_drafter):
    """The paper's default condition is no sixth budget."""
    whole, default = make_drafter("dream", visual_keep=1.0), make_drafter("dream", visual_keep=0.75)
    prefill = small_target.prefill(shown[0], CAP)[1]
    kept = within_budget(prefill.importance(), prefill.is_visual, 0.75)
    found, expected = whole.context(restricted(prefill, kept, states_leave=True)), default.context(prefill)
    for field in ("embeds", "states", "positions", "is_visual"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field))
    assert found.next_position == expected.next_position


@pytest.mark.parametrize("interface", ["fixed_prefix", "dynamic_insertion", "correction_rebuild"])
def test_other_interfaces_have_budgets_too(interface, small_target, small_conversations, make_drafter):
    drafter = make_drafter("fovea", interface=interface)
    conversation = small_conversations[0]
    (sample,) = measured(small_target, drafter, [conversation]).samples
    encoded = small_target.encode(user_turns(conversation)[0], [])
    trace = generate(small_target, proposer_for(drafter, TREE), encoded, max_new_tokens=CAP)
    assert [accepted[-1] for accepted in sample.accepted] == [r.accepted for r in trace.rounds]


def test_accepted_drafts_are_the_walk_along_the_answer():
    tree = DraftTree(
        tokens=np.array([1, 5, 6, 7, 8, 5]),
        parents=np.array([-1, 0, 0, 2, 3, 1]),
        depths=np.array([0, 1, 1, 2, 3, 2]),
        log_probs=np.zeros(6),
    )
    answers = {(6, 7, 8, 9): 3, (6, 7, 9): 2, (5, 5, 5): 2, (4,): 0, (6, 7): 2, (6,): 1}
    assert {answer: accepted_drafts(tree, answer) for answer in answers} == answers


def prefix_importance(target, encoded, committed):
    """Of a pass over this prefix alone."""
    prefill = target.prefill(encoded.followed_by(committed), 1)[1]
    first = int(prefill.is_visual.nonzero()[0, 0])
    return prefill.visual_attention(torch.arange(first, len(prefill.ids))).mean(0)


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_the_target_would_have_accepted_so_many(budget, small_target, small_conversations, make_drafter):
    """Against real passes of the target over trees that are drafted from each prefix with a share of its tokens."""
    drafter, moved, differ = make_drafter("fovea"), 0, 0
    for conversation in small_conversations[:3]:
        encoded = small_target.encode(user_turns(conversation)[0], [])
        (sample,) = measured(small_target, drafter, [conversation]).samples
        answer = generate(small_target, proposer_for(drafter, TREE), encoded, max_new_tokens=CAP).tokens
        place, kept_before = 1, None
        for full, fewer in ((row[-1], row[budget]) for row in sample.accepted):
            _, prefill = small_target.prefill(encoded, CAP, TREE.max_drafts)
            state, whole = small_target.prefill(encoded.followed_by(answer[: place - 1]), CAP, TREE.max_drafts)
            importance = prefix_importance(small_target, encoded, answer[:place])
            kept = within_budget(importance, prefill.is_visual, CONFIG.ratios[budget])
            moved += kept_before is not None and not torch.equal(kept, kept_before)
            proposer = proposer_for(drafter, TREE)
            proposer.start(restricted(prefill, kept, states_leave=False))
            proposer.commit(torch.tensor(answer[:place]), whole.hidden[len(encoded.ids) - 1 :])
            tree = proposer.propose()
            chosen = small_target.lm_head(extend_tree(small_target, state, tree)).argmax(-1).tolist()
            verdict = verify(tree.drafts, chosen.__getitem__, (), remaining=len(answer) - place)
            assert verdict.accepted == fewer
            differ += full != fewer
            place, kept_before = place + full + 1, kept
    assert (moved > 0) == (budget > 0), "the ranking changes along the answer"
    assert differ > 0


def test_importance_is_that_of_a_pass_over_the_prefix_alone(small_target, shown):
    for encoded in shown:
        answer = [5, 9, 7, 11, 4]
        whole = small_target.prefill(encoded.followed_by(answer), 1)[1]
        ends = [0, 1, 4, 5]
        found = importance_along(whole, [len(encoded.ids) + end for end in ends])
        for importance, end in zip(found, ends, strict=True):
            torch.testing.assert_close(importance, prefix_importance(small_target, encoded, answer[:end]))
        assert not torch.allclose(found[0], found[-1], rtol=1e-3)


def test_the_focus_is_what_each_step_attends_to(small_target, shown):
    encoded = shown[1]
    answer = [5, 9, 7, 11]
    sets = attended(small_target.prefill(encoded.followed_by(answer[:-1]), 1)[1], len(answer), 3)
    assert len(sets) == len(answer)
    for step in range(len(answer)):
        _, prefill = small_target.prefill(encoded.followed_by(answer[:step]), 1)
        weights = prefill.visual_attention(torch.tensor([len(encoded.ids) + step - 1]))[0]
        assert sets[step] == sorted(weights.topk(3).indices.tolist())


def test_what_the_roots_retrieve_is_recorded_where_something_is_retrieved(
    small_target, small_conversations, make_drafter
):
    (sample,) = measured(small_target, make_drafter("fovea"), small_conversations[:1]).samples
    assert len(sample.retrieved) == len(sample.accepted)
    assert {2 <= len(chosen) <= 5 for chosen in sample.retrieved} == {True}
    (plain,) = measured(small_target, make_drafter("eaglevlm"), small_conversations[:1]).samples
    assert plain.retrieved == []


def test_the_result_survives_its_folder_and_figures_follow_from_samples(
    small_target, small_conversations, make_drafter, tmp_path
):
    result = measured(small_target, make_drafter("fovea"), small_conversations, settings={"method": "fovea"})
    result.save(tmp_path)
    again = BudgetResult.load(tmp_path)
    assert again == replace(result, settings=again.settings)
    assert again.figures() == result.figures()
    pooled = result.figures()["all"]["budget"]
    by_hand = budget_figures([states_of(s.accepted, CONFIG.ratios) for s in result.samples], CONFIG.ratios)
    assert {key: pooled[key] for key in by_hand} == by_hand
    assert pooled["mean_accepted"]["1.0"] == pytest.approx(
        np.mean([accepted[-1] for s in result.samples for accepted in s.accepted])
    )
    with pytest.raises(FileNotFoundError, match="diagnostics=budget"):
        BudgetResult.load(tmp_path / "elsewhere")


def test_broken_prompts_are_named_and_the_others_measured(small_target, small_conversations, make_drafter, tmp_path):
    broken = replace(small_conversations[0], key="broken", images=(tmp_path / "nowhere.png",))
    seen = []
    prompts = [broken, small_conversations[5], small_conversations[1]]
    result = measured(small_target, make_drafter("fovea"), prompts, progress=lambda done, total: seen.append(done))
    assert list(result.failed) == ["broken"]
    assert "nowhere.png" in result.failed["broken"]
    assert result.text_only == ["text"]
    assert [sample.key for sample in result.samples] == ["wide"]
    assert seen == [1, 2, 3]


class TestRefused:
    def test_prompts_without_pictures(self, small_target, small_conversations):
        with pytest.raises(ValueError, match="none of the 1 prompts is one; choose another benchmark"):
            require_visual(small_target, [small_conversations[5]], CAP)
        require_visual(small_target, small_conversations[5:], CAP)

    def test_a_target_that_does_not_say_what_it_attends_to(self, small_target, small_conversations):
        class Silent:
            spec, device, encode = small_target.spec, small_target.device, small_target.encode

            def prefill(self, *args, **kwargs):
                state, prefill = small_target.prefill(*args, **kwargs)
                return state, replace(prefill, importance=None, visual_attention=None)

        with pytest.raises(ValueError, match="let its prefill give visual_attention"):
            require_visual(Silent(), small_conversations, CAP)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"ratios": (0.0, 0.5)}, "the last one 1"),
            ({"ratios": (0.5, 0.25, 1.0)}, "ascending"),
            ({"ratios": (-0.5, 0.25, 1.0)}, "from 0 to 1"),
            ({"ratios": ()}, "ratios is"),
            ({"low": 0.3}, "low is 0.3; choose one of the ratios"),
            ({"low": 0.75, "high": 0.25}, "low must be below high"),
            ({"focus_tokens": 0}, "focus_tokens is 0"),
        ],
    )
    def test_impossible_settings(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            BudgetConfig(**wrong)
