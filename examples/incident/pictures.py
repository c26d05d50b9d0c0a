"""The pictures of `docs/incident.md`, made by the timeline in a headless browser.

Owns: which moments are pictured, and finding a browser.
Must not know: how anything is drawn.

`python -m examples.incident.pictures` needs Chromium, of the system's package.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.incident.__main__ import FIRST, SECOND
from examples.incident.simulation import simulate
from transport import cli

PICTURES = Path("docs/pictures")
READY = 'document.documentElement.dataset.ready = "yes";'
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str:
    """The command of a browser; ends the program when there is none."""
    for name in BROWSERS:
        found = shutil.which(name)
        if found is not None:
            return found
    sys.exit(f"no browser is installed; looked for {', '.join(BROWSERS)}")


def picture(page: Path, output: Path, *, height: int, action: str = "") -> None:
    """One screenshot, after something was done in the page."""
    text = page.read_text()
    assert READY in text
    moment = page.with_name(f"{output.stem}.html")
    moment.write_text(text.replace(READY, action + READY))
    subprocess.run(  # noqa: S603 - the system's own browser, on a page made here
        [
            browser(),
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            f"--window-size=1280,{height}",
            f"--screenshot={output}",
            "--virtual-time-budget=5000",
            moment.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert output.exists(), "the browser made no picture"


def main() -> None:
    """Make all three."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, setup in (("first", FIRST), ("second", SECOND)):
            log = Path(scratch) / f"{name}.jsonl"
            simulate(setup).log.write(log)
            cli.run(["timeline", str(log), "--output", str(log.with_suffix(".html"))])
        first, second = (Path(scratch) / f"{name}.html" for name in ("first", "second"))
        picture(first, PICTURES.resolve() / "incident-fortnight.png", height=960)
        picture(first, PICTURES.resolve() / "incident-read.png", height=1180, action="worst();")
        picture(second, PICTURES.resolve() / "late-write.png", height=1180, action="worst();")


if __name__ == "__main__":
    main()
