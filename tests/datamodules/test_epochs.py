"""What is left of an epoch: dealt to as many ranks as there are, every sample once, nothing read twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

from datamodules.curriculum import Curriculum, CurriculumSampler
from datamodules.epochs import EpochLoader, EpochSampler
from datamodules.identity import samples_digest
from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.fingerprint import Fingerprint
from fovea.artifacts.reading import open_artifacts
from fovea.artifacts.schema import SampleMeta
from fovea.artifacts.writer import ArtifactWriter, finish_rank
from fovea.targets.teacher_batch import TeacherSample


class Numbers:
    """A set whose samples are their numbers; it remembers what was read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def loaders(
    length: int, ranks: int, size: int, epoch: int = 2, curriculum: bool = False, seed: int = 7, name: str = "n"
) -> list[EpochLoader]:
    """One per rank. A training of curricula is the longer the more ranks there are, as with max_steps."""

    def sampler(rank: int) -> EpochSampler:
        dealt = {"num_replicas": ranks, "rank": rank, "seed": seed}
        if not curriculum:
            return EpochSampler(length, **dealt)
        kinds = [number % 2 == 0 for number in range(length)] + [True, False]
        return CurriculumSampler(kinds, length, Curriculum(0.2), lambda: 4.0 + ranks, **dealt)

    def loader(rank: int) -> EpochLoader:
        made = EpochLoader(
            Numbers(length + 2), sampler=sampler(rank), batches_done=lambda: 0, batch_size=size, identity=lambda: name
        )
        made.sampler.set_epoch(epoch)
        return made

    return [loader(rank) for rank in range(ranks)]


@pytest.fixture
def make_artifacts(tmp_path):
    """Artifacts whose samples were written in the order of these numbers."""

    def sample(number: int) -> TeacherSample:
        place = torch.arange(5)
        states = (torch.full((rows, 4), float(number)) for rows in (5, 2, 0))
        return TeacherSample(f"k{number:02}", place, place[None], place >= 3, place < 0, *states)

    def make(order):
        folder = tmp_path / f"set-{len(list(tmp_path.iterdir()))}"
        fingerprint = Fingerprint("none", {}, "random", (1,), "fp32", "dataset")
        with ArtifactWriter(folder, fingerprint, dtype="fp32", shard_bytes=10_000) as out:
            for number in order:
                out.write(sample(number), SampleMeta())
        finish_rank(folder, fingerprint, {}, 0, 1)
        return open_artifacts(folder)

    return make


def batches(loader: EpochLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def joined(parts: list[list[int]]) -> list[int]:
    return [number for part in parts for number in part]


def whole_order(length: int, epoch: int, curriculum: bool) -> list[int]:
    (one,) = loaders(length, 1, 1, epoch, curriculum)
    return [number for batch in batches(one) for number in batch]


geometry = st.tuples(st.integers(1, 5), st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), geometry, geometry, st.integers(0, 40), st.booleans())
def test_ranks_take_the_rest_of_the_epoch_once(length, before, after, stopped, curriculum) -> None:
    first = loaders(length, *before, curriculum=curriculum)
    order = first[0].sampler._order().tolist()
    stopped = min(stopped, len(first[0]) - 1)
    done = [number for loader in first for batch in batches(loader)[:stopped] for number in batch]
    state = first[0].state_dict(stopped)
    assert Counter(done) == Counter(order[: state["taken"]])

    second = loaders(length, *after, curriculum=curriculum)
    for loader in second:
        loader.load_state_dict(state)
    rest = [batches(loader) for loader in second]
    # All ranks take equally many steps, with equally many samples each, and the epoch ends with the last batch.
    assert len({tuple(map(len, given)) for given in rest}) == 1
    assert second[0].first_batch + len(rest[0]) == len(second[0])
    dealt = [number for row in zip(*map(joined, rest), strict=True) for number in row]
    missing = -(length - state["taken"]) % after[0]
    assert dealt == order[state["taken"] :] + [order[place % length] for place in range(missing)]
    for loader, part in zip(second, rest, strict=True):
        assert loader.dataset.read == joined(part)
    if before == after:
        assert rest == [batches(loader)[stopped:] for loader in first]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40), st.lists(geometry, min_size=2, max_size=4), st.data())
