"""The stages of the evidence: which tables and figures of the FOVEA and SpecVLM papers they bring, and how."""

from __future__ import annotations

from fovea.app.launch import CONFIG_DIR
from fovea.campaign.plan import Measurement, Stage, Training
from fovea.evaluation.page.belonging import BRANCHES

#: Second stage of a method's training, as an experiment; it starts from the weights of the first.
SECOND_STAGE = {"vispec": "vispec_stage2"}
#: Of a measurement that is compared with its neighbours: nothing beside the two loops.
_BARE = ("speed.trajectories=0", "speed.transformers_prompts=0")
#: Draft trees from a chain to the papers' own, as width, depth and nodes, the root counted.
TREES = ((1, 2, 3), (1, 4, 5), (1, 6, 7), (2, 4, 8), (2, 6, 10), (3, 6, 16), (4, 6, 24), (6, 6, 40))
#: Fixed numbers of visual tokens beside the 16 of the controls: below what a small picture has, up to the paper's most.
FIXED = (2, 4, 8, 32, 128, 512)
#: Settings of SpecVLM's Table 4: ratios of the branches that shorten, and queries of the resampler.
RATIOS, QUERIES = (2, 3, 5, 10, 20), (1, 2, 4, 8, 10)
#: Seconds that a drafter trains on two CPU cores, where it is not about a minute.
_SECONDS = {
    "dream": 45,
    "eagle2": 25,
    "eagle3": 140,
    "eaglevlm": 25,
    "fovea": 105,
    "fovea_appendix": 110,
    "msd": 25,
    "specvlm": 70,
    "specvlm_concat": 40,
    "specvlm_weight": 30,
    "vispec": 70,
}


def methods() -> list[str]:
    """Names of everything that can be compared."""
    return sorted(path.stem for path in (CONFIG_DIR / "method").glob("*.yaml"))


def training(method: str) -> Training | None:
    """The training of ``method``; None if it has no weights, and so no experiment of its name."""
    if not (CONFIG_DIR / "experiment" / f"{method}.yaml").is_file():
        return None
    stages = (method, *filter(None, [SECOND_STAGE.get(method)]))
    return Training(method, stages, seconds=_SECONDS.get(method, 60))


def method_stage(names: list[str], prompts: int | None = None) -> Stage:
    """Every method of ``names`` on the same prompts."""
    measured = tuple(Measurement(name, (f"method={name}",), training(name)) for name in names)
    about = "every method with an equal budget (FOVEA, Table 1; SpecVLM, Tables 1 and 3)"
    return Stage("methods", about, measured, prompts=prompts)


def evidence() -> list[Stage]:
    """All stages, in the order in which they are made."""
    fovea, eaglevlm, specvlm, dream = (training(name) for name in ("fovea", "eaglevlm", "specvlm", "dream"))
    names = sorted(path.stem for path in (CONFIG_DIR / "experiment" / "ablation").glob("*.yaml"))
    ablations = [Training(name, (f"ablation/{name}",), seconds=105) for name in names]
    online = ("data.online=true", "model.recipe.epochs=5", "speed.prompts_per_epoch=96", *_BARE)

    def swept(name: str, *overrides: str) -> Measurement:
        return Measurement(name, (*overrides, *_BARE), fovea)

    return [
        method_stage(methods()),
        Stage(
            "ablations",
            "FOVEA with a part left out or exchanged, trained so (FOVEA, Table 2)",
            (swept("fovea"), *(Measurement(one.name, _BARE, one) for one in ablations)),
        ),
        Stage(
            "interfaces",
            "interfaces to the drafter's cache, one checkpoint (FOVEA, Table 3)",
            tuple(
                swept(name, f"drafter.interface={name}")
                for name in ("fovea", "fixed_prefix", "dynamic_insertion", "correction_rebuild")
            ),
        ),
        Stage(
            "controls",
            "rules of retrieval, controls and fixed numbers, one checkpoint (FOVEA, Table 7 and Figure 4)",
            (
                swept("mass"),
                swept("dense", "drafter.retrieval.mode=dense"),
                *(
                    swept(mode, f"drafter.retrieval.mode={mode}", "drafter.retrieval.k=16")
                    for mode in ("topk", "random", "static_image", "query_agnostic", "state_only", "once_per_block")
                ),
                *(swept(f"top{k}", "drafter.retrieval.mode=topk", f"drafter.retrieval.k={k}") for k in FIXED),
            ),
        ),
        Stage(
            "budgets",
            "visual budgets, and the movement of the focus, Eq. 29 (FOVEA, Appendix A, Figures 1(b) and 2)",
            (
                Measurement("fovea", ("diagnostics=budget", *_BARE), fovea, 0.6),
                Measurement(
                    "dream", ("method=dream", "drafter.visual_keep=1", "diagnostics=budget", *_BARE), dream, 0.6
                ),
            ),
        ),
        Stage(
            "depths",
            "how deep nodes are corrected, one checkpoint (FOVEA, Figure 6)",
            tuple(swept(str(depth), f"drafter.max_correction_depth={depth}") for depth in range(4)),
        ),
        Stage(
            "trees",
            "speed over the shape of the draft tree, from a chain to the papers' trees",
            tuple(
                Measurement(f"{name}_{w}_{d}_{n}", (f"method={name}", *_shape(w, d, n), *_BARE), of)
                for name, of in (("fovea", fovea), ("eaglevlm", eaglevlm))
                for w, d, n in TREES
            ),
            prompts=48,
        ),
        Stage(
            "sampled",
            "answers drawn at temperature 1 (SpecVLM, Tables 1 and 5, temperature 1)",
            tuple(
                Measurement(name, (f"method={name}", "decode.temperature=1", *_BARE), of)
                for name, of in (("eaglevlm", eaglevlm), ("specvlm", specvlm), ("fovea", fovea))
            ),
        ),
        _branches(),
        Stage(
            "epochs",
            "EagleVLM and SpecVLM after each epoch of training online (SpecVLM, Table 7)",
            runs=tuple(
                Training(f"{name}_online", (name,), online, measured=True, seconds=seconds)
                for name, seconds in (("eaglevlm", 320), ("specvlm", 400))
            ),
        ),
    ]


def _branches() -> Stage:
    """Every branch of SpecVLM's compressor alone, with every ratio of the paper; each takes a drafter of its own."""
    made = []
    for branch, setting in BRANCHES.items():
        for number in QUERIES if setting == "queries" else RATIOS:
            settings = (f"drafter.compression.mode={branch}", f"drafter.compression.{setting}={number}")
            alone = Training(f"specvlm_{branch}_{number}", ("specvlm",), settings, seconds=30)
            made.append(Measurement(f"{branch}_{number}", _BARE, alone))
    return Stage("branches", "branches of SpecVLM's compressor one by one (SpecVLM, Table 4)", tuple(made))


def _shape(width: int, depth: int, nodes: int) -> tuple[str, ...]:
    return tuple(
        f"decode.tree.{name}={value}"
        for name, value in zip(("width", "depth", "nodes"), (width, depth, nodes), strict=True)
    )
