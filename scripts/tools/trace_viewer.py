"""Open Muon's recorded step in the viewer that Chromium ships, and store what it shows: a screenshot for chapter 14.

The viewer is the panel Performance of the developer tools, which reads the same files as Perfetto. Chromium serves it
at its debugging port, so nothing is fetched. Shown is what rank 0 does with its first bucket. Another version of
Chromium may draw its rows elsewhere, so look at the picture before you commit it.

python scripts/tools trace_viewer
"""

import json
import tempfile
from collections import Counter
from io import BytesIO
from pathlib import Path

from distmuon import launch
from muonbook.measure import results, trace
from tools.print_book import installed_browser

PICTURE = results.ROOT / "book" / "figures" / "trace_viewer.png"
STEP = results.FOLDER / "step_muon.json.gz"
PORT = 9377
WIDTH, HEIGHT, SCALE = 400, 900, 2.7  # of the window, as wide as a phone, so that its letters can be read there
ROWS = (42, 63, 84, 105, 126)  # folded threads, from the top of the chart: main, and gloo's of the TP and DP groups
OVERVIEW = -25  # where one drags to zoom, from there as well
SHOWN = 315  # how much of the chart is kept


def first_bucket(rank):
    """Return when rank 0's first gather over DP begins, and when the first gather of parameters after it ends."""
    spans = sorted(rank.ranges, key=lambda span: span.start)
    start = next(span.start for span in spans if span.name == "dp_gather")
    return start, next(span.end for span in spans if span.name == "all_gather" and span.start > start)


def described(rank, start, end):
    """Return the picture's alt text: the moves, and the collectives of every group, between two moments."""
    spans = sorted((span for span in rank.ranges if start <= span.start < end), key=lambda span: span.start)
    moves = ", ".join(dict.fromkeys(span.name for span in spans if span.name in trace.MOVES))
    counts = Counter(each.name for each in rank.collectives if start <= each.when.start < end)
    sent = " and ".join(f"{count} over {name.upper()}" for name, count in sorted(counts.items()))
    return (
        f"Chromium's trace viewer with a step of Muon, rank 0, zoomed to its first bucket. The thread main has spans "
        f"named {moves}, one after the other, with torch's operators below them. The threads of gloo, in rows of their "
        f"own, have a span for each collective: {sent}."
    )


def photograph(browser, file, zoom):
    """Return a PNG of the chart. zoom: two shares of the trace's length."""
    from playwright.sync_api import sync_playwright

    options = ["--headless=new", "--no-sandbox", f"--remote-debugging-port={PORT}", "--remote-allow-origins=*"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, headless=False, args=options)
        page = started.new_page(viewport={"width": 2 * WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        page.goto(f"http://127.0.0.1:{PORT}/devtools/devtools_app.html")
        page.get_by_role("tab", name="Performance").click()  # a narrow window hides it
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.locator("input[type=file]").first.set_input_files(file)
        chart = page.get_by_label("Flame Chart").first
        chart.wait_for()
        for name in ("Close", "Hide sidebar"):  # of the list of keys
            for button in page.get_by_label(name, exact=True).all():
                if button.is_visible():
                    button.dispatch_event("click")
        page.wait_for_timeout(1000)
        top = chart.evaluate("canvas => canvas.getBoundingClientRect().top")
        page.mouse.click(60, top + 25)  # rank 0
        for row in reversed(ROWS):
            page.wait_for_timeout(500)
            page.mouse.click(60, top + row)
        page.mouse.move(zoom[0] * WIDTH, top + OVERVIEW)
        page.mouse.down()
        page.mouse.move(zoom[1] * WIDTH, top + OVERVIEW, steps=9)
        page.mouse.up()
        page.mouse.move(WIDTH - 9, HEIGHT - 9)
        page.wait_for_timeout(2000)
        shot = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": top + SHOWN})
        started.close()
    return shot


def main():
    launch.parser(__doc__).parse_args()
    browser = installed_browser()
    if browser is None:
        raise launch.UsageError("no browser is here to open the trace with; apt-get install chromium.")
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    recorded = trace.load(STEP)
    rank = trace.parse(recorded)[0]
    start, end = first_bucket(rank)
    events = [event for event in recorded["traceEvents"] if event["pid"] == 0]
    moments = [moment for e in events if e["ph"] == "X" for moment in (e["ts"], e["ts"] + e["dur"])]
    length = max(moments) - min(moments)
    zoom = [(moment - min(moments)) / length for moment in (start - 150, end + 150)]
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        file = Path(folder) / "rank_0.json"
        file.write_text(json.dumps(recorded | {"traceEvents": events}), encoding="utf-8")
        shot = photograph(browser, file, zoom)
    words = PngInfo()
    words.add_text("Description", described(rank, start, end))
    Image.open(BytesIO(shot)).convert("RGB").quantize(128).save(PICTURE, optimize=True, pnginfo=words)
    print(f"{PICTURE.relative_to(results.ROOT)}: {PICTURE.stat().st_size / 1e3:.0f} kB. {described(rank, start, end)}")
