// Figure 1 answers: the line nearest to the pointer names its model, epoch and loss, and a click or Enter in the legend hides one.
for (const figure of document.querySelectorAll("#figure_1 svg")) {
  const prefix = figure.classList.contains("narrow") ? "figure-1-narrow" : "figure-1";
  const { labels, curves } = JSON.parse(document.getElementById("figure-1-data").textContent);
  const lines = [];
  for (const [curve, models] of Object.entries(curves)) {
    for (const [variant, points] of Object.entries(models)) {
      const group = document.getElementById(`${prefix}-${curve}.${variant}`);
      const path = group?.querySelector("path");
      let [x, y] = [0, 0];  // a path is its first point and steps
      const places = [...(path?.getAttribute("d") ?? "").matchAll(/(-?[\d.]+) ?(-?[\d.]+)/g)].map(([, dx, dy]) => [(x += +dx), (y += +dy)]);
      if (places.length !== points.length) continue;
      const seeds = figure.querySelectorAll(`[id^="${group.id}."]`);
      lines.push({ group, variant, points, places, path, seeds });
    }
  }
  const tip = document.createElement("output");
  tip.className = "tip";
  tip.hidden = true;
  figure.parentElement.parentElement.append(tip);
  const hint = "Point at a line for its values; click a name, or press Enter on it, to hide its line. ";
  if (prefix === "figure-1") figure.closest("figure").querySelector("figcaption small").before(hint);
  const hide = () => {
    tip.hidden = true;
    for (const line of lines) for (const part of [line.group, ...line.seeds]) part.style.opacity = "";
  };
  const show = (event) => {
    let best = null;
    for (const line of lines) {
      if (line.group.style.display === "none") continue;
      const matrix = line.path.getScreenCTM();
      line.places.forEach(([x, y], i) => {
        const at = new DOMPoint(x, y).matrixTransform(matrix);
        const distance = Math.hypot(at.x - event.clientX, at.y - event.clientY);
        if (distance < (best?.distance ?? 28)) best = { line, i, at, distance };
      });
    }
    if (!best) return hide();
    const [epoch, loss] = best.line.points[best.i];
    tip.textContent = `${labels[best.line.variant]}: ${loss.toPrecision(3)} at epoch ${+epoch.toFixed(2)}`;
    tip.hidden = false;
    const box = tip.parentElement.getBoundingClientRect();
    tip.style.left = `${Math.min(best.at.x - box.left + 10, box.width - tip.offsetWidth)}px`;
    tip.style.top = `${best.at.y - box.top - 34}px`;
    for (const line of lines)
      for (const part of [line.group, ...line.seeds]) part.style.opacity = line.variant === best.line.variant ? "" : "0.25";
  };
  figure.addEventListener("pointermove", show);
  figure.addEventListener("pointerdown", show); // of a finger, which does not hover
  figure.addEventListener("pointerleave", hide);
  for (const text of figure.querySelectorAll("[id$='legend_1'] text")) {
    const variant = Object.keys(labels).find((name) => labels[name] === text.textContent);
    if (!variant) continue;
    text.style.cursor = "pointer";
    for (const [name, value] of [["tabindex", 0], ["role", "button"], ["aria-pressed", true]]) text.setAttribute(name, value);
    const toggle = () => {
      const shown = text.getAttribute("aria-pressed") === "false";
      for (const { group, seeds } of lines.filter((line) => line.variant === variant))
        for (const part of [group, ...seeds]) part.style.display = shown ? "" : "none";
      text.setAttribute("aria-pressed", shown);
      text.style.opacity = shown ? "" : "0.4";
    };
    text.addEventListener("click", toggle);
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault(); // a space would scroll the page
      toggle();
    });
  }
}
