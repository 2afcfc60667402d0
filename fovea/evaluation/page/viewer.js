"use strict";
// The page's only script: tables that sort, and the viewer that steps through an answer. Needs nothing from outside.

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const descending = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[column];
      if (!("value" in cell.dataset)) return cell.textContent;
      return cell.dataset.value === "" ? null : Number(cell.dataset.value);
    };
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === null || y === null) return (x === null) - (y === null); // what is unknown stays below
      const order = typeof x === "string" ? -x.localeCompare(y) : x - y;
      return descending ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}

const source = document.getElementById("trajectories");
if (source) startViewer(JSON.parse(source.textContent));

function startViewer({ entries, pictures }) {
  const [WIDTH, HEIGHT, GAP_X, GAP_Y] = [104, 36, 30, 8];
  const at = (id) => document.getElementById(id);
  const state = { entry: 0, prompt: 0, step: 0, node: 0 };
  const trajectory = () => entries[state.entry].trajectories[state.prompt];

  function svg(name, attributes = {}, parent = null) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (parent) parent.append(element);
    return element;
  }

  function html(name, className, text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    element.textContent = text;
    return element;
  }

  // Blanks at the end of a token and between two words are seen; the one in front of a word is what words have.
  const ends = new Set(entries.flatMap((entry) => entry.trajectories)
    .filter((one) => one.finish === "eos").map((one) => one.texts.at(-1)));
  const visible = (text) => {
    if (ends.has(text)) return "■ end";
    const marked = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/ +$/, (blanks) => "␣".repeat(blanks.length));
    return marked || "∅";
  };
  const short = (text) => {
    const shown = [...visible(text)];
    return shown.length > 13 ? shown.slice(0, 12).join("") + "…" : shown.join("");
  };
  const percent = (share) => share >= 0.9995 ? "100%" : share >= 0.0995 ? `${Math.round(100 * share)}%`
    : `${(100 * share).toPrecision(2)}%`;

  function options(select, names) {
    select.replaceChildren(...names.map((name, index) => {
      const option = html("option", "", name);
      option.value = String(index);
      return option;
    }));
  }

  function chooseEntry(index) {
    const key = entries[state.entry].trajectories[state.prompt].key;
    state.entry = index;
    const own = entries[index].trajectories;
    const same = own.findIndex((one) => one.key === key); // the same question, where this method answered it
    options(at("pick-prompt"), own.map((one) => {
      const text = one.question.replace(/\s+/g, " ").trim();
      const title = text.length > 70 ? `${text.slice(0, 69)}…` : text;
      return one.source ? `${one.source}: ${title}` : title;
    }));
    choosePrompt(Math.max(0, same));
  }

  function choosePrompt(index) {
    state.prompt = index;
    at("pick-entry").value = String(state.entry);
    at("pick-prompt").value = String(index);
    at("slider").max = String(Math.max(0, trajectory().rounds.length - 1));
    go(0);
  }

  function go(step) {
    const rounds = trajectory().rounds;
    state.step = Math.max(0, Math.min(step, rounds.length - 1));
    state.node = 0;
    draw();
  }

  function draw() {
    const one = trajectory(), round = one.rounds[state.step], count = one.rounds.length;
    at("place").textContent = count ? `round ${state.step + 1} of ${count}` : "no rounds";
    at("slider").value = String(state.step);
    at("first").disabled = at("previous").disabled = state.step <= 0;
    at("last").disabled = at("next").disabled = state.step >= count - 1;
    at("question").textContent = one.question;
    drawAnswer(one, round);
    drawTree(one, round);
    drawPictures(one, round);
  }

  function drawAnswer(one, round) {
    const begin = round ? round.position : one.texts.length;
    const drafts = round ? begin + round.accepted.length : begin;
    const end = round ? begin + round.committed : begin;
    const part = (from, to, name) => html("span", name, one.texts.slice(from, to).join(""));
    at("answer").replaceChildren(
      part(0, begin, ""), part(begin, drafts, "drafted"), part(drafts, end, "bonus"), part(end, one.texts.length, "later"),
    );
  }

  // Rows of the tree, and behind the accepted path the target's own token, with their places: leaves below each other.
  function layout(one, round) {
    const nodes = round.parents.map((parent, row) => ({ row, parent, text: round.texts[row], children: [] }));
    const path = new Set(round.accepted);
    for (const node of nodes) {
      node.kind = node.row === 0 ? "root" : path.has(node.row) ? "accepted" : "rejected";
      node.depth = node.row === 0 ? 0 : nodes[node.parent].depth + 1;
      if (node.row) nodes[node.parent].children.push(node);
    }
    if (round.committed > round.accepted.length) {
      const parent = nodes[round.accepted.at(-1) ?? 0];
      const text = one.texts[round.position + round.accepted.length];
      const said = { row: null, parent: parent.row, text, children: [], kind: "said", depth: parent.depth + 1 };
      parent.children.unshift(said);
      nodes.push(said);
    }
    let leaves = 0;
    const settle = (node) => {
      node.children.forEach(settle);
      const own = node.children.map((child) => child.y);
      node.y = own.length ? own[0] : leaves++; // the first child stands beside its parent
      return node.y;
    };
    nodes.forEach((node) => node.children.sort((a, b) => rank(a) - rank(b)));
    settle(nodes[0]);
    return { nodes, leaves, depth: Math.max(...nodes.map((node) => node.depth)) };
  }

  const rank = (node) => (node.kind === "accepted" ? -2 : node.kind === "said" ? -1 : node.row);

  function drawTree(one, round) {
    const box = at("tree");
    box.replaceChildren();
    at("detail").replaceChildren();
    if (!round) {
      at("tree-caption").textContent = "The answer is its first token, which belongs to no round.";
      return;
    }
    const { nodes, leaves, depth } = layout(one, round);
    const drafts = round.parents.length - 1;
    at("tree-caption").textContent = `${drafts} drafted, ${round.accepted.length} accepted, `
      + `${round.committed} committed` + (round.log_probs ? ". Percentages: the drafter's, given the tokens before." : ".");
    const width = (depth + 1) * (WIDTH + GAP_X) - GAP_X + 8, height = leaves * (HEIGHT + GAP_Y) + 4;
    const picture = svg("svg", { width, height, viewBox: `-4 -2 ${width} ${height}` }, null);
    const place = (node) => [node.depth * (WIDTH + GAP_X), node.y * (HEIGHT + GAP_Y)];
    for (const node of nodes.filter((other) => other.depth > 0)) {
      const [x, y] = place(node), [px, py] = place(nodes[node.parent]);
      const [from, to] = [px + WIDTH, y + HEIGHT / 2], middle = from + GAP_X / 2;
      svg("path", {
        class: `edge ${node.kind}`,
        d: `M ${from} ${py + HEIGHT / 2} C ${middle} ${py + HEIGHT / 2} ${middle} ${to} ${x} ${to}`,
      }, picture);
    }
    const seen = new Set(round.evidence.map((item) => item.row));
    for (const node of nodes) {
      const [x, y] = place(node);
      const group = svg("g", { class: `node ${node.kind}`, transform: `translate(${x} ${y})` }, picture);
      svg("rect", { width: WIDTH, height: HEIGHT, rx: 7 }, group);
      const share = probability(round, node);
      const label = svg("text", { x: WIDTH / 2, y: share === null ? 22 : 16, "text-anchor": "middle" }, group);
      label.textContent = short(node.text);
      if (share !== null) {
        svg("text", { class: "share", x: WIDTH / 2, y: 29, "text-anchor": "middle" }, group).textContent = percent(share);
      }
      if (seen.has(node.row)) svg("circle", { class: "eye", cx: WIDTH - 9, cy: 9, r: 4 }, group);
      if (node.row === null) continue;
      group.setAttribute("tabindex", "0");
      group.setAttribute("role", "button");
      group.setAttribute("aria-label", `${visible(node.text)}, ${node.kind}`);
      group.dataset.row = String(node.row);
      group.classList.toggle("chosen", node.row === state.node);
      const choose = () => {
        state.node = node.row;
        for (const other of box.querySelectorAll(".node")) {
          other.classList.toggle("chosen", other.dataset.row === String(node.row));
        }
        tell(round, node);
        drawPictures(one, round);
      };
      group.addEventListener("click", choose);
      group.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          choose();
        }
      });
    }
    box.append(picture);
    tell(round, nodes[state.node]);
  }

  function probability(round, node) {
    if (!round.log_probs || !node.row) return null;
    return Math.exp(Math.min(0, round.log_probs[node.row] - round.log_probs[node.parent]));
  }

  function tell(round, node) {
    const code = (text) => html("code", "", visible(text));
    const parts = [];
    const share = probability(round, node);
    if (node.row === 0) {
      parts.push("The tree grows behind ", code(node.text), ", the last committed token.");
    } else {
      parts.push(code(node.text), node.kind === "accepted" ? " was accepted." : " was rejected.");
      if (share !== null) {
        parts.push(` The drafter gives it ${percent(share)}, its path ${percent(Math.exp(round.log_probs[node.row]))}.`);
      }
    }
    if (round.choice_texts.length) {
      parts.push(" Behind it the target's most probable token is ", code(round.choice_texts[node.row]), ".");
    }
    at("detail").replaceChildren(...parts);
  }

  // The evidence of the chosen node, or of its nearest ancestor that retrieved some.
  function evidenceOf(round) {
    for (let row = state.node; row >= 0; row = round.parents[row]) {
      const found = round.evidence.find((item) => item.row === row);
      if (found) return found;
    }
    return null;
  }

  function drawPictures(one, round) {
    const box = at("pictures");
    box.replaceChildren();
    document.querySelector(".stage").classList.toggle("bare", !one.pictures.length);
    const evidence = round ? evidenceOf(round) : null;
    at("evidence-caption").textContent = !one.pictures.length ? ""
      : !evidence ? "Nothing was retrieved from the picture in this round."
      : `Evidence retrieved behind “${visible(round.texts[evidence.row])}”: ${evidence.cells.length} of `
        + `${evidence.entries} visual tokens. Darker cells weigh more.`;
    const most = evidence ? Math.max(...evidence.weights) : 1;
    let start = 0;
    one.views.forEach((view, number) => {
      const [rows, columns] = one.grids[number] ?? [0, 0];
      const { data, width, height } = pictures[one.pictures[view.image]];
      const panel = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, box);
      panel.setAttribute("aria-label", `Picture ${view.image + 1} of the question`);
      svg("image", { href: data, width, height, "image-rendering": width < 300 ? "pixelated" : "auto",
        opacity: evidence ? 0.6 : 1 }, panel);
      const [left, top, right, bottom] = view.box;
      const shown = columns - view.line_ends; // the others mark ends of lines and show nothing
      const [w, h] = [(right - left) * width / shown, (bottom - top) * height / rows];
      (evidence ? evidence.cells : []).forEach((cell, place) => {
        const local = cell - start, [row, column] = [Math.floor(local / columns), local % columns];
        if (local < 0 || local >= rows * columns || column >= shown) return;
        const weight = evidence.weights[place];
        svg("rect", {
          class: "cell", x: left * width + column * w, y: top * height + row * h, width: w, height: h,
          "fill-opacity": (0.1 + 0.55 * weight / most).toFixed(3), "stroke-width": width / 400,
        }, panel);
      });
      start += rows * columns;
    });
  }

  at("pick-entry").addEventListener("change", (event) => chooseEntry(Number(event.target.value)));
  at("pick-prompt").addEventListener("change", (event) => choosePrompt(Number(event.target.value)));
  at("slider").addEventListener("input", (event) => go(Number(event.target.value)));
  at("first").addEventListener("click", () => go(0));
  at("previous").addEventListener("click", () => go(state.step - 1));
  at("next").addEventListener("click", () => go(state.step + 1));
  at("last").addEventListener("click", () => go(Infinity));
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("select, input, textarea")) return;
    const moves = { ArrowLeft: state.step - 1, ArrowRight: state.step + 1 };
    if (event.target.closest("#viewer")) Object.assign(moves, { Home: 0, End: Infinity });
    if (!(event.key in moves)) return;
    event.preventDefault();
    go(moves[event.key]);
  });
  options(at("pick-entry"), entries.map((entry) => entry.label));
  chooseEntry(0);
}
