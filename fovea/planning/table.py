"""The plan as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fovea.planning.memory import GIB, Phase
from fovea.planning.plan import Plan

#: Smallest part that a table of gibibytes shows.
_SHOWN = 0.005 * GIB


def print_plan(plan: Plan, title: str, notes: list[str]) -> None:
    """Prints the plan under ``title``; ``notes`` say what it was counted with."""
    console = Console()
    console.print(f"\n{title}\n", style="bold", highlight=False)
    console.print(_sizes(plan))
    console.print(_memory(plan))
    for line in [*notes, *verdict(plan)]:
        console.print(line, highlight=False, soft_wrap=True)


def verdict(plan: Plan) -> Iterator[str]:
    """Sentences: what fits, what does not, and what helps."""
    if plan.device_bytes is None:
        yield "Whether that fits is not judged: set planning.device_memory_gib to the memory of a device."
        return
    size = f"{plan.device_bytes / GIB:.0f} GiB"
    over = {phase.name: phase for phase in plan.typical if not plan.fits(phase)}
    tight = [phase for phase in plan.longest_phases if not plan.fits(phase) and phase.name not in over]
    if not over and not tight:
        yield f"It fits: no phase takes more than a device's {size}."
    for phase in over.values():
        yield f"It does not fit: {phase.name} takes {phase.total / GIB:.1f} GiB of {size}. {_remedy(phase)}"
    for phase in tight:
        yield (
            f"{phase.name}: typical samples fit into {size}; a batch of the longest ({plan.longest.tokens:,} tokens) "
            f"would take {phase.total / GIB:.1f} GiB. {_remedy(phase)}"
        )


def _remedy(phase: Phase) -> str:
    return {
        "export": "Lower data.export.batch_size or data.export.max_tokens.",
        "training": "Lower data.loader.batch_size, unroll.max_anchors or data.export.max_tokens.",
        "speed evaluation": "Train with speed_eval=off and measure with evaluate.py, or lower data.loader.batch_size.",
    }.get(phase.name, "Take a device with more memory.")


def _sizes(plan: Plan) -> Table:
    table = _table("", "", "")
    for name, count in plan.parameters.items():
        table.add_row("trainable parameters" if name == "total" else f"  {name}", _short(count), "")
    table.add_section()
    for name, count in plan.target_parameters.items():
        if count:
            table.add_row("target, frozen" if name == "total" else f"  {name}", _short(count), "")
    table.add_section()
    lengths = plan.lengths
    what = f"{lengths.tokens:,} tokens, {lengths.visual:,} visual, {lengths.answer:,} of answers"
    if plan.artifact_bytes:
        table.add_row("artifacts of a sample", f"{plan.sample_bytes / 1e6:,.2f} MB", what)
        table.add_row("artifacts of the run", f"{plan.artifact_bytes / 1e9:,.1f} GB", f"{plan.samples:,} samples")
    else:
        table.add_row("a sample, not stored", "", what)
    if plan.host_bytes:
        host = f"{plan.host_bytes / 1e9:,.1f} GB"
        table.add_row("host memory of the target", host, "between evaluations, all devices")
    table.add_section()
    batching, updates = plan.batching, plan.updates
    split = f"{batching.per_device} x {batching.accumulation} x {batching.devices} = {batching.per_update} samples each"
    table.add_row("optimizer updates", f"{updates.total:,}", f"{updates.per_epoch:,} per epoch, {split}")
    share = updates.warmup / max(1, updates.total)
    table.add_row("  of them warm-up", f"{updates.warmup:,}", f"{share:.1%}")
    return table


def _memory(plan: Plan) -> Table:
    """Gibibytes by phase for typical samples, and in the last lines for the longest."""
    table = _table("memory per device, GiB", *(phase.name for phase in plan.typical))
    for part in dict.fromkeys(part for phase in plan.typical for part in phase.parts):
        cells = [phase.parts.get(part) for phase in plan.typical]
        if all(size is None or size < _SHOWN for size in cells):
            continue
        table.add_row(f"  {part}", *("" if size is None else f"{size / GIB:.2f}" for size in cells))
    table.add_section()
    for name, lengths, phases in (
        ("typical samples", plan.lengths, plan.typical),
        ("longest samples", plan.longest, plan.longest_phases),
    ):
        label = f"{name} ({lengths.tokens:,} tokens)"
        table.add_row(label, *(f"{phase.total / GIB:.2f}" for phase in phases), style="bold")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_header=any(headings))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number and any(headings) else "left", no_wrap=number == 0)
    if not any(headings):
        table.columns[1].justify = "right"
    return table


def _short(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:,.3f} {unit}"
    return f"{count}  "
