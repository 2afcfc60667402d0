"""SpecVLM's tables, with our figures in the row of the method that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.evaluation.page.belonging import branch_of, of_method
from fovea.evaluation.page.entries import Entry
from fovea.evaluation.page.published_table import SPEED_HERE, PublishedTable, pair, read, speed_and_tau
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
            found = of_method(drawn if temperature == "1" else methods, method)
            here = _by_epoch(of_method(greedy, method), names) if by_epoch else speed_and_tau(found)
            body.append([f"{method}, {target}", *pairs, *here])
        where = f"{own[0]['hardware']}, temperature {temperature}"
        title = f"SpecVLM after each epoch on {own[0]['benchmark']}" if by_epoch else "SpecVLM by benchmark"
        headings = [f"epoch {name}" if by_epoch else name for name in names]
        here = [f"{name} here" for name in headings] if by_epoch else SPEED_HERE
        note = "Speedup / accept length."
        source, study = f"SpecVLM, Table {number}", EPOCHS if by_epoch else ""
        name = f"specvlm_table{number}" + ("_sampled" if temperature == "1" else "")
        heading = ["method", *headings]
        tables.append(PublishedTable(name, f"{title} ({where})", source, note, heading, here, body, study))
    return tables


def _by_epoch(own: Sequence[Entry], epochs: Sequence[str]) -> list[str]:
    """Speedup and tau after each of the ``epochs``, of the evaluation whose training measured most of them."""
    measured = max((dict(entry.history.evaluations) for entry in own), key=len, default={})
    found = [measured.get(int(epoch)) for epoch in epochs]
    return ["" if one is None or one["tau"] is None else f"{one['speedup']:.2f}x / {one['tau']:.2f}" for one in found]


def compressor_table(entries: Sequence[Entry]) -> PublishedTable:
    """Table 3: by how the gate uses its branches."""
    rows = read("specvlm_table3_compressor")
    cells = {(r["configuration"], r["benchmark"]): pair(r["speedup"], r["accept_length"]) for r in rows}
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    body = [
        [name, *(cells[name, b] for b in benchmarks), *speed_and_tau(of_method(entries, name))]
        for name in dict.fromkeys(row["configuration"] for row in rows)
    ]
    note = "Speedup / accept length, by how the gate uses its branches."
    heading = ["kind", *benchmarks]
    return PublishedTable("specvlm_table3", "SpecVLM's compressor", "SpecVLM, Table 3", note, heading, SPEED_HERE, body)


def branches_table(entries: Sequence[Entry]) -> PublishedTable:
    """Table 4: the branches one by one, at several ratios."""
    by_branch: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        if (branch := branch_of(entry)) is not None:
            by_branch.setdefault(branch, []).append(entry)
    body = []
    for row in read("specvlm_table4_branches"):
        branch = row["branch"], int(row["ratio"])
        own = speed_and_tau(by_branch.get(branch, []))
        body.append([branch_name(*branch), f"{row['speedup']}x", row["accept_length"], *own])
    note = (
        "LLaVA-1.6-7B on LLaVA-Bench-In-the-Wild, MI250-64G, temperature 0, one epoch; accept length counts the bonus "
        "token. Ours: the branch alone in the place of the gate. The paper's best row of each branch is its whole "
        "compressor's of Table 3 (2.03x, 3.40), so there one branch was probably changed within the compressor."
    )
    return PublishedTable(
        "specvlm_table4",
        "Branches of SpecVLM's compressor",
        "SpecVLM, Table 4",
        note,
        ["branch", "speedup", "accept length"],
        SPEED_HERE,
        body,
        BRANCHES,
    )
