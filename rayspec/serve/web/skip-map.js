// The picture of a plan: how the draft runs each sublayer.

const MAX_COLUMNS = 24; // layers side by side; more go on below
const STATES = { full: "kept", skip: "skipped" }; // how a choice is drawn; the others are cheaper ways to run
const KINDS = ["attention", "mlp"]; // sublayer 2i is layer i's attention, 2i + 1 its MLP

/** Fills `figure` (role img) with a cell for each sublayer, and says the same in its label. `numSublayers` is null
 * where the endpoint does not know it, `plan` where there is none. */
export function drawSkipMap(figure, numSublayers, plan) {
  numSublayers ??= plan?.choices.length ?? 0;
  const numLayers = numSublayers / KINDS.length;
  const numColumns = Math.ceil(numLayers / Math.ceil(numLayers / MAX_COLUMNS));
  const bands = [];
  for (let first = 0; first < numLayers; first += numColumns) {
    bands.push(band(first, Math.min(first + numColumns, numLayers), plan));
  }
  figure.style.setProperty("--columns", numColumns);
  figure.replaceChildren(...bands);
  figure.setAttribute("aria-label", describeSkips(numSublayers, plan));
}

/** One line on the plan. */
export function describePlan(plan) {
  if (plan === null) {
    return "no plan yet: the model searches one after some tens of tokens, where a draft of its own may be faster";
  }
  if (plan.num_draft_tokens === 0) return "no draft: no plan is predicted to be faster, so the whole model decodes";
  return `of ${plan.choices.length} sublayers, drafts ${counted(plan.choices)}; up to ${plan.num_draft_tokens} tokens`;
}

function band(first, end, plan) {
  const element = document.createElement("div");
  element.className = "band";
  for (const [offset, kind] of KINDS.entries()) {
    const label = document.createElement("span");
    label.textContent = kind === "mlp" ? "MLP" : "attention";
    element.append(label);
    for (let layer = first; layer < end; layer += 1) {
      element.append(cell(kind, layer, plan?.choices[layer * KINDS.length + offset]));
    }
  }
  const range = document.createElement("span");
  range.className = "range";
  range.textContent = `layers ${first} to ${end - 1}`;
  element.append(range);
  return element;
}

function cell(kind, layer, choice) {
  const element = document.createElement("i");
  element.className = `${kind} ${STATES[choice] ?? (choice === undefined ? "unknown" : "cheap")}`;
  element.title = `layer ${layer}, ${kind === "mlp" ? "MLP" : "attention"}: ${choice ?? "unknown"}`;
  return element;
}

function describeSkips(numSublayers, plan) {
  if (plan === null) return numSublayers === 0 ? "No plan." : `No plan yet for the ${numSublayers} sublayers.`;
  if (plan.num_draft_tokens === 0) return "No draft: every token comes from all sublayers.";
  const ways = [...new Set(plan.choices)].map((choice) => {
    const kinds = ["attention", "MLP"].flatMap((name, offset) => {
      const layers = plan.choices.flatMap((own, index) => (own === choice && index % KINDS.length === offset ? [index >> 1] : []));
      return layers.length ? [`${name} of layers ${ranges(layers)}`] : [];
    });
    return `${choice}: ${kinds.join(", ")}`;
  });
  return `How the draft runs sublayers. ${ways.join("; ")}.`;
}

/** "run 14 in full, skip 2, run 3 with int4". */
function counted(choices) {
  const counts = new Map();
  for (const choice of choices) counts.set(choice, (counts.get(choice) ?? 0) + 1);
  const said = { full: (count) => `run ${count} in full`, skip: (count) => `skip ${count}` };
  return [...counts].map(([choice, count]) => said[choice]?.(count) ?? `run ${count} with ${choice}`).join(", ");
}

/** [0, 1, 2, 5] as "0 to 2, 5". */
function ranges(numbers) {
  const runs = [];
  for (const number of numbers) {
    const last = runs.at(-1);
    if (last !== undefined && last.end === number - 1) last.end = number;
    else runs.push({ start: number, end: number });
  }
  return runs.map(({ start, end }) => (start === end ? `${start}` : `${start} to ${end}`)).join(", ");
}
