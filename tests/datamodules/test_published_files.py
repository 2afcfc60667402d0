"""What all benchmarks share: finding files, arrow folders, pictures that are read late, and what is refused."""

from __future__ import annotations

import pickle

import pytest

from datamodules.benchmarks import BenchmarkConversations
from datamodules.conversations import SourceError
from fovea.app.typed import SettingError
from fovea.artifacts.lesson import hash_image
from fovea.targets.conversation import StoredImage
from fovea.targets.images import BrokenImageError, open_image
from tests.datamodules.published import picture, put_parquet, put_tsv, read, shown, table, text

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_tables")

RECORDS = [{"question_id": f"q{n}", "question": "What?", "image": n} for n in range(1, 4)]


def put_vqa(folder, records=RECORDS):
    put_parquet(folder / "data/validation-00000-of-00001.parquet", records, "image")
    return read("textvqa", folder, "split=validation", "instruction=null")


@pytest.mark.parametrize("split", [True, False])
def test_arrow_folders(tmp_path, split):
    import datasets

    made = table(RECORDS, "image")
    (datasets.DatasetDict({"validation": made}) if split else made).save_to_disk(tmp_path / "saved")
    items = read("textvqa", tmp_path / "saved", "split=validation", "instruction=null")
    assert [(item.key, shown(item)) for item in items] == [(f"textvqa/q{n}", f"[{n}]What?") for n in (1, 2, 3)]


def test_arrow_files(tmp_path):
    import pyarrow as pa

    rows = table(RECORDS, "image").data.table
    with pa.OSFile(str(tmp_path / "validation.arrow"), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows)
    assert shown(read("textvqa", tmp_path, "split=validation", "instruction=null")[2]) == "[3]What?"


def test_a_table_without_its_split_in_its_name(tmp_path):
    record = {"index": 1, "question": "Is it?", "image": text(1), "answer": "Yes", "category": "count"}
    put_tsv(tmp_path / "MME.tsv", record)
    assert [(item.key, item.source) for item in read("mme", tmp_path)] == [("mme/1", "mme/count")]


def test_a_converters_layout_of_the_hub(tmp_path):
    put_parquet(tmp_path / "default/test/0000.parquet", [{"question_id": 1, "question": "What?", "image": 1}], "image")
    assert len(read("textvqa", tmp_path, "split=test")) == 1


def test_pictures_are_read_when_they_are_opened(tmp_path, monkeypatch):
    from datamodules.benchmarks import tables

    opened = []
    encoded = tables._encoded
    monkeypatch.setattr(tables, "_encoded", lambda *arguments: opened.append(arguments) or encoded(*arguments))
    first, second, _ = put_vqa(tmp_path)
    (image,) = second.images
    assert not opened
    assert isinstance(image, StoredImage)
    assert str(image) == "data/validation-00000-of-00001.parquet, record 2"
    assert open_image(image).getpixel((0, 0)) == (2, 2, 2)
    assert len(opened) == 1
    assert hash_image(image) != hash_image(first.images[0])


def test_pictures_travel_to_other_processes(tmp_path):
    image = pickle.loads(pickle.dumps(put_vqa(tmp_path)[1].images[0]))
    assert image.read() == picture(2)


def test_records_without_a_picture_are_left_out_and_counted(tmp_path, caplog):
    with caplog.at_level("INFO"):
        items = put_vqa(tmp_path, [RECORDS[0], {**RECORDS[1], "image": None}, RECORDS[2]])
        assert [item.key for item in items] == ["textvqa/q1", "textvqa/q3"]
    assert f"TextVQA in {tmp_path}: 3 records read, 2 kept, 1 left out without a picture" in caplog.text
    assert items.counts() == {"read": 3, "kept": 2, "without a picture": 1}
    with pytest.raises(SourceError, match="there is no prompt: 1 records read, 0 kept, 1 left out without a picture"):
        len(put_vqa(tmp_path / "none", [{**RECORDS[1], "image": None}, *RECORDS[:0]]))


