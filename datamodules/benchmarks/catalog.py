"""The benchmarks of the FOVEA and SpecVLM papers, an entry each; MMSpec has a reader of its own.

Field names are those of the authors' files and of the data sets on the hub (named by their addresses), which differ
where ``first`` stands. A TSV of VLMEvalKit has ``index``, ``question``, ``image``, ``answer``, ``category`` and, of
multiple-choice questions, ``A`` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from datamodules.benchmarks.entry import Benchmark, Layout, Record, first
from datamodules.benchmarks.files import json_lines, json_list, json_table, mme, science_qa
from datamodules.benchmarks.options import choices

_LETTER = "Answer with the option's letter from the given choices directly."
_SHORT = "Answer the question using a single word or phrase."

_SEED = (
    "Scene Understanding",
    "Instance Identity",
    "Instance Attributes",
    "Instance Location",
    "Instances Counting",
    "Spatial Relation",
    "Instance Interaction",
    "Visual Reasoning",
    "Text Understanding",
)
#: Dimensions of SEED-Bench-2 by number, from 1; those behind the last ask about videos or for pictures.
_SEED_2 = (
    *_SEED,
    "Celebrity Recognition",
    "Landmark Recognition",
    "Chart Understanding",
    "Visual Referring Expression",
    "Science Knowledge",
    "Emotion Recognition",
    "Visual Mathematics",
    "Difference Spotting",
    "Meme Comprehension",
    "Global Video Understanding",
    "Action Recognition",
    "Action Prediction",
    "Procedure Understanding",
    "In-Context Captioning",
    "Interleaved Image-Text Analysis",
)
_SEED_OPTIONS = choices("choice_a", "choice_b", "choice_c", "choice_d")
#: Kinds of SEED-Bench-2 whose pictures are all shown; of the others they are frames of videos, or options.
_SEED_2_KINDS = ("Single Image", "Multiple Images", "Interleaved Image")


def _seed_2_pictures(record: Record) -> list[str]:
    names = record["data_id"]
    folder = "cc3m-image" if record["data_source"] == "cc3m" else "SEED-Bench-2-image"
    return [f"{folder}/{name}" for name in ([names] if isinstance(names, str) else names)]


def _vqav2_picture(record: Record) -> str:
    kind = record["data_subtype"].replace("-dev", "")  # test-dev is a part of test
    return f"{kind}/COCO_{kind}_{int(record['image_id']):012d}.jpg"


def _dimension(names: tuple[str, ...]) -> Callable[[Record], str]:
    """The name of what a question of SEED-Bench asks for."""
    return lambda record: names[int(number) - 1] if (number := record.get("question_type_id")) else record["category"]


BENCHMARKS = {
    # The authors': hf://datasets/Kaining/MMT-Bench with MMT-Bench_VAL.tsv, MMT-Bench_ALL.tsv, and those with several
    # pictures (_MI), to be downloaded. As a data set with splits: hf://datasets/lmms-lab/MMT-Benchmark.
    "mmt_bench": Benchmark(
        "MMT-Bench",
        key="index",
        question="question",
        options=choices(),
        answer="answer",
        category=first("l2-category", "category"),
        asks=_LETTER,
    ),
    # textvqa.org; hf://datasets/lmms-lab/textvqa
    "textvqa": Benchmark(
        "TextVQA",
        layouts=[Layout("TextVQA_*_{split}.json", json_list("data"))],
        key=first("question_id", "index"),
        question="question",
        pictures=lambda record: f"train_images/{record['image_id']}.jpg",  # those of the validation split too
        asks=_SHORT,
    ),
    # MME_Benchmark_release_version; hf://datasets/lmms-lab/MME
    "mme": Benchmark(
        "MME",
        layouts=[Layout("*/*.txt", mme, beside="eval_tool"), Layout("*/questions_answers_YN/*.txt", mme)],
        key=first("question_id", "index"),
        shared=True,  # two questions about a picture
        question="question",
        pictures="image",
        answer="answer",
        category="category",
        asks="Please answer yes or no.",
    ),
    # github.com/vis-nlp/ChartQA; hf://datasets/lmms-lab/ChartQA and HuggingFaceM4/ChartQA
    "chartqa": Benchmark(
        "ChartQA",
        layouts=[
            Layout("{split}/{split}_human.json", json_list(human_or_machine="human")),
            Layout("{split}/{split}_augmented.json", json_list(human_or_machine="machine")),
        ],
        question=first("query", "question"),
        pictures=lambda record: f"png/{record['imgname']}",
        answer=first("label", "answer"),
        category=first("human_or_machine", "type", "split"),
        asks=_SHORT,
    ),
    # github.com/lupantech/MathVista; hf://datasets/AI4Math/MathVista
    "mathvista": Benchmark(
        "MathVista",
        layouts=[Layout("{split}.json", json_table)],
        roots=("", ".."),
        key=first("pid", "index"),
        question="question",
        stored=("decoded_image", "image"),
        pictures="image",
        options=choices(listed="choices", free="free_form"),
        answer="answer",
        category=lambda record: (record.get("metadata") or record)["task"],
        prompt="query",
    ),
    # github.com/Yuliang-Liu/MultimodalOCR; hf://datasets/echo840/OCRBench
    "ocrbench": Benchmark(
        "OCRBench",
        layouts=[Layout("OCRBench.json", json_list())],
        roots=("OCRBench_Images", ""),
        key=lambda record: record.get("id", record.get("index")),
        question="question",
        pictures="image_path",
        answer=first("answers", "answer"),
        category=first("type", "question_type", "category"),
    ),
    # the same repository; hf://datasets/ling99/OCRBench_v2
    "ocrbench_v2": Benchmark(
        "OCRBench v2",
        layouts=[Layout("OCRBench_v2.json", json_list())],
        key=first("id", "index"),
        question="question",
        pictures="image_path",
        answer=first("answers", "answer"),
        category=first("type", "category"),
    ),
    # github.com/lupantech/ScienceQA; hf://datasets/derek-thomas/ScienceQA and lmms-lab/ScienceQA
    "scienceqa": Benchmark(
        "ScienceQA",
        layouts=[Layout("problems.json", science_qa)],
        key=lambda record: record.get("id"),
        split="split",
        context=lambda record: f"Context: {record['hint']}" if record["hint"] else None,
        question="question",
        pictures="image",
        options=choices(listed="choices"),
        answer=lambda record: record["choices"][record["answer"]] if "choices" in record else record["answer"],
        category=first("subject", "category"),
        asks=_LETTER,
    ),
    # github.com/AILab-CVC/SEED-Bench, DATASET.md; hf://datasets/lmms-lab/SEED-Bench-2
    "seed_bench_2": Benchmark(
        "SEED-Bench-2",
        layouts=[Layout("SEED-Bench_v2_level1_2_3.json", json_list("questions"))],
        key=first("question_id", "index"),
        question="question",
        pictures=_seed_2_pictures,
        options=_SEED_OPTIONS,
        answer="answer",
        category=_dimension(_SEED_2),
        keep=lambda record: record.get("data_type", "Single Image") in _SEED_2_KINDS,
        marks=re.compile("<img>"),
        asks=_LETTER,
    ),
    # the same repository; hf://datasets/lmms-lab/SEED-Bench
    "seed_bench": Benchmark(
        "SEED-Bench",
        layouts=[Layout("SEED-Bench.json", json_list("questions"))],
        key=first("question_id", "index"),
        question="question",
        pictures=lambda record: f"SEED-Bench-image/{record['data_id']}",
        options=_SEED_OPTIONS,
        answer="answer",
        category=_dimension(_SEED),
        keep=lambda record: record.get("data_type", "image") == "image",
        asks=_LETTER,
    ),
    # hf://datasets/liuhaotian/llava-bench-in-the-wild and lmms-lab/llava-bench-in-the-wild
    "llava_bench": Benchmark(
        "LLaVA-Bench (In-the-Wild)",
        layouts=[Layout("questions.jsonl", json_lines)],
        roots=("images", ""),
        key=first("question_id", "index"),
        question=first("text", "question"),
        pictures="image",
        category="category",
    ),
    # github.com/open-compass/MMBench: mmbench_dev_20230712.tsv; hf://datasets/lmms-lab/MMBench
    "mmbench": Benchmark(
        "MMBench",
        key="index",
        context="hint",
        question="question",
        options=choices(letters="ABCD"),
        answer="answer",
        category=first("l2-category", "L2-category", "category"),
        asks=_LETTER,
    ),
    # visualqa.org; hf://datasets/lmms-lab/VQAv2
    "vqav2": Benchmark(
        "VQAv2",
        layouts=[
            Layout("v2_OpenEnded_mscoco_{split}_questions.json", json_list("questions", carried=("data_subtype",)))
        ],
        key=first("question_id", "index"),
        question="question",
        pictures=_vqav2_picture,
        asks=_SHORT,
    ),
    # hf://datasets/MMMU/MMMU, a folder and a configuration per subject
    "mmmu": Benchmark(
        "MMMU",
        key=first("id", "index"),
        question="question",
        stored=("image", *(f"image_{number}" for number in range(1, 8))),
        options=choices(listed="options", free="open"),
        answer="answer",
        category=lambda record: "_".join(record["id"].split("_")[1:-1]) if "id" in record else record["category"],
        marks=re.compile(r"<image (\d)>"),
        asks=_LETTER,
    ),
}
