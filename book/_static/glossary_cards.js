/* A card with the definition of a glossary word, on hover and on keyboard focus. A touch follows the link instead.
   The definitions come from glossary_words.js (written by the build), the card itself is the theme's own Bootstrap. */
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const words = window.GLOSSARY || {};
  let open = null; // the one card that is open: {link, popover}
  let timer = 0;

  function close() {
    clearTimeout(timer);
    if (open) open.popover.dispose();
    open = null;
  }

  function show(link) {
    clearTimeout(timer);
    if (open && open.link === link) return;
    close();
    const entry = words[decodeURIComponent(link.hash.slice(1))];
    if (!entry || !window.bootstrap) return;
    const popover = new window.bootstrap.Popover(link, {
      animation: false, container: "body", customClass: "glossary-card", html: true, placement: "auto",
      trigger: "manual", title: entry.word, content: entry.html,
    });
    open = { link, popover };
    popover.show();
    const card = document.getElementById(link.getAttribute("aria-describedby"));
    if (!card) return;
    card.addEventListener("mouseenter", () => clearTimeout(timer)); // the pointer may move onto the card
    card.addEventListener("mouseleave", () => later(close));
    if (window.MathJax && window.MathJax.typesetPromise && card.querySelector(".math")) {
      window.MathJax.typesetPromise([card]).then(() => popover.update());
    }
  }

  function later(action) {
    clearTimeout(timer);
    timer = setTimeout(action, 160);
  }

  if (!window.matchMedia("(hover: none)").matches) {
    document.querySelectorAll("a.glossary-term").forEach((link) => {
      link.addEventListener("mouseenter", () => later(() => show(link)));
      link.addEventListener("mouseleave", () => later(close));
      link.addEventListener("focus", () => show(link));
      link.addEventListener("blur", close);
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  }
});
