"""SpecVLM's tables, with our figures in the row of the method that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.evaluation.page.belonging import branch_of, of_method
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.published_table import (
    SPEED_AND_TAU,
    Figure,
    PublishedTable,
    Row,
    pair,
    read,
    speed_and_tau,
    with_ours,
)
from fovea.evaluation.page.studies import BRANCHES, EPOCHS, branch_name


def specvlm_tables(methods: Sequence[Entry], greedy: Sequence[Entry], drawn: Sequence[Entry]) -> list[PublishedTable]:
    """SpecVLM's tables: of ``methods``, of what was ``drawn`` at temperature 1, and after each epoch of training."""
    rows, tables = read("specvlm_tables"), []
    for number, temperature in dict.fromkeys((row["table"], row["temperature"]) for row in rows):
        own = [row for row in rows if (row["table"], row["temperature"]) == (number, temperature)]
        by_epoch = len({row["epoch"] for row in own}) > 1 and len({row["benchmark"] for row in own}) == 1
        column = "epoch" if by_epoch else "benchmark"
        names = list(dict.fromkeys(row[column] for row in own))
        cells = {(r["target"], r["method"], r[column], r["metric"]): r["value"] for r in own}
        body = []
        for target, method in dict.fromkeys((row["target"], row["method"]) for row in own):
            at = (target, method)
            pairs = [pair(cells.get((*at, n, "speedup")), cells.get((*at, n, "accept_length"))) for n in names]
            measured = greedy if by_epoch else drawn if temperature == "1" else methods
            body.append(Row([f"{method}, {target}", *pairs], of_method(measured, method), target))
        where = f"{own[0]['hardware']}, temperature {temperature}"
        title = f"SpecVLM after each epoch on {own[0]['benchmark']}" if by_epoch else "SpecVLM by benchmark"
        headings = [f"epoch {name}" if by_epoch else name for name in names]
        figures = [_after_epoch(int(name)) for name in names] if by_epoch else [SPEED_AND_TAU]
        note = "Speedup / accept length, as ours are speedup / tau."
        source, study = f"SpecVLM, Table {number}", EPOCHS if by_epoch else ""
        name = f"specvlm_table{number}" + ("_sampled" if temperature == "1" else "")
        heading = ["method", *headings]
        tables.append(with_ours(name, f"{title} ({where})", source, note, heading, body, figures, study))
    return tables


def _after_epoch(epoch: int) -> Figure:
    """Speedup and tau after an epoch, of the evaluation whose training measured most of them."""

    def cell(own: Sequence[Entry], _: str) -> str:
        measured = max((dict(entry.history.evaluations) for entry in own), key=len, default={})
        one = measured.get(epoch)
        return "" if one is None or one["tau"] is None else f"{one['speedup']:.2f}x / {one['tau']:.2f}"

    return Figure(f"epoch {epoch}", cell, f"epoch {epoch}")


def compressor_table(entries: Sequence[Entry]) -> PublishedTable:
    """Table 3: by how the gate uses its branches."""
    rows = read("specvlm_table3_compressor")
    cells = {(r["configuration"], r["benchmark"]): pair(r["speedup"], r["accept_length"]) for r in rows}
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    body = [
        Row([name, *(cells[name, b] for b in benchmarks)], of_method(entries, name), "LLaVA-1.6-7B")
        for name in dict.fromkeys(row["configuration"] for row in rows)
    ]
    note = "Speedup / accept length (ours: tau), by how the gate uses its branches; LLaVA-1.6-7B."
    title, source, heading = "SpecVLM's compressor", "SpecVLM, Table 3", ["kind", *benchmarks]
    return with_ours("specvlm_table3", title, source, note, heading, body, [SPEED_AND_TAU])


def branches_table(entries: Sequence[Entry]) -> PublishedTable:
    """Table 4: the branches one by one, at several ratios."""
    by_branch: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        if (branch := branch_of(entry)) is not None:
            by_branch.setdefault(branch, []).append(entry)
    body = []
    for row in read("specvlm_table4_branches"):
        branch = row["branch"], int(row["ratio"])
        cells = [branch_name(*branch), f"{row['speedup']}x", row["accept_length"]]
        body.append(Row(cells, by_branch.get(branch, []), "LLaVA-1.6-7B"))
    note = (
        "LLaVA-1.6-7B on LLaVA-Bench-In-the-Wild, MI250-64G, temperature 0, one epoch; accept length counts the bonus "
        "token. Ours: the branch alone in the place of the gate. The paper's best row of each branch is its whole "
        "compressor's of Table 3 (2.03x, 3.40), so there one branch was probably changed within the compressor."
    )
    return with_ours(
        "specvlm_table4",
        "Branches of SpecVLM's compressor",
        "SpecVLM, Table 4",
        note,
        ["branch", "speedup", "accept length"],
        body,
        speed_and_tau(tau="accept length"),
        BRANCHES,
    )
