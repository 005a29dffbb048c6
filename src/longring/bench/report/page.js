"use strict";
// Without this script the page shows the same: all steps beside each other instead of one at a time.
for (const slider of document.querySelectorAll("input[data-panels]")) {
  const name = slider.dataset.panels;
  const stage = slider.closest(".stage");
  const said = Array.from(stage.querySelector("template").content.children, (line) => line.textContent);
  const panels = document.querySelectorAll(`#${name} .panels > li`);
  const show = () => {
    const now = Number(slider.value);
    stage.querySelector("use").setAttribute("href", `#${name}-${now}`);
    stage.querySelector("output").textContent = said[now];
    slider.setAttribute("aria-valuetext", said[now].split(":")[0]);
    panels.forEach((panel, index) => {
      if (index === now) panel.setAttribute("aria-current", "step");
      else panel.removeAttribute("aria-current");
    });
  };
  slider.addEventListener("input", show);
  stage.hidden = false;
  show();
}
const save = document.getElementById("save");
save.hidden = false;
save.addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([document.getElementById("data").textContent], { type: "application/json" }));
  link.download = save.dataset.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
let folded = [];
addEventListener("beforeprint", () => {
  folded = Array.from(document.querySelectorAll("details:not([open])"));
  for (const one of folded) one.open = true;
});
addEventListener("afterprint", () => { for (const one of folded) one.open = false; });