def test_a_run_can_be_left_again_and_again(length, places, data) -> None:
    done, state = [], None
    for ranks, size in places:
        part = loaders(length, ranks, size)
        for loader in part:
            loader.load_state_dict(state or {})
        left = len(part[0]) - part[0].first_batch
        if left < 2:
            break
        made = data.draw(st.integers(0, left - 1))
        done += [number for loader in part for batch in batches(loader)[:made] for number in batch]
        state = part[0].state_dict(part[0].first_batch + made)
    (last,) = loaders(length, 1, 3)
    last.load_state_dict(state or {})
    assert sorted(done + joined(batches(last))) == list(range(length))


def test_another_epoch_is_whole() -> None:
    (loader,) = loaders(10, 1, 3)
    loader.load_state_dict({"epoch": 2, "taken": 6, "length": 10})
    assert len(batches(loader)) == 2
    assert loader.first_batch == 2
    loader.sampler.set_epoch(3)
    assert sorted(joined(batches(loader))) == list(range(10))
    assert loader.first_batch == 0
    # The end of an epoch is no place within it.
    loader.load_state_dict({"epoch": 3, "taken": 10, "length": 10})
    assert len(batches(loader)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "m"}, "within an epoch of 10 samples, and there are 10 others now"),
        ({"length": 9}, "within an epoch of 10 samples, and there are 9 now"),
        ({"seed": 8}, "whose order seed=7 made, and it is 8 now"),
    ],
)
@pytest.mark.parametrize("curriculum", [False, True])
def test_other_samples_or_another_order_are_refused_within_an_epoch(change, message, curriculum) -> None:
    state = loaders(10, 1, 3, curriculum=curriculum)[0].state_dict(2)
    (other,) = loaders(**{"length": 10, "ranks": 1, "size": 3, "curriculum": curriculum, **change})
    with pytest.raises(ArtifactError, match=message):
        other.load_state_dict(state)
    # Between epochs all may change, and checkpoints of older versions did not know.
    other.load_state_dict({**loaders(10, 1, 3)[0].state_dict(0), "epoch": 3})
    other.load_state_dict({**state, "epoch": 3, "taken": 10})
    if "length" not in change:
        other.load_state_dict({"epoch": 2, "taken": 6, "length": 10})
        assert other.first_batch == 2


def test_the_order_of_a_set_is_that_of_its_keys(make_artifacts) -> None:
    """Whoever wrote the samples, in whatever order."""
    ways = [make_artifacts(order) for order in (range(12), reversed(range(12)), [*range(6, 12), *range(6)])]
    assert len({tuple(sample.key for sample in artifacts) for artifacts in ways}) == 1
    assert len({samples_digest(artifacts) for artifacts in ways}) == 1
    assert samples_digest(ways[0]) != samples_digest(make_artifacts(range(11)))
    assert samples_digest(Subset(ways[0], [1, 2])) != samples_digest(Subset(ways[0], [2, 1]))
    assert samples_digest(Subset(ways[0], [1, 2])) == samples_digest(Subset(ways[1], [1, 2]))
    both, other = ConcatDataset([ways[0], ways[1]]), ConcatDataset([Subset(ways[0], [0]), ways[1]])
    assert samples_digest(both) != samples_digest(other)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_empty_set_gives_no_batch_on_any_rank(ranks) -> None:
    for loader in loaders(0, ranks, 2):
        assert (len(loader), batches(loader), loader.first_batch) == (0, [], 0)


def test_more_ranks_than_samples() -> None:
    assert [batches(loader) for loader in loaders(2, 5, 4)] == [[[n]] for n in (whole_order(2, 2, False) * 3)[:5]]
