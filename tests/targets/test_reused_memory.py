"""Memory is written again only when nobody holds it."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import torch

from fovea.targets.reused_memory import ReusedMemory
from fovea.targets.teacher_batch import TeacherBatch, TeacherSample

MEGABYTE = 1 << 20


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_it_is_taken_again_when_it_is_free():
    memory = ReusedMemory()
    first = memory.empty((2, MEGABYTE), torch.float32)
    place, view = address(first), first[1, 5:9]
    view.fill_(3)
    del first
    second = memory.empty((2, MEGABYTE), torch.float32)
    assert address(second) != place  # the view is alive
    second.zero_()
    assert view.tolist() == [3, 3, 3, 3]
    del view
    third = memory.empty((MEGABYTE, 3), torch.bfloat16)  # another shape and dtype, of similar size
    assert address(third) == place
    assert (third.shape, third.dtype) == ((MEGABYTE, 3), torch.bfloat16)
    assert address(memory.empty((MEGABYTE,), torch.int8)) not in (place, address(second))


def test_a_graph_holds_it():
    memory = ReusedMemory()
    states = memory.empty((1024, 512), torch.float32).fill_(2.0)
    place, weight = address(states), torch.ones(512, 1, requires_grad=True)
    loss = (states @ weight).sum()
    del states
    other = memory.empty((1024, 512), torch.float32).zero_()
    assert address(other) != place
    loss.backward()
    assert weight.grad is not None
    assert (weight.grad == 2048).all()


def test_no_more_is_kept_than_asked():
    memory = ReusedMemory(kept=2)
    held = [memory.empty((MEGABYTE * n,), torch.uint8) for n in (2, 5, 11, 23)]
    assert len({address(tensor) for tensor in held}) == 4
    places = [address(tensor) for tensor in held]
    held.clear()
    again = memory.empty((MEGABYTE * 4,), torch.uint8)
    assert address(again) == places[1]
    assert len(memory._buffers) == 3  # and two that are free
    assert address(memory.empty((MEGABYTE * 23,), torch.uint8)) == places[3]


def test_batches_in_reused_memory_hold_what_they_should():
    """Lengths vary, and every earlier batch that is kept stays as it was."""
    generator = torch.Generator().manual_seed(0)

    def sample(tokens, visual):
        place = torch.arange(tokens)
        states = (torch.randn(rows, 700, generator=generator) for rows in (tokens, 2, visual))
        return TeacherSample("k", place, place.expand(3, -1), place >= tokens - 2, place < visual, *states)

    kept = []
    for number in range(12):
        samples = [sample(400 + 37 * number % 90, 380), sample(300, 50 + number)]
        batch = TeacherBatch.collate(samples)
        if number % 3 == 0:
            kept.append((batch, samples))
        for one, parts in [*kept, (batch, samples)]:
            for row, part in enumerate(parts):
                assert torch.equal(one.last[row, : len(part.ids)], part.last)
                assert torch.equal(one.visual[row, : len(part.visual)], part.visual)
                assert not one.last[row, len(part.ids) :].any()
                assert not one.visual[row, len(part.visual) :].any()


def test_threads_never_share_it():
    memory = ReusedMemory(kept=2)

    def write(number):
        draw, held = random.Random(number), []
        for turn in range(60):
            held.append(
                (memory.empty((MEGABYTE + draw.randrange(MEGABYTE),), torch.uint8).fill_((number + turn) % 251), turn)
            )
            if len(held) > draw.randrange(4):
                tensor, written = held.pop(draw.randrange(len(held)))
                assert tensor[:: MEGABYTE // 64].eq((number + written) % 251).all()
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, range(8)))
    assert len(memory._buffers) < 60  # many were written again


def test_every_tensor_of_a_batch_is_pinned(monkeypatch):
    place = torch.arange(6)
    states = [torch.randn(rows, 4) for rows in (6, 2, 3)]
    sample = TeacherSample("k", place, place.expand(3, -1), place >= 4, place < 3, *states, importance=torch.ones(3))
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    batch = TeacherBatch.collate([sample])
    moved = batch.pin_memory()
    for item in fields(batch):
        part, other = getattr(batch, item.name), getattr(moved, item.name)
        if isinstance(part, torch.Tensor):
            assert any(part is one for one in pinned), item.name
            assert torch.equal(part, other)
        else:
            assert part == other
