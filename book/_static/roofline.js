/* The calculator of the roofline page. `rooflineStep` has the formulas of scripts/tools/pages/roofline.py in the same
   order, and a test holds the two equal. Nothing is sent anywhere, and without JavaScript the page has its tables. */
"use strict";

const ROOFLINE_LAYOUTS = { gather_all: "gather all, flat", owner: "owner", muonw: "MuonW" };

/* The most elements and the most FLOPs of an owner: the costliest matrices first, each to the rank with least to do. */
function rooflineDeal(matrices, ranks) {
  const held = new Array(ranks).fill(0), work = new Array(ranks).fill(0);
  const most = (list) => list.reduce((a, b) => Math.max(a, b));
  [...matrices].sort((one, other) => other.flops - one.flops).forEach((one, place) => {
    const everywhere = place === 0 ? Math.floor(one.count / ranks) : 0;
    for (let rank = 0; rank < ranks; rank += 1) {
      held[rank] += everywhere * one.size;
      work[rank] += everywhere * one.flops;
    }
    for (let left = one.count - everywhere * ranks; left > 0; left -= 1) {
      let least = 0;
      for (let rank = 1; rank < ranks; rank += 1) if (work[rank] < work[least]) least = rank;
      held[least] += one.size;
      work[least] += one.flops;
    }
  });
  return [most(held), most(work)];
}

function rooflineStep(step) {
  const { layers, width, mlp, vocabulary, experts, active, tokens, dp, tp, pp, ep, layout } = step;
  const sum = (list, of) => list.reduce((total, each) => total + of(each), 0);
  const matrices = (a, b, count, share) => ({
    count, share, size: a * b, elements: count * a * b, flops: 5 * (4 * a * a * b + 2 * a ** 3),
  });
  const part = (held, tables, local, ranks) => {
    const hidden = sum(held, (m) => m.elements);
    const squares = sum(held, (m) => m.elements * m.size);
    return { held, tables, local, dp: ranks, hidden, owners: Math.min(ranks, 1 + squares / hidden / (hidden / ranks)) };
  };
  const attention = matrices(width, width, 4 * layers, 1);
  const perceptron = matrices(Math.min(width, mlp), Math.max(width, mlp), 3 * layers * experts, active / experts);
  const tables = 2 * vocabulary * width;
  const local = tp * pp;
  const parts = ep === 1
    ? [part([attention, perceptron], tables, local, dp)]
    : [part([attention], tables, local, dp), part([perceptron], 0, local * ep, Math.floor(dp / ep))];
  const ranks = dp * tp * pp;
  const flopsPerSecond = step.tflops * 1e12;

  const passFlops = 6 * tokens * sum(parts, (p) => p.tables / 2 + sum(p.held, (m) => m.elements * m.share));
  const repeats = (p) => (layout === "gather_all" ? p.owners * tp : 1);
  const schulzFlops = sum(parts, (p) => repeats(p) * sum(p.held, (m) => m.count * m.flops));

  const element = 4 + 2 * (layout === "muonw" ? 2 : 1);
  const adamwBytes = sum(parts, (p) => ((p.dp - 1) / p.dp) * ((p.hidden + p.tables) / p.local) * element);
  const overDp = (p) => {
    if (layout === "muonw") {
      const holders = p.dp * tp;
      return ((2 * tp) / holders) * ((holders - 1) / holders);
    }
    return layout === "gather_all" ? (p.dp - 1) / p.dp : 0;
  };
  const overTp = (p) => {
    if (layout === "gather_all") return ((tp - 1) * p.owners) / p.dp;
    return layout === "owner" ? (2 * (tp - 1)) / (tp * p.dp) : 0;
  };
  const stage = (p) => p.held.map((m) => ({ ...m, count: Math.ceil((m.count * tp) / p.local) }));
  for (const p of parts) {
    p.padded = p.hidden / p.local;
    if (layout === "owner") p.padded = Math.max(p.padded, (p.dp * rooflineDeal(stage(p), p.dp)[0]) / tp);
  }
  const padding = (p) => ((p.dp - 1) / p.dp) * (p.padded - p.hidden / p.local);
  const muonDpBytes = sum(parts, (p) => ((2 * p.hidden) / p.local) * overDp(p)) + 6 * sum(parts, padding);
  const muonTpBytes = sum(parts, (p) => ((2 * p.hidden) / p.local) * overTp(p));

  const kept = (p, sharded) => (layout === "muonw" ? (sharded + 4) / p.dp : 6 + sharded / p.dp);
  const adamwKept = sum(parts, (p) => ((p.hidden + p.tables) / p.local) * kept(p, 12));
  const muonKept = sum(parts, (p) => p.padded * kept(p, 8) + (p.tables / p.local) * kept(p, 12));

  const passSeconds = passFlops / ranks / flopsPerSecond;
  const busiest = layout === "gather_all"
    ? schulzFlops / ranks : sum(parts, (p) => rooflineDeal(stage(p), p.dp * tp)[1]);
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

document.addEventListener("DOMContentLoaded", () => {
  const home = document.getElementById("roofline");
  if (!home) return;
  const { fields, presets } = JSON.parse(home.dataset.cases);
  const form = document.createElement("form");
  form.className = "roofline-form";
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
  home.replaceChildren(form, answer);

  function labelled(text, control) {
    const label = document.createElement("label");
    label.append(text, control);
    return label;
  }

  function fill(step) {
    inputs.forEach((input) => { input.value = step[input.name]; });
    show();
  }

  function refusal(step) {
    const wrong = inputs.find((input) => !(step[input.name] >= 1) && !["tflops", "dp_link", "tp_link"].includes(input.name));
    if (wrong) return `${wrong.parentElement.firstChild.textContent} is ${wrong.value || "empty"}; give 1 or more.`;
    if (!(step.tflops > 0 && step.dp_link > 0 && step.tp_link > 0)) return "Give speeds of more than 0.";
    if (step.active > step.experts) return `A token cannot see ${step.active} of ${step.experts} experts.`;
    if (step.dp % step.ep) return `${step.ep} ranks that share experts do not divide ${step.dp} data-parallel ranks.`;
    return "";
  }

  function show() {
    const step = Object.fromEntries(inputs.map((input) => [input.name, Number(input.value)]));
    const said = refusal(step);
    if (said) {
      answer.textContent = said;
      return;
    }
    const rows = Object.entries(ROOFLINE_LAYOUTS).map(([layout, title]) => [title, rooflineStep({ ...step, layout })]);
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
      ["Muon adds to the step", (r) => `${(100 * r.share).toPrecision(2)} %`],
    ];
    table.append(row("th", head), ...lines.map(([name, of]) => row("td", [name, ...rows.map(([, r]) => of(r))])));
    answer.replaceChildren(table);
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
  const bytes = (value) => unit(value, ["B", "kB", "MB", "GB", "TB"], 1000);
  const seconds = (value) => (value >= 1 ? `${Number(value.toPrecision(3))} s` : unit(value * 1e6, ["µs", "ms"], 1000));

  choose.addEventListener("change", () => { if (choose.value >= 0) fill(presets[choose.value].step); });
  form.addEventListener("input", (event) => {
    if (event.target !== choose) choose.value = -1;
    show();
  });
  fill(presets[0].step);
});