def test_a_broken_picture_is_named_when_it_is_opened(tmp_path):
    record = {"index": 1, "question": "Which?", "image": "x" * 70 + "?", "answer": "A"}
    put_tsv(tmp_path / "MMT-Bench_VAL.tsv", {**record, "category": "c"}, {**record, "index": 2, "category": "c"})
    first, second = read("mmt_bench", tmp_path)
    with pytest.raises(BrokenImageError, match=r"image '.*/MMT-Bench_VAL.tsv, line 3' cannot be read \(.*mend"):
        open_image(second.images[0])
    with pytest.raises(BrokenImageError, match=r"MMT-Bench_VAL.tsv, line 2"):
        hash_image(first.images[0])


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("mmt_bench", "VAL-*.parquet, arrow files of save_to_disk, or a TSV of 'VAL'"),
        ("textvqa", "TextVQA_*_val.json"),
        ("mme", "*/*.txt and */questions_answers_YN/*.txt, test-*.parquet"),
        ("chartqa", "test/test_human.json and test/test_augmented.json, test-*.parquet"),
        ("mathvista", "testmini.json"),
        ("ocrbench", "OCRBench.json"),
        ("ocrbench_v2", "OCRBench_v2.json"),
        ("scienceqa", "problems.json"),
        ("seed_bench", "SEED-Bench.json"),
        ("seed_bench_2", "SEED-Bench_v2_level1_2_3.json"),
        ("llava_bench", "questions.jsonl"),
        ("mmbench", "a TSV of 'dev'"),
        ("vqav2", "v2_OpenEnded_mscoco_test-dev2015_questions.json"),
        ("mmmu", "validation-*.parquet"),
    ],
)
def test_what_is_looked_for_is_named(tmp_path, name, files):
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(FileNotFoundError) as empty:
        read(name, tmp_path)
    assert files in str(empty.value)
    with pytest.raises(FileNotFoundError, match="does not exist; it should hold") as missing:
        read(name, tmp_path / "nowhere")
    assert files in str(missing.value)
    assert "\n" not in str(missing.value)
    with pytest.raises(SettingError, match=r"benchmark\.folder is not set"):
        read(name, None)


def test_another_benchmarks_records_are_refused_by_name(tmp_path):
    put_parquet(tmp_path / "data/train-0.parquet", [{"question_id": 1, "prompt": "What?", "image": 1}], "image")
    items = read("llava_bench", tmp_path)
    message = r"train-0.parquet, record 1: not a record of LLaVA-Bench .*'text or question' is missing; it has "
    with pytest.raises(SourceError, match=message):
        len(items)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", r"SEED-Bench.json: 'questions' is missing; it is the file of something else"),
        ('{"questions": {}}', r"SEED-Bench.json must hold a list of records"),
        ('{"questions": [1]}', r"SEED-Bench.json, record 1: not an object but int"),
        ('{"questions": [{"data_type": "image"}]}', r"SEED-Bench.json, record 1: .*'data_id' is missing"),
        ('{"questions": [', r"SEED-Bench.json, line 1: not JSON"),
    ],
)
def test_wrong_files_are_refused(tmp_path, content, message):
    (tmp_path / "SEED-Bench.json").write_text(content)
    with pytest.raises(SourceError, match=message):
        len(read("seed_bench", tmp_path))


def test_a_cut_table_is_refused(tmp_path):
    put_vqa(tmp_path)
    path = tmp_path / "data/validation-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:300])
    items = read("textvqa", tmp_path, "split=validation")
    with pytest.raises(SourceError, match=r"00001.parquet cannot be read as a table \(.*download it anew"):
        len(items)


def test_the_hub_without_a_network(tmp_path):
    items = read("textvqa", "hf://datasets/someone/textvqa")
    with pytest.raises(SourceError, match=r"hf://datasets/someone/textvqa, split val cannot be loaded .*local folder"):
        len(items)


def test_the_hub_gives_the_records_of_its_splits(monkeypatch):
    import datasets

    def load_dataset(name, subset, split, revision):
        assert (name, split, revision) == ("MMMU/MMMU", "validation", "v1")
        record = {"id": f"validation_{subset}_1", "question": "Which?", "options": "['x']", "answer": "A", "image_1": 4}
        return table([record], "image_1")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    items = read("mmmu", "hf://datasets/MMMU/MMMU@v1", "subsets=[Art,Math]")
    assert [(item.key, item.source) for item in items] == [
        ("mmmu/validation_Art_1", "mmmu/Art"),
        ("mmmu/validation_Math_1", "mmmu/Math"),
    ]


def test_bad_settings(tmp_path):
    with pytest.raises(SourceError, match="no benchmark is called 'chart'; choose from: chartqa, llava_bench"):
        BenchmarkConversations("chart", tmp_path, "test")
    with pytest.raises(SourceError, match="limit must be at least 1, got 0"):
        BenchmarkConversations("chartqa", tmp_path, "test", limit=0)


def test_the_digest_changes_with_files_and_settings(tmp_path):
    put_vqa(tmp_path)
    overrides = ((), ("limit=1",), ("instruction=null",))
    digests = [read("textvqa", tmp_path, "split=validation", *typed).digest() for typed in overrides]
    again = read("textvqa", tmp_path, "split=validation").digest()
    put_vqa(tmp_path, RECORDS[::-1])
    digests.append(read("textvqa", tmp_path, "split=validation").digest())
    put_parquet(tmp_path / "data/validation-00001-of-00002.parquet", RECORDS[:1], "image")
    digests.append(read("textvqa", tmp_path, "split=validation").digest())
    assert again == digests[0]
    assert len(set(digests)) == 5
    put_tsv(
        tmp_path / "a" / "MME.tsv", {"index": 1, "question": "a", "image": text(1), "answer": "Yes", "category": "c"}
    )
    assert len(read("mme", tmp_path / "a")) == 1
