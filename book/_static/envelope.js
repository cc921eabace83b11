/* The calculator of the envelope page and of chapter 15. `envelopeStep` has the formulas of
   scripts/tools/pages/envelope.py in the same order, and a test holds the two equal. Nothing is sent anywhere, and
   without JavaScript the page has its tables. The style is here because a notebook has none of the book's files. */
"use strict";

const ENVELOPE_STYLE = `
.envelope-form { display: grid; gap: 0.6rem 1rem; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); margin: 1rem 0; }
.envelope-form label { display: flex; flex-direction: column; font-size: 0.9rem; justify-content: flex-end; }
.envelope-form :is(input, select) {
  background: var(--pst-color-surface, transparent); border: 1px solid var(--pst-color-border, #888888);
  border-radius: 0.25rem; color: inherit; font: inherit; max-width: 100%; padding: 0.25rem 0.5rem;
}
#envelope [role="status"] { overflow-x: auto; }
#envelope table th[scope="row"] { text-align: left; }
`;

const ENVELOPE_LAYOUTS = {
  gather_all: "gather all, flat", gather_cut: "gather cut", owner: "owner", muonw: "MuonW",
};

/* The most elements of a DP rank and the most FLOPs of a rank, if matrices have owners: the costliest first, each to the
   rank with least to do, and of such ranks to one in the row of the grid that has least. Ranks lie in a heap. */
function envelopeDeal(matrices, dp, tp) {
  const held = new Array(dp).fill(0), rows = new Array(dp).fill(0), work = new Array(dp * tp).fill(0);
  const key = (rank) => [work[rank], rows[rank % dp], rank];
  const before = (one, other) => {
    const place = [0, 1].find((n) => one[n] !== other[n]) ?? 2;
    return one[place] < other[place];
  };
  const heap = work.map((_, rank) => key(rank));
  const replaceFirst = (now) => {
    let place = 0;
    for (;;) {
      let child = 2 * place + 1;
      if (child + 1 < heap.length && before(heap[child + 1], heap[child])) child += 1;
      if (child >= heap.length || !before(heap[child], now)) break;
      heap[place] = heap[child];
      place = child;
    }
    heap[place] = now;
  };
  for (const one of [...matrices].sort((a, b) => b.flops - a.flops)) {
    for (let left = one.count; left > 0; left -= 1) {
      for (;;) {
        const now = key(heap[0][2]);
        if (now.every((part, n) => part === heap[0][n])) break;
        replaceFirst(now);  // this rank or its row has got more since
      }
      const rank = heap[0][2];
      held[rank % dp] += one.size;
      work[rank] += one.flops / 10;  // so that sums are whole numbers, and exact
      rows[rank % dp] += one.flops / 10;
    }
  }
  const most = (list) => list.reduce((a, b) => Math.max(a, b));
  return [most(held), 10 * most(work)];
}

