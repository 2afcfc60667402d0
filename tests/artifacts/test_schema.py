"""A sample survives its two members bit by bit; what does not fit together is refused with its key."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load
from safetensors.torch import save as save_safetensors

from fovea.artifacts.errors import ArtifactError
from fovea.artifacts.schema import META, TENSORS, SampleMeta, decode_sample, encode_sample


def bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def round_trip(sample, dtype="bf16"):
    members = encode_sample(sample, SampleMeta(), dtype)
    return decode_sample(members[META], bytes_tensor(members[TENSORS]))[0]


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("visual", [0, 3])
def test_bit_exact(make_sample, assert_same, dtype, torch_dtype, visual):
    sample = make_sample("k", visual=visual, dtype=torch_dtype)
    assert_same(round_trip(sample, dtype), sample)


@pytest.mark.parametrize("sizes", [(), (1,), (5, 8, 0)])
def test_pictures_in_the_place_of_visual_tokens(make_sample, assert_same, sizes):
    sample = make_sample("k", visual=3 if sizes else 0)
    pictures = tuple(torch.arange(size, dtype=torch.uint8) for size in sizes)
    back = round_trip(replace(sample, pictures=pictures))
    assert len(back.pictures) == len(pictures)
    assert all(torch.equal(one, other) for one, other in zip(back.pictures, pictures, strict=True))
    assert back.visual.shape == sample.visual.shape
    assert back.visual.isnan().all()
    assert_same(replace(back, visual=sample.visual), sample)
    assert round_trip(sample).pictures is None
    lost = encode_sample(replace(sample, pictures=pictures), SampleMeta(), "bf16")
    about = lost[META].replace(b'"pictures": %d' % len(sizes), b'"pictures": 7')
    with pytest.raises(ArtifactError, match=rf"'k' holds no tensor 'picture.{len(sizes)}'"):
        decode_sample(about, bytes_tensor(lost[TENSORS]))


def test_large_values_and_one_axis(make_sample, assert_same):
    sample = make_sample("k")
    sample = replace(sample, positions=sample.positions[:1], last=torch.full_like(sample.last, 1e5))
    assert_same(round_trip(sample), sample)


def test_views_are_stored_without_what_they_view(make_sample, assert_same):
    sample = make_sample("k")
    large = torch.randn(5000, 2 * sample.last.shape[1]).bfloat16()
    rows = sample.ids.shape[0]
    view = replace(sample, last=large[10 : 10 + rows, ::2], visual=large[:3, : sample.last.shape[1]])
    sizes = {len(encode_sample(s, SampleMeta(), "bf16")[TENSORS]) for s in (view, sample)}
    assert len(sizes) == 1
    assert_same(round_trip(view), replace(view, last=view.last.contiguous(), visual=view.visual.contiguous()))


def test_fp8_keeps_each_row_to_its_own_scale(make_sample):
    sample = make_sample("k")
    scales = torch.logspace(-3, 4, sample.ids.shape[0])[:, None]
    sample = replace(sample, last=(sample.last.float() * scales).bfloat16())
    sample.last[0] = 0
    back = round_trip(sample, "fp8")
    assert back.last.dtype == torch.bfloat16
    error = (back.last.float() - sample.last.float()).abs()
    largest = sample.last.float().abs().amax(dim=-1, keepdim=True)
    # e4m3 has 3 fraction bits: half a step is 1/16 of a value, or 2^-10 of the scale for the
    # smallest ones; bf16 adds 2^-8.
    assert (error <= sample.last.float().abs() * (1 / 16 + 2**-7) + largest / 448 * 2**-10 + 1e-30).all()
    assert error.max() > 0
    assert torch.equal(back.last[0], torch.zeros_like(back.last[0]))


def test_is_plain_safetensors_and_json(make_sample):
    meta = SampleMeta("charts", ((640, 480),), ("ab",))
    members = encode_sample(make_sample("k"), meta, "bf16")
    tensors = load(members[TENSORS])
    assert tensors["ids"].dtype == torch.int32
    assert tensors["last"].dtype == torch.bfloat16
    assert decode_sample(members[META], bytes_tensor(members[TENSORS]))[1] == meta


@pytest.mark.parametrize("name", ["last", "mid", "visual"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
def test_non_finite_states_are_refused(make_sample, name, value, dtype):
    sample = make_sample("some/key")
    getattr(sample, name)[1, 2] = value
    with pytest.raises(ArtifactError, match=rf"'some/key'.*'{name}'.*row 1"):
        encode_sample(sample, SampleMeta(), dtype)


def test_overflow_in_storage_is_refused(make_sample):
    sample = make_sample("k", dtype=torch.float32)
    sample.last[4, 0] = 3.4e38  # the next bf16 number is infinity
    with pytest.raises(ArtifactError, match="row 4"):
        encode_sample(sample, SampleMeta(), "bf16")


@pytest.mark.parametrize("name", ["ids", "answer_mask", "is_visual", "last", "mid", "visual", "importance"])
def test_unequal_lengths_are_refused_in_writing(make_sample, name):
    sample = make_sample("the key")
    wrong = replace(sample, **{name: getattr(sample, name)[:-1]})
    with pytest.raises(ArtifactError, match="'the key'"):
        encode_sample(wrong, SampleMeta(), "bf16")


@pytest.mark.parametrize("name", ["ids", "last", "mid", "visual", "importance"])
def test_unequal_lengths_are_refused_in_reading(make_sample, name):
    members = encode_sample(make_sample("the key"), SampleMeta(), "bf16")
    tensors = load(members[TENSORS])
    tensors[name] = tensors[name][:-1].clone()
    with pytest.raises(ArtifactError, match=r"'the key' of .* does not fit together"):
        decode_sample(members[META], bytes_tensor(save_safetensors(tensors)))


@pytest.mark.parametrize("name", ["answer_mask", "is_visual"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16])
def test_masks_that_are_numbers_are_refused(make_sample, name, dtype):
    """As an index, a mask of 0 and 1 takes rows 0 and 1."""
    sample = make_sample("the key")
    wrong = replace(sample, **{name: getattr(sample, name).to(dtype)})
    with pytest.raises(ArtifactError, match=rf"'the key' .*{name} is {str(dtype)[6:]} instead of bool"):
        encode_sample(wrong, SampleMeta(), "bf16")
    if dtype != torch.int64:  # which no artifact has
        members = encode_sample(sample, SampleMeta(), "bf16")
        tensors = load(members[TENSORS]) | {name: getattr(wrong, name)}
        with pytest.raises(ArtifactError, match=f"{name} is {str(dtype)[6:]} instead of bool"):
            decode_sample(members[META], bytes_tensor(save_safetensors(tensors)))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_cut_tensors_are_refused(make_sample, keep):
    members = encode_sample(make_sample("k"), SampleMeta(), "bf16")
    with pytest.raises(ArtifactError, match="'k' is damaged"):
        decode_sample(members[META], bytes_tensor(members[TENSORS])[:keep])


def test_older_artifacts_without_importance_are_read(make_sample):
    old = replace(make_sample("k"), importance=None)
    assert round_trip(old).importance is None


def test_missing_tensor_is_named(make_sample):
    members = encode_sample(make_sample("k"), SampleMeta(), "bf16")
    tensors = load(members[TENSORS])
    del tensors["mid"]
    with pytest.raises(ArtifactError, match="no tensor 'mid'"):
        decode_sample(members[META], bytes_tensor(save_safetensors(tensors)))
