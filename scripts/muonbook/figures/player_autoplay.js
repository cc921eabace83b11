if (play.hidden) {
  show(Number(player.dataset.still));
} else {
  // Starts once, when the stage reaches the middle of the window, unless a reader has touched the player before.
  const watcher = new IntersectionObserver(([stage]) => {
    if (!stage.isIntersecting) return;
    watcher.disconnect();
    start();
  }, { rootMargin: "-30% 0px" });
  for (const act of ["click", "input", "keydown"]) player.addEventListener(act, () => watcher.disconnect());
  watcher.observe(stage);
}