function envelopeStep(step) {
  const { layers, width, mlp, vocabulary, heads, experts, active, tokens, dp, tp, pp, ep, layout } = step;
  const { gradient, parameter } = step;
  const sum = (list, of) => list.reduce((total, each) => total + of(each), 0);
  const matrices = (a, b, count, share) => ({
    count, share, size: a * b, elements: count * a * b, flops: 5 * (4 * a * a * b + 2 * a ** 3),
  });
  const part = (held, tables, groups, ranks) => {
    const hidden = sum(held, (m) => m.elements);
    const squares = sum(held, (m) => m.elements * m.size);
    const owners = 1 + ((ranks - 1) * squares) / hidden / (hidden / groups);
    return { held, tables, groups, local: groups * tp, dp: ranks, hidden, owners };
  };
  const dense = [
    matrices(width, width, 2 * layers, 1),
    matrices(Math.floor((width * step.kv_heads) / heads), width, 2 * layers, 1),
  ];
  const perceptron = matrices(
    Math.min(width, mlp), Math.max(width, mlp), step.mlp_matrices * layers * experts, active / experts,
  );
  const tables = 2 * vocabulary * width;
  const parts = ep === 1
    ? [part([...dense, perceptron], tables, pp, dp)]
    : [part(dense, tables, pp, dp), part([perceptron], 0, pp * ep, Math.floor(dp / ep))];
  const ranks = dp * tp * pp;
  const repeating = layout === "gather_all" || layout === "gather_cut";
  const flopsPerSecond = step.tflops * 1e12;

  const passFlops = 6 * tokens * sum(parts, (p) => p.tables / 2 + sum(p.held, (m) => m.elements * m.share));
  const repeats = (p) => (repeating ? p.owners * tp : 1);
  const schulzFlops = sum(parts, (p) => repeats(p) * sum(p.held, (m) => m.count * m.flops));

  const element = gradient + parameter * (layout === "muonw" ? 2 : 1);
  const adamwBytes = sum(parts, (p) => ((p.dp - 1) / p.dp) * ((p.hidden + p.tables) / p.local) * element);
  const stage = (p) => p.held.map((m) => ({ ...m, count: Math.ceil(m.count / p.groups) }));
  for (const p of parts) {
    p.padded = p.hidden / p.local;
    if (layout === "owner") p.padded = Math.max(p.padded, (p.dp * envelopeDeal(stage(p), p.dp, tp)[0]) / tp);
  }
  const padding = (p) => ((p.dp - 1) / p.dp) * (p.padded - p.hidden / p.local);
  const momentum = (p) => (2 * p.hidden) / p.local / p.dp;
  const overDp = {
    gather_all: (p) => p.dp - 1,
    gather_cut: (p) => p.owners - 1,
    owner: () => 0,
    muonw: (p) => (2 * (p.dp * tp - 1)) / (p.dp * tp),
  }[layout];
  const overTp = (p) => {
    if (repeating) return (tp - 1) * p.owners;
    return layout === "owner" ? (2 * (tp - 1)) / tp : 0;
  };
  const muonDpBytes = sum(parts, (p) => momentum(p) * overDp(p)) + (gradient + parameter) * sum(parts, padding);
  const muonTpBytes = sum(parts, (p) => momentum(p) * overTp(p));

  const kept = (p, moments) => (layout === "muonw"
    ? (4 * (2 + moments)) / p.dp
    : gradient + parameter + (4 * ((parameter < 4 ? 1 : 0) + moments)) / p.dp);
  const adamwKept = sum(parts, (p) => ((p.hidden + p.tables) / p.local) * kept(p, 2));
  const muonKept = sum(parts, (p) => p.padded * kept(p, 1) + (p.tables / p.local) * kept(p, 2));

  const passSeconds = passFlops / ranks / flopsPerSecond;
  const busiest = repeating ? schulzFlops / ranks : sum(parts, (p) => envelopeDeal(stage(p), p.dp, tp)[1]);
  const schulzSeconds = busiest / flopsPerSecond;
  const adamwSeconds = passSeconds + adamwBytes / (step.dp_link * 1e9);
  const muonSeconds = schulzSeconds + muonDpBytes / (step.dp_link * 1e9) + muonTpBytes / (step.tp_link * 1e9);
  return {
    pass_flops: passFlops, newton_schulz_flops: schulzFlops, adamw_bytes: adamwBytes, muon_dp_bytes: muonDpBytes,
    muon_tp_bytes: muonTpBytes, adamw_kept: adamwKept, muon_kept: muonKept, pass_seconds: passSeconds,
    newton_schulz_seconds: schulzSeconds, adamw_seconds: adamwSeconds, muon_seconds: muonSeconds,
    share: muonSeconds / adamwSeconds,
  };
}

/* What cannot be, as one sentence; "" for a step that can. labels: name -> what its field is called. */
function envelopeRefusal(step, labels) {
  const speeds = ["tflops", "dp_link", "tp_link"];
  const plain = (number) => number.toLocaleString("en");
  for (const [name, label] of Object.entries(labels)) {
    const value = step[name];
    if (speeds.includes(name) && !(value > 0)) return `${label}: give more than 0.`;
    if (!speeds.includes(name) && !(Number.isInteger(value) && value >= 1)) {
      return `${label}: give a whole number, 1 or more.`;
    }
  }
  const { layers, width, mlp, heads, kv_heads: keys, experts, active, tokens, dp, tp, pp, ep } = step;
  if (![2, 3].includes(step.mlp_matrices)) return "An MLP has 3 matrices if it is gated, and 2 if it is not.";
  if (![step.gradient, step.parameter].every((size) => [1, 2, 4].includes(size))) {
    return "A weight or a gradient takes 4 bytes in float32, 2 in bf16 and 1 in float8.";
  }
  if (Math.max(dp * tp, 3 * layers * experts) > 1 << 20) {
    return `We deal out at most ${plain(1 << 20)} matrices, to as many ranks; give smaller numbers.`;
  }
  if (active > experts) return `A token cannot see ${plain(active)} of ${plain(experts)} experts.`;
  if (layers < pp) return `${plain(layers)} layers are too few for ${plain(pp)} pipeline stages.`;
  if (tokens < dp) return `${plain(tokens)} tokens are too few for ${plain(dp)} data-parallel ranks.`;
  const divisions = [
    [heads, "heads", width, "a width of"],
    [keys, "heads of keys and values", heads, "all heads, which are"],
    [tp, "tensor-parallel ranks", keys, "the heads of keys and values, which are"],
    [tp, "tensor-parallel ranks", mlp, "an MLP width of"],
    [ep, "ranks that share the experts", dp, "the data-parallel ranks, which are"],
    [ep, "ranks that share the experts", experts, "the experts, which are"],
  ];
  const wrong = divisions.find(([by, , of]) => of % by);
  return wrong ? `${plain(wrong[0])} ${wrong[1]} do not divide ${wrong[3]} ${plain(wrong[2])}.` : "";
}

