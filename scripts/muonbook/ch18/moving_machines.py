"""Two machines train, one dies, both begin again at the last checkpoint: what time went into, step by step.

A row is a rank, a column a step's worth of time. What was done and lost turns grey. Which steps are saved, lost and
done again follows from three numbers; nothing is drawn by hand.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from muonbook.figures.player import Frame
from muonbook.figures.style import ACCENT, INK, MARGIN, MUTED, PADDING, TEXT, WIDTH

from muonbook.figures.style import box, dp_colour, page, put  # isort: skip

STEPS, SAVE_EVERY, DIES_IN = 10, 4, 7
SAVED = (DIES_IN - 1) // SAVE_EVERY * SAVE_EVERY  # the last step saved before the death
MACHINES, RANKS = "ab", 4  # ranks of each machine
WAITING, MEETING = "waits", "meets"  # what a column holds where it is no step
LEFT, STRIP, GAP, DISK = 80.0, 13.0, 16.0, 34.0  # of the first column; a rank's row; between machines; the disk's row


def story() -> list[int | str]:
    """Return what each column of time holds: a step, or what is none."""
    return [*range(1, DIES_IN + 1), WAITING, MEETING, *range(SAVED + 1, STEPS + 1)]


AGAIN = DIES_IN + 2  # the first column after the meeting
LOST = [str(step) for step in range(SAVED + 1, DIES_IN)]
SCENES = (  # how many columns of the story have passed, a title, and what to say
    (
        SAVED,
        "One training, two machines",
        "Four ranks on each. Every few steps they save whole tensors to a disk that both machines see: here after step "
        f"{SAVED}.",
    ),
    (
        DIES_IN - 1,
        "A thread writes, training goes on",
        "Saving holds them up no longer than a copy takes.",
    ),
    (
        DIES_IN,
        f"Machine b dies in step {DIES_IN}",
        "Power, network, a memory error: something in it failed. Machine a is in a collective, and waits for parcels "
        "that nobody will send.",
    ),
    (
        DIES_IN + 1,
        "Machine a times out",
        "A process that dies closes its connections, and its peers fail at once. A machine that vanishes closes "
        "nothing: they fail when the collective's timeout is over.",
    ),
    (
        AGAIN,
        "Both begin again",
        "A loop around torchrun starts it anew, on the old machine or a spare one. When all have met, they load step "
        f"{SAVED}.",
    ),
    (
        AGAIN + len(LOST),
        f"Steps {' and '.join(LOST)} once more",
        "The loss: the steps done since the last checkpoint, and the time spent waiting and meeting again.",
    ),
    (
        len(story()),
        "The same end",
        "A batch depends on its step alone. So the run ends at the bits of one that was never disturbed.",
    ),
)


def frames_of_a_loss() -> list[Frame]:
    """Return the frames of a machine's death and of what follows."""
    return [_frame(*scene) for scene in SCENES]


def _frame(passed: int, title: str, caption: str) -> Frame:
    columns = story()[:passed]
    pitch = (WIDTH - MARGIN - LEFT) / len(story())
    top_of = [42 + machine * (RANKS * STRIP + GAP) for machine in range(len(MACHINES))]
    lost = _lost(columns)

    def paint(axes: Axes, top: float) -> None:
        put(axes, MARGIN, top, title, bold=True, size=TEXT)
        for machine in range(len(MACHINES)):
            put(axes, MARGIN, top + top_of[machine] + RANKS * STRIP / 2 - 7, f"machine {MACHINES[machine]}")
        for number, what in enumerate(columns):
            x = LEFT + pitch * number
            if isinstance(what, int):
                put(axes, x + pitch / 2, top + 22, str(what), "center", color=MUTED)
            for machine in range(len(MACHINES)):
                _column(axes, x, top + top_of[machine], pitch, machine, what, number, number in lost)
        y = top + top_of[-1] + RANKS * STRIP + GAP
        put(axes, MARGIN, y + 4, "disk")
        for number, what in enumerate(columns):
            if _is_saved(what):
                box(axes, LEFT + pitch * number + 1, y, pitch - 2, 20, INK)
                put(axes, LEFT + pitch * (number + 0.5), y + 3, str(what), "center", color="#FFFFFF", bold=True)

    height = top_of[-1] + RANKS * STRIP + GAP + DISK
    return Frame(page([(height, paint)]), _told(title, columns, lost), caption)


def _column(
    axes: Axes, x: float, y: float, pitch: float, machine: int, what: int | str, number: int, lost: bool
) -> None:
    """Paint what the ranks of a machine did in one column of time."""
    dead = machine == 1 and DIES_IN - 1 <= number < DIES_IN + 1
    for rank in range(RANKS):
        place = (x + 1, y + STRIP * rank + 1, (pitch - 2) * (0.5 if dead and what == DIES_IN else 1), STRIP - 2)
        if isinstance(what, int):
            box(axes, *place, PADDING if lost else dp_colour(machine), ec="#FFFFFF", lw=0.5)
        elif not dead:
            box(axes, *place, "none", ec=dp_colour(machine), lw=1.0)
    if dead and what == DIES_IN:
        put(axes, x + pitch * 0.78, y + RANKS * STRIP / 2 - 9, "×", "center", bold=True, color=ACCENT, size=16)


def _lost(columns: list[int | str]) -> set[int]:
    """Return the columns whose steps were lost: those after the last save, once all have met again."""
    if MEETING not in columns:
        return set()
    return set(range(SAVED, DIES_IN))


def _is_saved(what: int | str) -> bool:
    return isinstance(what, int) and (what % SAVE_EVERY == 0 or what == STEPS)


def _told(title: str, columns: list[int | str], lost: set[int]) -> str:
    """Return the alt text: what each column holds."""
    words = {WAITING: "machine a waits", MEETING: "both machines meet"}
    told = [f"step {what}" if isinstance(what, int) else words[what] for what in columns]
    saved = [str(what) for what in columns if _is_saved(what)]
    gone = f" Lost: steps {', '.join(str(columns[n]) for n in sorted(lost))}." if lost else ""
    died = f" Machine b died in step {DIES_IN}." if len(columns) >= DIES_IN else ""
    return f"{title}. Time so far: {', '.join(told)}. Saved: {', '.join(saved)}.{died}{gone}"
