/* Ticks on the page of puzzles that the browser remembers, and how many there are. Without storage, or where a browser
   refuses it, the boxes work until the page is closed. */
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const KEY = "muon-at-scale.puzzles";
  const table = document.querySelector(".puzzles table");
  const boxes = [...document.querySelectorAll(".puzzles input[data-puzzle]")];
  if (!table || !boxes.length) return;

  function remembered() {
    try {
      const names = JSON.parse(localStorage.getItem(KEY));
      return new Set(Array.isArray(names) ? names : []);
    } catch {
      return new Set();
    }
  }

  const count = document.createElement("p");
  count.setAttribute("role", "status"); // read aloud when it changes
  const home = table.closest(".pst-scrollable-table-container") || table;
  home.before(count);
  function tell() {
    count.textContent = `You have solved ${boxes.filter((box) => box.checked).length} of ${boxes.length}.`;
  }

  const solved = remembered();
  boxes.forEach((box) => {
    box.checked = solved.has(box.dataset.puzzle);
    box.addEventListener("change", () => {
      const names = remembered(); // another tab may have ticked some meanwhile
      if (box.checked) names.add(box.dataset.puzzle);
      else names.delete(box.dataset.puzzle);
      try {
        localStorage.setItem(KEY, JSON.stringify([...names]));
      } catch { /* there is no storage here */ }
      tell();
    });
  });
  tell();
});