function envelopeStart() {
  const home = document.getElementById("envelope");
  if (!home) return;
  const { fields, presets } = JSON.parse(home.dataset.cases);
  const form = document.createElement("form");
  form.className = "envelope-form";
  form.addEventListener("submit", (event) => event.preventDefault());

  const choose = document.createElement("select");
  choose.append(...presets.map(({ title }, place) => new Option(title, place)), new Option("your own", -1));
  form.append(labelled("Start from", choose));
  const inputs = fields.map(({ name, label }) => {
    const input = document.createElement("input");
    Object.assign(input, { name, type: "number", min: 1, step: "any", inputMode: "decimal", required: true });
    form.append(labelled(label, input));
    return input;
  });
  const answer = document.createElement("div");
  answer.setAttribute("role", "status");
  answer.setAttribute("aria-live", "polite");
  const style = document.createElement("style");
  style.textContent = ENVELOPE_STYLE;
  home.replaceChildren(style, form, answer);

  function labelled(text, control) {
    const label = document.createElement("label");
    label.append(text, control);
    return label;
  }

  function fill(step) {
    inputs.forEach((input) => { input.value = step[input.name]; });
    show();
  }

  function show() {
    const step = Object.fromEntries(inputs.map((input) => [input.name, Number(input.value)]));
    const said = envelopeRefusal(step, Object.fromEntries(fields.map(({ name, label }) => [name, label])));
    if (said) {
      answer.textContent = said;
      return;
    }
    const rows = Object.entries(ENVELOPE_LAYOUTS).map(([layout, title]) => [title, envelopeStep({ ...step, layout })]);
    const table = document.createElement("table");
    table.className = "table";
    const head = ["", ...rows.map(([title]) => title)];
    const lines = [
      ["forward and backward", (r) => seconds(r.pass_seconds)],
      ["Newton–Schulz", (r) => seconds(r.newton_schulz_seconds)],
      ["a rank sends with AdamW", (r) => bytes(r.adamw_bytes)],
      ["a rank sends in addition with Muon", (r) => bytes(r.muon_dp_bytes + r.muon_tp_bytes)],
      ["states on a rank with AdamW", (r) => bytes(r.adamw_kept)],
      ["states on a rank with Muon", (r) => bytes(r.muon_kept)],
      ["Muon adds to the step", (r) => percent(r.share)],
    ];
    table.append(row("th", head), ...lines.map(([name, of]) => row("td", [name, ...rows.map(([, r]) => of(r))])));
    const note = document.createElement("p");
    note.textContent = "States are weights, gradients and the optimizer's. Activations come on top, so leave room for them.";
    answer.replaceChildren(table, note);
  }

  function row(kind, texts) {
    const line = document.createElement("tr");
    line.append(...texts.map((text, place) => {
      const cell = document.createElement(place ? kind : "th");
      cell.scope = place ? (kind === "th" ? "col" : "") : "row";
      cell.textContent = text;
      return cell;
    }));
    return line;
  }

  function unit(value, names, by) {
    let place = 0;
    while (value >= by && place < names.length - 1) { value /= by; place += 1; }
    return `${value >= 100 ? Math.round(value) : Number(value.toPrecision(2))} ${names[place]}`;
  }
  function percent(share) {
    const two = Number((100 * share).toPrecision(2));
    return `${two >= 100 ? two.toLocaleString("en") : two} %`;
  }
  const bytes = (value) => unit(value, ["B", "kB", "MB", "GB", "TB"], 1000);
  const seconds = (value) => (value >= 1 ? `${Number(value.toPrecision(3))} s` : unit(value * 1e6, ["µs", "ms"], 1000));

  choose.addEventListener("change", () => { if (choose.value >= 0) fill(presets[choose.value].step); });
  form.addEventListener("input", (event) => {
    if (event.target !== choose) choose.value = -1;
    show();
  });
  choose.value = home.dataset.first;
  fill(presets[home.dataset.first].step);
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", envelopeStart);
else envelopeStart();  // in a notebook, which was loaded long ago
